"""The contenders in other settings train as they do without them."""

# covers bench/contenders/fsdp2.py bench/contenders/zero_optimizer.py

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.end_to_end.job import ROOT
from tests.ranks import run_ranks, topology

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "bench"))
    from contenders.catalogue import build
    from contenders.job import SHAPE, batch, new_setup

CPU = torch.device("cpu")
JOB = Namespace(**SHAPE | {"num_layers": 2, "hidden_size": 32, "seq_length": 16})


def _trained(name: str, rank: int, folder: str) -> list[Tensor]:
    setup = replace(new_setup(JOB, "float32", CPU, topology(2)), folder=folder)
    contender = build(name, setup)
    for step in range(3):
        contender.step(*batch(JOB, step, rank, CPU))
    weights = [weight.clone() for weight in contender.weights()]
    contender.close()
    return weights


def _check(rank: int, folder: str) -> None:
    for name, plain in (
        ("fsdp2 reshard=False all-to-all", "fsdp2 reshard=False"),
        ("fsdp2 reshard=True all-to-all", "ddp"),
    ):
        for got, expected in zip(_trained(name, rank, folder), _trained(plain, rank, folder), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5)
    in_files = _trained("zero stage 3 nvme states small whole", rank, folder)
    assert all(map(torch.equal, in_files, _trained("zero stage 3 offload small whole", rank, folder)))


def test_settings_change_no_weights(tmp_path: Path) -> None:
    run_ranks(4, _check, str(tmp_path))
