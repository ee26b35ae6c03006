"""The contenders in other settings train as they do without them."""

# covers bench/contenders/fsdp2.py bench/contenders/zero_optimizer.py bench/contenders/job.py

from __future__ import annotations

from argparse import Namespace
from contextlib import nullcontext
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


@pytest.mark.parametrize(
    ("capability", "products"), [("AVX512", torch.bfloat16), ("AVX2", torch.float32), ("DEFAULT", torch.float32)]
)
def test_products_are_computed_in_a_dtype_that_the_cpu_is_fast_at(
    monkeypatch: pytest.MonkeyPatch, capability: str, products: torch.dtype
) -> None:
    seen: list[torch.dtype] = []
    plain = torch.nn.functional.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else weight.dtype)
        return plain(x, weight, bias)

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    for in_16_bits in (True, False):  # with masters, as this library has, and with float32 parameters, as DDP has
        setup = new_setup(JOB, "bfloat16", CPU)
        model = setup.model.to(torch.bfloat16) if in_16_bits else setup.model
        with nullcontext() if in_16_bits else setup.autocast():
            model(*batch(JOB, 0, 0, CPU))
    assert set(seen) == {products}
