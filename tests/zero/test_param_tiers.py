"""offload_param at stage 3: the same bits on every tier, each rank moves its part, errors reach all ranks."""

# covers zero/_storage/file_store.py zero/_storage/transfer_counters.py zero/utils.py

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor

import zcomm
from tests.covering import covering_set
from tests.ranks import run_ranks
from tests.zero.models import batch, loss_of, new_model
from tests.zero.training import assert_same_bits, full_values, train, train_and_collect, zero_optimizer
from zero import GatheredParameters, ZeroOptimizer, load_checkpoint, save_checkpoint
from zero._storage import file_store
from zero._storage.transfer_counters import moved
from zero.utils import safe_get_full_fp32_param, safe_get_local_fp32_param, safe_set_full_fp32_param

MODEL = {"has_frozen": True, "has_unused": True}


def offload(tier: str, folder: str) -> dict[str, Any]:
    """``offload_param``; "mixed": what does not fit into host memory goes to files, in tiny buffers."""
    if tier in ("cpu", "none"):
        return {"device": tier}
    limits = {"max_in_cpu": 0} if tier == "nvme" else {"max_in_cpu": 2000, "buffer_size": 600, "buffer_count": 2}
    return {"device": "nvme", "nvme_path": folder, **limits}


def check_same_bits(rank: int, folder: str, cases: list[dict[str, Any]], ranks_per_node: int) -> None:
    known: dict[str, dict[str, torch.Tensor]] = {}
    for case in cases:
        options = {"stage": 3, "ranks_per_node": ranks_per_node, **case}
        tier, num_micro = options.pop("tier"), options.pop("num_micro")
        options |= {"gradient_accumulation_steps": num_micro, "model_options": MODEL, "loop": {"num_micro": num_micro}}

        def values(tier: str, options: dict[str, Any] = options) -> dict[str, torch.Tensor]:
            return train_and_collect(rank, steps=2, offload_param=offload(tier, folder), **options)

        key = repr(sorted((name, v) for name, v in options.items() if name != "hpz_secondary_device"))
        if key not in known:
            known[key] = values("none")
        assert_same_bits(known[key], values(tier))
    assert not list(Path(folder).glob(f"*rank{rank}"))


def test_the_bits_do_not_depend_on_where_parameters_rest(tmp_path: Path) -> None:
    factors = {
        "tier": ["cpu", "nvme", "mixed"],
        "dtype": [torch.float32, torch.bfloat16],
        "num_micro": [1, 2],
        "zero_quantized_weights": [False, True],
        "zero_quantized_gradients": [False, True],
        "stage3_param_persistence_threshold": [0, 100],
        "overlap_comm": [True, False],
    }
    run_ranks(2, check_same_bits, str(tmp_path), covering_set(factors, 2), 2)


def test_the_bits_do_not_depend_on_where_the_secondary_partition_rests(tmp_path: Path) -> None:
    switches = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": 2}
    cases = [
        {"tier": tier, "hpz_secondary_device": secondary, "dtype": dtype, "num_micro": 2, **switches}
        for tier, secondary, dtype in (
            ("cpu", "cpu", torch.float32),
            ("nvme", "cpu", torch.bfloat16),
            ("nvme", "device", torch.bfloat16),
        )
    ]
    run_ranks(4, check_same_bits, str(tmp_path), cases, 2)


