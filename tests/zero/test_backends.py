"""ZeroOptimizer over backend="nccl", emulated on the CPU, in a job of NCCL alone: every bit equals the torch backend's.

Any agreement of the ranks that used a tensor on an NCCL group would fail here: :mod:`tests.nccl_job`.
"""

# covers zcomm/_base/env.py zcomm/_transport/nccl_communicators.py zcomm/_transport/backend.py

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import zcomm
import zero
from tests.nccl_job import nccl_alone
from tests.ranks import ranks_over, run_ranks
from tests.variables import variables
from tests.zero.models import groups_of, new_model
from tests.zero.training import assert_same_bits, full_values, train
from zcomm import BackendUnavailableError, ConfigError, Topology
from zcomm._transport import nccl_communicators
from zcomm._transport.backend import Hop
from zero import ZeroOptimizer

STEPS = 2
HOST: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
QUANTIZED: dict[str, Any] = {"quantized_weights": True, "quantized_gradients": True}
ZEROPP: dict[str, Any] = QUANTIZED | {"stage": 3, "hpz_partition_size": 2}
DELTA_HPZ: dict[str, Any] = {"stage": 3, "mode": "delta_hpz", "changes": "quantized"}
CASES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1, "gradient_accumulation_steps": 2},
    "stage 2": {"stage": 2, "reduce_bucket_size": 3000, "allgather_bucket_size": 3000},
    "stage 3": {"stage": 3},
    "stage 3, one exchange after another": {"stage": 3, "overlap_comm": False},
    "stage 1, quantized": QUANTIZED | {"stage": 1},
    "stage 2, quantized, accumulating": QUANTIZED | {"stage": 2, "gradient_accumulation_steps": 2},
    "ZeRO++": ZEROPP,
    "ZeRO++, secondary partition on the host": ZEROPP | {"hpz_secondary_device": "cpu"},
    "other formats": {"stage": 3, "weight_format": "int8:asym", "gradient_format": ("nf4/32:hadamard", "int4/96")},
    "delta": {"stage": 2, "mode": "delta", "changes": "quantized"},
    "delta-hpZ": DELTA_HPZ,
    "delta-hpZ, accumulating": DELTA_HPZ | {"gradient_accumulation_steps": 2, "residual_beta": 0.5},
    "frozen weights at rest": {"stage": 3, "quantized_nontrainable_weights": True},
    "states on the host": HOST | {"stage": 1},
    "all on the host": HOST | {"stage": 3, "offload_param": {"device": "cpu"}},
    "delayed update": HOST | {"stage": 2, "delayed_update": True, "delay_start": 1},
}
SAVED = ("stage 3", "delta-hpZ")
"""Saved and loaded in the middle, with a topology of the optimizer's own; the other cases share a topology."""


class _Native:
    """Registers a native communicator while its owner has it."""

    alive: ClassVar[weakref.WeakSet[_Native]] = weakref.WeakSet()
    num_calls: ClassVar[int] = 0

    def __init__(self, native: Any) -> None:
        self._native = native
        _Native.alive.add(self)

    def __getattr__(self, name: str) -> Any:
        _Native.num_calls += 1
        return getattr(self._native, name)


@contextmanager
def _counted() -> Iterator[None]:
    make = nccl_communicators._make

    def counted(hops: Sequence[Hop], device: torch.device) -> Any:
        made = make(hops, device)
        return made._replace(native=_Native(made.native))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nccl_communicators, "_make", counted)
        yield


def _trained(rank: int, options: dict[str, Any], folder: str = "", **others: Any) -> dict[str, Tensor]:
    """Parameters after some steps; with a folder, saved and loaded between them."""
    is_host = "offload_optimizer" in options
    model = new_model(torch.bfloat16, has_frozen="quantized_nontrainable_weights" in options)
    inner = (zero.CPUAdam if is_host else torch.optim.AdamW)(groups_of(model), lr=1e-2)
    optimizer = ZeroOptimizer(model, inner, **options, **others)
    try:
        how: dict[str, Any] = {"num_micro": options.get("gradient_accumulation_steps", 1), "max_norm": 1.0}
        train(model, optimizer, rank, steps=STEPS, **how)
        optimizer.finish_update()
        if folder:
            zero.save_checkpoint(optimizer, folder, "last")
            zero.load_checkpoint(optimizer, folder)
            train(model, optimizer, rank, steps=1, **how)
            optimizer.finish_update()
        return full_values(model)
    finally:
        optimizer.close()


