"""Make the tables of PAGES from bench/results, and the pages of bench/compare.py from their JSON files.

    python tools/results.py             after a benchmark has written new results
    python tools/results.py --check     say what would change; exit code 1 if anything would

A table stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->``; TABLES has the names.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "results.md")
"""Documents with tables."""
sys.path.insert(0, str(ROOT / "bench"))

from comparison.records import Store  # noqa: E402  (bench is a folder of scripts)
from comparison.tables import (  # noqa: E402
    INTERVAL,
    MAIN,
    OVER_HSDP,
    bases,
    markdown,
    num_cores,
    of_accumulation,
    rates,
    rows_of,
    table,
)

NETWORK_COLUMNS = [
    "system", "step, ms", "tokens/s", "against FSDP2", OVER_HSDP, "against the best peer", "wire, MB a node",
    "model states, MiB", INTERVAL,
]  # fmt: skip
SLOWEST_COLUMNS = ["system", "step, ms", "against FSDP2", "against the best peer", "wire, MB a node"]
OFFLOAD_COLUMNS = ["system", "step, ms", "tokens/s", "against the best peer", INTERVAL]
ONE_LINE_COLUMNS = ["system", "step, ms", "tokens/s", "against the best peer", "wire, MB a node", INTERVAL]
MUON_COLUMNS = ["system", "step, ms", "tokens/s", "against the best peer", "wire, MB a node", "distance", INTERVAL]
MACHINE_COLUMNS = [
    "system", "step, ms", "tokens/s", "against FSDP2", "against the best peer", "RSS, MiB", "model states, MiB",
    INTERVAL,
]  # fmt: skip
PARTS_COLUMNS = ["system", "step, ms", "against the best peer", "wire, MB a node", "CPU, s", MAIN, INTERVAL]
MARKED = re.compile(r"(?<=<!-- table: )([\w -]+)( -->\n).*?(?=<!-- end of table -->)", re.DOTALL)

LINK = "bench/results/"
"""Where a table of README.md links to. Pages in a folder get ``../`` before it."""
CONFIGURATIONS = {
    "fp32-ddp": "DDP in float32",
    "bf16-zero3": "no quantization",
    "zeropp-paper": "ZeRO++ in large blocks",
    "zeropp": "smaller blocks, the default",
    "accurate": "",
    "smallest": "",
    "delta-hpz": "",
    "delta-hpz-x4": "the batch in four parts",
    "delta-hpz-exact": "changes without loss",
    "delta-hpz-exact-0.15": "the same, `gradient_error=0.15`",
    "bf16-zero3-muon": "Muon for the matrices",
    "delta-hpz-muon": "Muon for the matrices",
    "delta-hpz-muon-int8": "the same, with wider gradients",
    "ddp-powersgd-4": "DDP with PowerSGD",
    "ddp-powersgd-16": "DDP with PowerSGD",
    "diloco-10": "DiLoCo",
    "diloco-50": "DiLoCo",
}
STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""The two-sided 95 % quantile, by the number of seeds."""


def _compared(file: str, key: str, accumulation: int, columns: Sequence[str]) -> str:
    """One table of a comparison, without ranks that train alone, after a line that names the bases of the ratios."""
    store = Store(RESULTS / f"{file}.json")
    runs = {name: store.run(name) for name in store.values["runs"]}
    rows = of_accumulation(rows_of(key, runs, store.values["memory"]))[accumulation]
    rows = [row for row in rows if not row["system"].startswith("alone")]
    for row in rows:
        row["system"] = f"`{row['system']}`"
    introduction = f"{bases(runs[key], accumulation)} ([{file}.md]({LINK}{file}.md))"
    return "\n".join([introduction, "", *table(rows, columns)])


def _rates(file: str, batch: str, accumulation: int, dtype: str = "bfloat16") -> str:
    """Tokens/s at every rate."""
    store = Store(RESULTS / f"{file}.json")
    runs = {name: store.run(name) for name in store.values["runs"]}
    lines = rates(runs, store.values["memory"], dtype, batch, accumulation, num_cores(store.values["context"]))
    return "\n".join([f"([{file}.md]({LINK}{file}.md))", "", *lines])