class Deep(nn.Module):
    """Equal layers, each larger than everything else."""

    def __init__(self, width: int = 128, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def live_nbytes() -> int:
    """Bytes of all tensors in this process."""
    gc.collect()
    with torch._C.DisableTorchFunctionSubclass():
        tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
        storages = [t.untyped_storage() for t in tensors if _has_memory(t)]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def _has_memory(tensor: torch.Tensor) -> bool:
    """Fake tensors, which torch.compile leaves behind, have no memory; other tests' sparse ones have no storage."""
    is_fake = isinstance(tensor, FakeTensor) or torch._is_functional_tensor(tensor)
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and not is_fake


def check_moved_bytes(rank: int, folder: str) -> None:
    live = {}
    for tier in ("none", "cpu", "nvme"):
        torch.manual_seed(0)
        model = Deep().to(torch.bfloat16).requires_grad_(tier != "none")  # the baseline has no gradients either
        model.layers[0].requires_grad_(True)
        model.layers[1:].requires_grad_(False)
        offloaded = offload(tier, folder) | ({"buffer_size": 9000, "buffer_count": 1} if tier == "nvme" else {})
        with zero_optimizer(model, torch.optim.SGD, lr=0.1, stage=3, offload_param=offloaded) as optimizer:
            shard_nbytes = sum(b.layout.shard_numel * 2 for b in optimizer.parts.runtime.buckets)
            x = torch.randn(2, 128, dtype=torch.bfloat16)
            for _ in range(2):
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            with moved() as m, zcomm.traffic() as traffic:
                model(x).sum().backward()
            optimizer.zero_grad()
            sent = traffic.bytes(operation="all_gather")  # on two ranks: this rank's own part, counted once
            report = optimizer.memory()
            assert sum(report.shards.values()) >= shard_nbytes
            if tier == "none":
                assert not m.counts
                assert report.shards["device"] == shard_nbytes
                continue
            live[tier] = live_nbytes()
            assert m.bytes(kind="parameters", link="to_device") == sent > 1.5 * shard_nbytes
            assert report.shards[tier] == sum(report.shards.values())
            if tier == "nvme":
                num_pages = m.bytes(link="read") // 4096
                assert sent <= num_pages * 4096 <= 1.4 * sent + 4 * 4096  # the rest of the last pages, and two ahead
                assert report.parameters == 0
                assert report.buffers["parameters on their way"] <= 4 * 5 * 4096  # a few of 5 pages each
                assert live["nvme"] <= live["cpu"] - 0.4 * shard_nbytes, (live, shard_nbytes, report)


def test_each_rank_moves_its_slice_and_keeps_nothing_in_memory(tmp_path: Path) -> None:
    run_ranks(2, check_moved_bytes, str(tmp_path))


def check_slices(rank: int, folder: str) -> None:
    """Layers whose shards are whole pages: each forward reads exactly this rank's part of every layer, once."""
    world_size, width, reads = torch.distributed.get_world_size(), 256, Counter[str]()
    model = Deep(width)
    for layer in model.layers:
        layer.bias = None
    x = torch.ones(1, width)
    with zero_optimizer(model, torch.optim.SGD, lr=0.1, stage=3, offload_param=offload("nvme", folder)) as optimizer:
        store = optimizer.parts.runtime.parameter_storage._staging.store
        read = store.read

        def counted(file: Any, offset: int, buffer: torch.Tensor) -> Any:
            reads[file.path.name] += buffer.numel()
            return read(file, offset, buffer)

        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            model(x)
            model(x)  # from here on each forward reads at its end what the next one needs first
            patch.setattr(store, "read", counted)
            with moved() as window:
                model(x)
        of_layer = width * width * 4 // world_size
        assert sorted(reads.values()) == [of_layer] * len(model.layers)
        assert window.bytes(kind="parameters", link="read") == of_layer * len(model.layers)
        assert window.bytes(kind="parameters", link="to_device") == of_layer * len(model.layers)
        assert window.bytes() == 2 * of_layer * len(model.layers)


@pytest.mark.parametrize("world_size", [2, 4])
def test_each_rank_reads_its_part_of_every_parameter(tmp_path: Path, world_size: int) -> None:
    run_ranks(world_size, check_slices, str(tmp_path))


def check_access(rank: int, folder: str, checkpoint: str) -> None:
    results = []
    for tier in ("none", "nvme"):
        model = new_model(torch.bfloat16, **MODEL)
        options = {"stage": 3, "zero_quantized_weights": True, "offload_param": offload(tier, folder)}
        with zero_optimizer(model, **options) as optimizer:
            train(model, optimizer, rank, steps=1)
            params = dict(model.named_parameters())
            frozen, trained = params["blocks.1.mlp.0.weight"], params["shared.weight"]
            for param in (frozen, trained):
                safe_set_full_fp32_param(param, safe_get_full_fp32_param(param) + 1)
                with GatheredParameters([param], modifier_rank=1):
                    if rank == 1:
                        param.data.view(-1)[:3] = 2.0
            seen = {f"state_dict.{k}": v for k, v in model.state_dict().items()}
            seen["local"] = safe_get_local_fp32_param(frozen)
            with torch.no_grad():
                seen["output"] = model(batch(0, 0, rank)[0])
            save_checkpoint(optimizer, checkpoint, tier)
            with GatheredParameters([frozen, trained], modifier_rank=0):
                frozen.data.zero_()
                trained.data.zero_()
            load_checkpoint(optimizer, checkpoint, tier)
            train(model, optimizer, rank, steps=1)
            model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()})
            seen |= full_values(model)
            results.append(seen)
    assert_same_bits(*results)


