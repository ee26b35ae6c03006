"""Bucket sizes, overlap, stage and repetition do not change a bit of the result, even with quantization."""

# covers zero/optimizer.py

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import run_ranks
from tests.zero.training import assert_same_bits, train_and_collect

ZEROPP: dict[str, Any] = {"quantized_weights": True, "quantized_gradients": True, "ranks_per_node": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "again": {},
    "tiny buckets": {"reduce_bucket_size": 1, "allgather_bucket_size": 1},
    "odd buckets": {"reduce_bucket_size": 1500, "allgather_bucket_size": 2777},
    "no overlap": {"overlap_comm": False},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "hpZ": {"hpz_partition_size": 2},
    "kept, small ones whole": {"stage3_max_reuse_distance": 10**9, "stage3_param_persistence_threshold": 60},
    "hpZ, in parts, small ones whole": {
        "hpz_partition_size": 2,
        "stage3_prefetch_bucket_size": 1,
        "stage3_max_live_parameters": 1,
        "stage3_max_reuse_distance": 2000,
        "stage3_param_persistence_threshold": 60,
        "allgather_bucket_size": 1500,
    },
    "hpZ, tiny buckets, no overlap": {"hpz_partition_size": 2, "allgather_bucket_size": 1, "overlap_comm": False},
}


def _train(rank: int, dtype: torch.dtype, **variant: Any) -> dict[str, Tensor]:
    return train_and_collect(rank, **ZEROPP | {"stage": 3, "dtype": dtype, "steps": 4} | variant)


@cache
def _expected(rank: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Trained once on each rank; the variant "again" is the repetition."""
    return _train(rank, dtype)


def _check_same_bits(rank: int, variant: dict[str, Any], dtype: torch.dtype) -> None:
    assert_same_bits(_train(rank, dtype, **variant), _expected(rank, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("name", VARIANTS)
def test_same_bits(name: str, dtype: torch.dtype) -> None:
    run_ranks(4, _check_same_bits, VARIANTS[name], dtype)


def _check_ranks_agree(rank: int, options: dict[str, Any]) -> None:
    values = train_and_collect(rank, steps=1, dtype=torch.bfloat16, **options)
    mine = torch.cat([value.flatten().view(torch.uint8) for value in values.values()])
    of_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, mine)
    assert all(torch.equal(other, mine) for other in of_ranks)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("options", [{"ranks_per_node": 2}, ZEROPP], ids=["plain", "ZeRO++"])
def test_ranks_hold_the_same_bits(stage: int, options: dict[str, Any]) -> None:
    run_ranks(4, _check_ranks_agree, options | {"stage": stage})