def _check_cases(rank: int, folder: str) -> None:
    of_groups = len(nccl_communicators._OF_GROUPS)  # communicators of earlier tests on the same ranks
    plain = Topology(ranks_per_node=2, backend="torch")
    with nccl_alone(), _counted():
        over_nccl = Topology(ranks_per_node=2, backend="nccl")
    for name, options in CASES.items():
        place = f"{folder}/{name} " if name in SAVED else ""
        expected = _trained(rank, options, place and place + "torch", topology=plain)
        own: dict[str, Any] = {"backend": "nccl", "ranks_per_node": 2}
        num_calls, alive = _Native.num_calls, len(_Native.alive)
        with nccl_alone(), _counted():
            got = _trained(
                rank, options, place and place + "nccl", **(own if name in SAVED else {"topology": over_nccl})
            )
        assert_same_bits(got, expected)
        assert _Native.num_calls > num_calls, f"{name}: nothing went over NCCL"
        if name in SAVED:
            gc.collect()
            assert len(_Native.alive) == alive, f"{name}: communicators that outlive their optimizer"
    plain.close()
    over_nccl.close()
    gc.collect()
    assert not _Native.alive, "communicators that outlive their topology"
    assert len(nccl_communicators._OF_GROUPS) <= of_groups


def test_training_over_nccl_has_the_bits_of_torch(tmp_path: Path) -> None:
    with ranks_over("nccl"):
        run_ranks(4, _check_cases, str(tmp_path))


def _check_refusals(rank: int, probe: str) -> None:
    """On ranks without NCCL each request raises one named error, the same on every rank, and the model is unchanged."""
    given, model = Topology(ranks_per_node=2, kernels="reference"), new_model()
    before = [param.detach().clone() for param in model.parameters()]

    def construct(**options: Any) -> ZeroOptimizer:
        return ZeroOptimizer(model, torch.optim.AdamW(groups_of(model), lr=1e-2), stage=2, **options)

    cpu = "backend='nccl' does not serve this training: it takes CUDA tensors, got device=cpu; use backend='torch'"
    named, delta = {"topology": given}, {"mode": "delta"}
    for error, words, options in (
        (BackendUnavailableError, cpu, {"backend": "nccl"}),
        (BackendUnavailableError, cpu, {"config": {"zcomm": {"backend": "nccl"}}}),
        (BackendUnavailableError, "kernels='cuda' do not serve this training", {"kernels": "cuda"}),
        (ConfigError, "backend='nccl', but the given topology has backend='torch'", {"backend": "nccl"} | named),
        (ConfigError, "kernels='native', but the given topology has", {"kernels": "native"} | named),
        (ConfigError, "backend must be one of auto, torch, nccl: backend='gloo'", {"backend": "gloo"}),
        (ConfigError, "weight_format='auto' is not combined with mode='delta'", {"weight_format": "auto"} | delta),
    ):
        with pytest.raises(error, match=words):
            construct(**options)
    with pytest.raises(BackendUnavailableError, match="takes CUDA tensors"):  # the error of rank 1, on every rank
        construct(backend="nccl" if rank == 1 else "torch")
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    kept = construct(topology=given)
    assert (kept.effective.backend, kept.effective.kernels) == ("torch", "reference")
    assert "backend torch, kernels reference" in str(kept.effective)
    kept.close()
    given.close()
    _check_automatic_formats(rank, probe)


def _check_automatic_formats(rank: int, probe: str) -> None:
    """Every rank uses the format that the first rank's probe found fastest for the largest exchange."""
    both = {"weight_format": "auto", "gradient_format": "auto", "ranks_per_node": 2}
    with variables(ZCOMM_PROBE=probe if rank == 0 else "/no/such/file"):
        for stage, weights, gradients in (
            (0, "none", None),
            (2, "int8", ("int8", "nf4")),
            (3, "int8", ("int8", "nf4")),
        ):
            model = new_model()
            optimizer = ZeroOptimizer(model, torch.optim.AdamW(groups_of(model), lr=1e-2), stage=stage, **both)
            effective = optimizer.effective
            assert (effective.weight_format, effective.gradient_formats) == (weights, gradients)
            with zcomm.traffic() as sent:
                train(model, optimizer, rank, steps=1)
            formats = {key.format for key in sent.counts}
            assert ({"int8", "nf4"} <= formats) == (stage > 0), formats
            if stage:
                assert "weight_format auto: int8 for " in str(effective)
                assert "gradient_format auto: int8,nf4 for " in str(effective)
            optimizer.close()


def test_what_cannot_be_is_one_error_on_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    choices = {"all_gather": [[64, "int8", 2]], "reduce_scatter": [[64, "int8+nf4", 2]]}
    table = {"device": "cpu", "choices": choices}
    path.write_text(json.dumps({"version": 1, "topologies": {"2x2 on 1 host": table}}))
    run_ranks(4, _check_refusals, str(path))