def test_whoever_reads_or_writes_shards_finds_them(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    run_ranks(2, check_access, str(tmp_path / "files"), str(tmp_path / "checkpoints"))


def damage(optimizer: ZeroOptimizer, name: str) -> None:
    """Change a byte of the file that stores this rank's part of a parameter."""
    folder = optimizer.parts.runtime.parameter_storage._staging.store.folder
    info = dict(optimizer.parts.runtime.model.named_parameters())[name].zero_shard
    with (folder / f"bucket{info.bucket.index}").open("r+b") as file:
        content = bytearray(file.read())
        at = next(i for i in range(4096, len(content)) if content[i]) if len(content) > 8192 else 0
        file.seek(at)
        file.write(bytes([content[at] ^ 1]))


def check_faults(rank: int, folder: str) -> None:
    expected = train_and_collect(rank, steps=3, dtype=torch.bfloat16, stage=3)
    model = new_model(torch.bfloat16)
    with zero_optimizer(model, stage=3, offload_param=offload("nvme", folder)) as optimizer:
        train(model, optimizer, rank, steps=1)
        for step in (1, 2):
            if rank == 1:
                damage(optimizer, "blocks.2.mlp.0.weight")
            with pytest.raises((OSError, zcomm.StateError), match=r"rank 1: .*bucket|bucket"):
                loss_of(model, *batch(step, 0, rank)).backward()
            optimizer.zero_grad()
            param = model.blocks[2].mlp[0].weight
            safe_set_full_fp32_param(param, safe_get_full_fp32_param(param))  # written again
            loss_of(model, *batch(step, 0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same_bits(expected, full_values(model))


def check_damaged_access(rank: int, folder: str) -> None:
    """A block got NaN for values that could not be read: found by simulation (training, seed 20261126002493)."""
    model = new_model()
    with zero_optimizer(model, stage=3, offload_param=offload("nvme", folder)) as optimizer:
        if rank == 1:
            damage(optimizer, "blocks.2.mlp.0.weight")
        for access in (lambda: gathered_sum(model), model.state_dict):
            with pytest.raises((OSError, zcomm.StateError), match=r"rank 1: .*bucket|bucket"):
                access()
        gathered_sum(model.blocks[0])


def gathered_sum(module: nn.Module) -> float:
    with GatheredParameters(module.parameters()):
        return sum(param.sum().item() for param in module.parameters())


def check_refusals(rank: int, folder: str) -> None:
    for path, free, words in (
        (f"{folder}/none", None, "No such file"),
        (folder, 5000, "bytes are needed and 5000 are"),
    ):
        model = new_model()
        with pytest.MonkeyPatch.context() as patch:
            if free is not None and rank == 1:
                patch.setattr(file_store, "_free_nbytes", lambda _, free=free: free)
            expected = pytest.raises((OSError, zcomm.StateError), match=words)
            with expected, zero_optimizer(model, stage=3, offload_param=offload("nvme", path)):
                pass
        assert not list(Path(folder).glob(f"*rank{rank}"))
        loss_of(model, *batch(0, 0, rank)).backward()  # the model is full again


def test_what_goes_wrong_with_files_is_raised_on_every_rank(tmp_path: Path) -> None:
    run_ranks(2, check_faults, str(tmp_path))
    run_ranks(2, check_damaged_access, str(tmp_path))
    run_ranks(2, check_refusals, str(tmp_path))
