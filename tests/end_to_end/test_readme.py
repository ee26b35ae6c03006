"""The README's examples run as they are printed, on the ranks they ask for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.job import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
EXPECTED = {
    2: {
        "print(optimizer.effective)": "stage 3",
        "zero.Init(": "tensor(",
        "save_checkpoint": "resumed from None, now at step 20",
        "steps_per_print": "step=10, skipped=",
    },
    4: {
        'format=("int8", "int4")': "reduce_scatter",
        "zcomm.Format(": "int4/64:hadamard",
        "relative_errors": "all_reduce",
        "install_ddp": "override '2'",
        "install_fsdp2": "gradients int4,int4",
    },
}
"""Number of ranks -> what is in one example alone -> what that prints."""
RUNNER = """\
import os, runpy, sys
port = int(os.environ["MASTER_PORT"])
os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # a store for each, as each has when it runs alone
for number, path in enumerate(sys.argv[1:], 1):
    os.environ["MASTER_PORT"] = str(port + number)
    runpy.run_path(path, run_name="__main__")
"""


@pytest.mark.parametrize("num_ranks", EXPECTED)
def test_examples_run(tmp_path: Path, num_ranks: int) -> None:
    """One start of the ranks for all examples: starting them takes longer than running them."""
    paths = []
    for number, text in enumerate(EXPECTED[num_ranks]):
        (example,) = (e for e in EXAMPLES if text in e)
        assert len(example.splitlines()) <= 30
        paths.append(tmp_path / f"example{number}.py")
        paths[-1].write_text(example)
    runner = tmp_path / "runner.py"
    runner.write_text(RUNNER)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    done = subprocess.run(
        [*torchrun, str(runner), *map(str, paths)],
        cwd=tmp_path, capture_output=True, text=True, timeout=220, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    for expected in EXPECTED[num_ranks].values():
        assert expected in done.stdout + done.stderr


def test_every_example_is_run() -> None:
    texts = [text for expected in EXPECTED.values() for text in expected]
    assert len(EXAMPLES) == len(texts)
    for example in EXAMPLES:
        assert sum(text in example for text in texts) == 1, example
