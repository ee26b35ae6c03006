"""The README's Python examples run as it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.job import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    ("text", "num_ranks", "printed"),
    [
        ("ZeroOptimizer(", 2, "stage 3"),
        ("save_checkpoint", 2, "resumed from None, now at step 20"),
        ("deepspeed.initialize", 2, "step=10, skipped="),
        ('format=("int8", "int4")', 4, "reduce_scatter"),
        ("zcomm.Format(", 4, "int4/64:hadamard"),
        ("relative_errors", 4, "all_reduce"),
        ("install_ddp", 4, "override '2'"),
        ("install_fsdp2", 4, "gradients int4,int4"),
    ],
)
def test_example_runs(tmp_path: Path, text: str, num_ranks: int, printed: str) -> None:
    (example,) = (e for e in EXAMPLES if text in e)
    path = tmp_path / "example.py"
    assert len(example.splitlines()) <= 30
    path.write_text(example)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    done = subprocess.run(
        [*torchrun, str(path)], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert printed in done.stdout + done.stderr
