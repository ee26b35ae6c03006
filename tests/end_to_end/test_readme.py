"""The examples of the README and of docs run exactly as printed, on the number of ranks they ask for."""

# covers README.md docs/usage.md

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.end_to_end.job import ROOT
from tests.forks import run_on_forks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXT = "\n".join(path.read_text() for path in DOCUMENTS)
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
EXPECTED = {
    1: {
        "Simulation(world_size": "20 orders of events, and one result: 6.0",
        "zero.compat.as_deepspeed()": "0.19.8+zcomm.zero",
    },
    2: {
        "print(optimizer.effective)": "stage 3",
        "zero.Init(": "tensor(",
        '"offload_param": {"device": "cpu"}': "states            write",
        "zero.checkpointing.memory(model)": "host=0, files=0, peak_device=8192, peak_host=24576",
        "zero.Publisher(optimizer": "['weight', 'bias'] are those of step 9",
        "engine.save_checkpoint": "resumed from None, now at step 20",
        "steps_per_print": "step=10, skipped=",
        "zero.split_for_muon": "2 matrices by Muon: 2 tensors are updated as a whole",
    },
    4: {
        'format=("int8", "int4")': "reduce_scatter",
        "zcomm.Format(": "int4/64:hadamard",
        "relative_errors": "all_reduce",
        "grad_format": "tokens for this expert; gradient 2.000",
        "install_ddp": "override '2'",
        "install_fsdp2": "gradients int4,int4",
    },
}
"""Number of ranks -> a text that identifies one example -> the text that this example prints."""


@pytest.mark.parametrize("num_ranks", EXPECTED)
def test_examples_run(tmp_path: Path, num_ranks: int) -> None:
    """All examples share one start of the ranks, which takes longer than running them."""
    paths = []
    for number, text in enumerate(EXPECTED[num_ranks]):
        (example,) = (e for e in EXAMPLES if text in e)
        assert len(example.splitlines()) <= 30
        paths.append(tmp_path / f"example{number}.py")
        paths[-1].write_text(example)
    printed = run_on_forks(num_ranks, [[str(path)] for path in paths], cwd=tmp_path, timeout_s=550)
    for expected in EXPECTED[num_ranks].values():
        assert expected in printed


def test_every_example_is_run() -> None:
    texts = [text for expected in EXPECTED.values() for text in expected]
    assert len(EXAMPLES) == len(texts)
    for example in EXAMPLES:
        assert sum(text in example for text in texts) == 1, example