def _losses(file: str) -> str:
    """Held-out losses with their standard errors; a difference counts if its error does not explain it."""
    lines = (RESULTS / "convergence" / file).read_text().splitlines()
    found = {cells[0]: cells for line in lines if (cells := [cell.strip() for cell in line.strip("| ").split(" | ")])}
    body = []
    for name, what in CONFIGURATIONS.items():
        if name not in found:
            continue
        _, seeds, loss, difference, sent, *_ = found[name]
        parts = re.findall(r"[+-]?\d+\.\d+", difference)
        counts = "-"
        if len(parts) == 2:  # with one seed nothing can be said, and the baseline is compared with nothing
            counts = "yes" if abs(float(parts[0])) > STUDENT_T[int(seeds)] * float(parts[1]) else "no"
        cells = [f"`{name}`" + (f" ({what})" if what else ""), seeds, loss, difference, counts, sent]
        body.append("| " + " | ".join(cells) + " |")
    head = ["configuration", "seeds", "held-out loss", "minus `bf16-zero3`", "stands out", "model sizes between nodes"]
    return "\n".join(["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *body])


def _to_loss(network: str) -> str:
    """Seconds and bytes to a loss, of the systems that reach it."""
    section = (RESULTS / "to_loss.md").read_text().partition(f"## {network},")[2].partition("## ")[0]
    lines = [
        line for line in section.splitlines() if line.startswith("|") and "| never" not in line and "| no " not in line
    ]
    return "\n".join([f"({network}, [to_loss.md]({LINK}to_loss.md))", "", *lines])


TABLES: dict[str, Callable[[], str]] = {
    "users": lambda: _rates("compare_users", "users", 1),
    "users x4": lambda: _rates("compare_users", "users", 4),
    "users x4 fast": lambda: _compared("compare_users_x4", "bfloat16 users 1gbit", 4, NETWORK_COLUMNS),
    "users steps": lambda: _rates("compare_users_steps", "users", 1),
    "users float32": lambda: _rates("compare_users_float32", "users", 1, "float32"),
    "settings": lambda: _rates("compare_settings", "users", 1),
    "best settings": lambda: _compared("compare_best_settings", "bfloat16 network 200mbit", 1, NETWORK_COLUMNS),
    "more peers": lambda: _compared("compare_more_peers", "bfloat16 users 200mbit", 1, NETWORK_COLUMNS),
    "more peers x4": lambda: _compared("compare_more_peers", "bfloat16 users 200mbit", 4, NETWORK_COLUMNS),
    "small batch": lambda: _compared("compare_small_batch", "float32 network loopback", 1, PARTS_COLUMNS),
    "network": lambda: _compared("compare_13m", "bfloat16 network 200mbit", 1, NETWORK_COLUMNS),
    "network x4": lambda: _compared("compare_13m", "bfloat16 network 200mbit", 4, NETWORK_COLUMNS),
    "steps": lambda: _compared("compare_13m_steps", "bfloat16 network 200mbit", 1, NETWORK_COLUMNS),
    "steps x4": lambda: _compared("compare_13m_steps", "bfloat16 network 200mbit", 4, NETWORK_COLUMNS),
    "machine": lambda: _compared("compare_machine_4", "bfloat16 compute loopback", 1, MACHINE_COLUMNS),
    "machine float32": lambda: _compared("compare_machine_4", "float32 compute loopback", 1, MACHINE_COLUMNS),
    "machine offload": lambda: _compared("compare_machine_offload", "bfloat16 compute loopback", 1, OFFLOAD_COLUMNS),
    "muon": lambda: _compared("compare_machine_muon", "bfloat16 network loopback", 1, MUON_COLUMNS),
    "muon network": lambda: _compared("compare_muon", "bfloat16 network 200mbit", 1, MUON_COLUMNS),
    "slowest": lambda: _compared("compare_13m_10mbit", "bfloat16 network 10mbit", 1, SLOWEST_COLUMNS),
    "one line": lambda: _compared("compare_one_line", "bfloat16 users 100mbit", 1, ONE_LINE_COLUMNS),
    "to loss": lambda: _to_loss("100mbit"),
    "to loss 10mbit": lambda: _to_loss("10mbit"),
    "losses": lambda: _losses("tiny-1500.md"),
    "losses tuned": lambda: _losses("tiny-tuned-1e-5-200.md"),
    "losses tuned 1e-6": lambda: _losses("tiny-tuned-1e-6-200.md"),
    "losses main": lambda: _losses("main-500.md"),
    "losses gpt2": lambda: _losses("gpt2-1500.md"),
}


def with_tables(text: str, to_root: str = "") -> str:
    """Regenerate every marked table of ``text``; ``to_root``: from its page to the root, for links."""

    def table_of(found: re.Match[str]) -> str:
        return f"{found[1]}{found[2]}{TABLES[found[1]]().replace(f']({LINK}', f']({to_root}{LINK}')}\n"

    return MARKED.sub(table_of, text)


def page(store: Store) -> str:
    """The page of a comparison."""
    values: dict[str, Any] = store.values
    return markdown({key: store.run(key) for key in values["runs"]}, values["memory"], values["context"])


def expected() -> dict[Path, str]:
    """The expected text of every generated file."""
    documents = {path: with_tables(path.read_text(), "../" * (len(path.relative_to(ROOT).parts) - 1)) for path in PAGES}
    pages = {path.with_suffix(".md"): page(Store(path)) for path in sorted(RESULTS.glob("compare*.json"))}
    return documents | pages


def main() -> int:
    """Write the files that have changed, or only print their names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    is_check, status = parser.parse_args().check, 0
    for path, text in expected().items():
        if not path.exists() or path.read_text() != text:
            print(f"{'would write' if is_check else 'wrote'} {path.relative_to(ROOT)}")
            status = int(is_check)
            if not is_check:
                path.write_text(text)
    return status


if __name__ == "__main__":
    sys.exit(main())
