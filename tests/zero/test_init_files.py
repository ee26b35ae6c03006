"""zero.Init with shards in files: the same values, no memory, and no files once the optimizer has adopted them."""

# covers zero/_model/init.py zero/_model/init_shards.py zero/_runtime/memory_report.py
# covers zero/_storage/runtime_part.py zero/engine.py

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zero
from tests.ranks import run_ranks
from tests.zero.models import new_model
from tests.zero.training import full_values, train, zero_optimizer


def _config(folder: str) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": folder}}}


def _num_files(folder: str) -> int:
    return len([path for path in Path(folder).rglob("built*") if path.is_file()])


def _check_equals_memory(rank: int, folder: str) -> None:
    options = {"is_tied": True, "has_frozen": True}
    with zero.Init(dtype=torch.bfloat16, ranks_per_node=2):
        expected = new_model(**options)
    with zero.Init(dtype=torch.bfloat16, remote_device="nvme", config_dict_or_path=_config(folder), ranks_per_node=2):
        model = new_model(**options)
    torch.distributed.barrier()
    assert _num_files(folder) > 2 * 8
    shards = [param.zero_shard.bucket.shard for param in model.parameters()]
    assert all(shard.untyped_storage().nbytes() <= 4 and shard.isnan().all() for shard in shards)
    with zero.GatheredParameters([model.norm.weight, expected.norm.weight], modifier_rank=1), torch.no_grad():
        model.norm.weight.add_(rank)
        expected.norm.weight.add_(rank)
    before, wanted = full_values(model), full_values(expected)
    assert all(torch.equal(before[name], wanted[name]) for name in wanted)
    torch.distributed.barrier()
    with zero_optimizer(model, stage=3) as optimizer, zero_optimizer(expected, stage=3) as reference:
        torch.distributed.barrier()
        assert not list(Path(folder).iterdir())
        train(model, optimizer, rank, steps=2)
        train(expected, reference, rank, steps=2)
        trained, wanted = full_values(model), full_values(expected)
        assert all(torch.equal(trained[name], wanted[name]) for name in wanted)


def _check_cast_and_bad_folder(rank: int, folder: str) -> None:
    with zero.Init(remote_device="nvme", config_dict_or_path=_config(folder), ranks_per_node=2):
        model = new_model()
    with zero_optimizer(model, stage=3, bf16={"enabled": True}) as optimizer:
        train(model, optimizer, rank, steps=1)
        assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    missing = str(Path(folder) / "missing") if rank == 1 else folder
    with pytest.raises(OSError if rank == 1 else Exception, match=r"missing|rank 1"):  # noqa: SIM117
        with zero.Init(remote_device="nvme", config_dict_or_path=_config(missing), ranks_per_node=2):
            new_model()
    torch.distributed.barrier()
    assert not list(Path(folder).iterdir())


def test_shards_of_a_model_that_is_built_rest_in_files(tmp_path: Path) -> None:
    run_ranks(2, _check_equals_memory, str(tmp_path))
    run_ranks(2, _check_cast_and_bad_folder, str(tmp_path))
