"""``activation_checkpointing`` of the JSON on models that call torch.utils.checkpoint: no other section is needed."""

# covers zero/_activations/activation_settings.py zero/_activations/checkpointed_call.py
# covers zero/_activations/file_storage.py

from __future__ import annotations

import copy
import gc
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero
from tests.ranks import device_mesh, run_ranks
from tests.zero.logs import logged
from tests.zero.training import full_values
from zcomm import ConfigError, IntegrityError, LayoutError, StateError
from zero import ZeroOptimizer
from zero._activations.activation_settings import ActivationSettings
from zero._activations.file_storage import FileInputStorage
from zero._storage.tier_settings import Tier
from zero._storage.transfer_counters import moved

WIDTH, BATCH, NUM_BLOCKS = 32, 16, 4
NBYTES = 4 * WIDTH * BATCH
SECTIONS: tuple[dict[str, Any], ...] = (
    {"cpu_checkpointing": True},
    {"contiguous_memory_optimization": True, "number_checkpoints": 2},
    {"contiguous_memory_optimization": True, "cpu_checkpointing": True, "number_checkpoints": 4, "profile": True},
    {"partition_activations": True, "synchronize_checkpoint_boundary": True},
)


class Block(nn.Module):
    """A residual MLP with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 40), nn.GELU(), nn.Dropout(0.3), nn.Linear(40, WIDTH))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + self.mlp(self.norm(x)) * scale


class Net(nn.Module):
    """Blocks that run under torch's checkpoint of either kind, or without one."""

    def __init__(self, use_reentrant: bool | None) -> None:  # noqa: FBT001
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        for block in self.blocks:
            if self.use_reentrant is None or not self.training:
                hidden = block(hidden, 0.5)
            else:
                hidden = checkpoint(block, hidden, 0.5, use_reentrant=self.use_reentrant)
        return hidden.square().mean()


def _data(rank: int, step: int) -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


@contextmanager
def _optimizer(model: nn.Module, section: dict[str, Any], stage: int = 1, **options: Any) -> Iterator[ZeroOptimizer]:
    config = {"zero_optimization": {"stage": stage}, "activation_checkpointing": section}
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, lr=1e-2, config=config, **options)
    try:
        yield optimizer
    finally:
        optimizer.close()


def _train(model: Net, optimizer: ZeroOptimizer, rank: int, steps: int = 2) -> dict[str, Tensor]:
    """Parameters, and the losses."""
    torch.manual_seed(100 + rank)
    losses = []
    for step in range(steps):
        for micro in range(2):
            loss = model(_data(rank, 2 * step + micro))
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses.append(model(_data(rank, step)))
        model.train()
    return {**full_values(model), "losses": torch.stack(losses)}


def _assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert [name for name in expected if not torch.equal(got[name], expected[name])] == []


def _check_stages(rank: int) -> None:
    for stage in range(4):
        model = Net(None)
        with _optimizer(model, {}, stage) as optimizer:
            expected = _train(model, optimizer, rank)
        for section, use_reentrant in itertools.product(SECTIONS, (False, True)):
            model = Net(use_reentrant)
            with _optimizer(model, section, stage) as optimizer:
                _assert_same(_train(model, optimizer, rank), expected)
                if not section.get("partition_activations"):
                    memory = zero.checkpointing.memory(model)
                    assert (memory.device, memory.host) == (0, 0)
                    peak = memory.peak_host if section.get("cpu_checkpointing") else memory.peak_device
                    assert peak == NUM_BLOCKS * NBYTES


def test_bits_are_those_without_checkpoints_at_every_stage() -> None:
    run_ranks(2, _check_stages)


class Split(Net):
    """Each block's inner width is split over ``group``: dropout differs by rank, activations between blocks do not."""

    def __init__(self, use_reentrant: bool | None, group: Any) -> None:  # noqa: FBT001
        super().__init__(use_reentrant)
        for block in self.blocks:
            block.mlp.append(_Sum(group))
            block.mlp.insert(0, _Copy(group))


class _AllReduced(torch.autograd.Function):
    """The sum over ranks, in forward or in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, in_forward: bool) -> Tensor:  # noqa: FBT001
        ctx.group, ctx.in_forward = group, in_forward
        return _summed(x, group) if in_forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (grad if ctx.in_forward else _summed(grad, ctx.group)), None, None


def _summed(x: Tensor, group: Any) -> Tensor:
    x = x.contiguous().clone()
    torch.distributed.all_reduce(x, group=group)
    return x


class _Sum(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group, self.in_forward = group, True

    def forward(self, x: Tensor) -> Tensor:
        return _AllReduced.apply(x, self.group, self.in_forward)  # type: ignore[no-any-return]


class _Copy(_Sum):
    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self.in_forward = False


def _check_partition(rank: int) -> None:
    mesh = device_mesh((1, 4), ("dp", "tp"))
    group = mesh.get_group("tp")
    model = Split(None, group)
    with _optimizer(model, {}, group=mesh) as optimizer:
        expected = _train_split(model, optimizer, rank)
    peaks = []
    sections = [{}, {"cpu_checkpointing": True}, {"contiguous_memory_optimization": True, "number_checkpoints": 4}]
    for section, use_reentrant in itertools.product(sections, (False, True)):
        model = Split(use_reentrant, group)
        with _optimizer(model, {"partition_activations": True, **section}, group=mesh) as optimizer:
            _assert_same(_train_split(model, optimizer, rank), expected)
            memory = zero.checkpointing.memory(model)
            peaks.append(memory.peak_host if "cpu_checkpointing" in section else memory.peak_device)
    assert set(peaks) == {NUM_BLOCKS * NBYTES // 4}
    assert max(peaks) <= 0.27 * NUM_BLOCKS * NBYTES


def _train_split(model: Split, optimizer: ZeroOptimizer, rank: int) -> dict[str, Tensor]:
    """Tensor-parallel ranks have the same data and default generator, and a generator each for dropout."""
    zero.checkpointing.model_parallel_cuda_manual_seed(0)
    zero.checkpointing.get_cuda_rng_tracker().reset()
    zero.checkpointing.get_cuda_rng_tracker().add("model-parallel-rng", rank)
    for block in model.blocks:
        block.mlp[3].forward = _forked_dropout
    return _train(model, optimizer, 0)


def _forked_dropout(x: Tensor) -> Tensor:
    with zero.checkpointing.get_cuda_rng_tracker().fork():
        return nn.functional.dropout(x, 0.3)


def test_partitioned_checkpoints_take_a_part_of_the_memory() -> None:
    run_ranks(4, _check_partition)


def _check_odd_sizes_and_differing_inputs(rank: int) -> None:
    mesh = device_mesh((1, 4), ("dp", "tp"))
    zero.checkpointing.configure(mesh, partition_activations=True)
    weight = torch.randn(37, 37, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for shape in ((7, 37), (9, 37), (31, 37)):  # 259, 333 and 1147 elements: parts are padded
        x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        expected = torch.autograd.grad((x @ weight).sin().sum(), weight)[0]
        y = zero.checkpoint(lambda x: (x @ weight).sin(), x)
        assert torch.equal(torch.autograd.grad(y.sum(), weight)[0], expected)
    zero.checkpointing.configure(mesh, partition_activations=True)
    for values in (torch.full((40, 37), float(rank)), torch.ones(40 + rank, 37)):
        with pytest.raises(LayoutError, match=r"must be the same on all tensor-parallel ranks.*partition_activations"):
            zero.checkpoint(lambda x: (x @ weight).sin(), values)
    overflow = torch.full((40, 37), float("nan"))
    zero.checkpoint(lambda x: (x @ weight).sin(), overflow).sum().backward()
    zero.checkpointing.configure()


def test_parts_of_odd_sizes_and_inputs_that_differ() -> None:
    run_ranks(4, _check_odd_sizes_and_differing_inputs)


def _check_scopes(rank: int) -> None:
    """Two models with different settings, a third without, and a copy keep their own; nothing remains after the end."""
    originals = torch_checkpoint.CheckpointFunction, torch_checkpoint._checkpoint_without_reentrant_generator
    models = [Net(False) for _ in range(3)]
    first = ZeroOptimizer(models[0], torch.optim.SGD, lr=0.1, activation_checkpointing=SECTIONS[0])
    second = ZeroOptimizer(models[1], torch.optim.SGD, lr=0.1, activation_checkpointing=SECTIONS[1])
    copied = copy.deepcopy(models[0])
    losses = [model(_data(rank, 0)) for model in (*models, copied)]
    assert _held(models[0]) == (0, NUM_BLOCKS * NBYTES)
    assert _held(models[1]) == (NUM_BLOCKS * NBYTES, 0)
    sum(losses).backward()  # type: ignore[union-attr]
    del losses
    assert _held(models[0]) == _held(models[1]) == (0, 0)
    loss = models[0](_data(rank, 0))
    with pytest.raises(TypeError):
        models[1](None)  # its forward raises: the scope must end, too
    loss.backward()
    checkpoint(models[2].blocks[0], _data(rank, 0), use_reentrant=False).sum().backward()
    assert _held(models[0]) == _held(models[1]) == (0, 0)
    first.close()
    assert torch_checkpoint.CheckpointFunction is not originals[0]
    second.close()
    assert originals == (torch_checkpoint.CheckpointFunction, torch_checkpoint._checkpoint_without_reentrant_generator)
    models[0](_data(rank, 0)).backward()
    gc.collect()


def _held(model: nn.Module) -> tuple[int, int]:
    memory = zero.checkpointing.memory(model)
    return memory.device, memory.host


def test_models_keep_to_themselves() -> None:
    run_ranks(2, _check_scopes)


class Nested(Net):
    """Checkpoints inside checkpoints, of both kinds."""

    def forward(self, x: Tensor) -> Tensor:
        if self.use_reentrant is None or not self.training:
            return super().forward(x)
        hidden = self.embedding(x)
        for first, second in ((0, 1), (2, 3)):
            hidden = checkpoint(self._two, first, second, hidden, use_reentrant=self.use_reentrant)
        return hidden.square().mean()

    def _two(self, first: int, second: int, hidden: Tensor) -> Tensor:
        hidden = checkpoint(self.blocks[first], hidden, 0.5, use_reentrant=not self.use_reentrant)
        return zero.checkpoint(self.blocks[second], hidden, scale=0.5)


def _check_nested(rank: int) -> None:
    model = Nested(None)
    with _optimizer(model, {}, 3) as optimizer:
        expected = _train(model, optimizer, rank)
    for section, use_reentrant in itertools.product(SECTIONS[:2], (False, True)):
        model = Nested(use_reentrant)
        with _optimizer(model, section, 3) as optimizer:
            _assert_same(_train(model, optimizer, rank), expected)


def test_nested_checkpoints() -> None:
    run_ranks(2, _check_nested)


def _check_mistakes(rank: int) -> None:
    model = Net(True)
    with _optimizer(model, SECTIONS[0]):
        loss = model(_data(rank, 0))
        with pytest.raises(StateError, match="needs checkpoints with use_reentrant=False"):
            torch.autograd.backward(loss, create_graph=True)
        x = _data(rank, 0).requires_grad_() * 1

        def forward(x: Tensor) -> Tensor:
            y = checkpoint(model.blocks[0], x, use_reentrant=True)
            x.mul_(2)
            return y.sum()

        model.forward = forward  # type: ignore[method-assign]
        with pytest.raises(StateError, match="modified by an inplace operation"):
            model(x).backward()
    with pytest.raises(ConfigError, match=r"zcomm\.activations='nvme' needs zcomm\.activations_nvme_path"):
        ZeroOptimizer(Net(True), torch.optim.SGD, lr=0.1, config={"zcomm": {"activations": "nvme"}})


def test_mistakes_are_named() -> None:
    run_ranks(2, _check_mistakes)


def _check_inactive(rank: int) -> None:
    model = Net(False)
    with logged() as texts, _optimizer(model, {"partition_activations": True}):
        model(_data(rank, 0)).backward()
    said = [text for text in texts if "partition_activations" in text]
    assert len(said) == (rank == 0)
    assert all("; inactive: partition_activations (no other rank" in text for text in said)


def test_partitioning_without_tensor_parallel_ranks_is_said_once() -> None:
    run_ranks(2, _check_inactive)


def _check_transformers(rank: int) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=3, n_head=2)
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(rank))
    found = []
    for stage, use_reentrant in itertools.product((1, 3), (None, False, True)):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config).train()
        if use_reentrant is not None:
            kwargs = {"use_reentrant": use_reentrant}
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable(kwargs)
        section = {} if use_reentrant is None else SECTIONS[2]
        with _optimizer(model, section, stage) as optimizer:
            torch.manual_seed(1)
            for _ in range(2):
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append({**full_values(model), "loss": loss.detach()})
            if use_reentrant is not None:
                assert zero.checkpointing.memory(model).peak_host == 3 * 4 * 2 * 16 * 32
    for got in found[1:]:
        _assert_same(got, found[0])


def test_transformers() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: it is in the bench extra")
    run_ranks(2, _check_transformers)


def _check_files(rank: int, folder: str) -> None:
    """Each input is written once and read once; the first step creates the files, and the end deletes them."""
    section = {"contiguous_memory_optimization": True}  # has no effect on files
    for stage, use_reentrant in itertools.product((1, 3), (False, True)):
        model = Net(None)
        with _optimizer(model, {}, stage) as optimizer:
            expected = _train(model, optimizer, rank)
        model = Net(use_reentrant)
        keys = {"activations": "nvme", "activations_nvme_path": folder}
        with _optimizer(model, section, stage, **keys) as optimizer, moved() as bytes_moved:
            _assert_same(_train(model, optimizer, rank), expected)
            memory = zero.checkpointing.memory(model)
            assert (memory.peak_files, memory.peak_device, memory.peak_host) == (NUM_BLOCKS * NBYTES, 0, 0)
            assert (memory.files, memory.num_allocations) == (0, NUM_BLOCKS)
            pages = -(-NBYTES // 4096) * 4096
            for link in ("read", "write"):
                assert bytes_moved.bytes(kind="activations", link=link) == 4 * NUM_BLOCKS * pages
            assert any(Path(folder).iterdir())
        assert not [path for path in Path(folder).iterdir() if path.name.endswith(f"activations-rank{rank}")]


def test_inputs_rest_in_files(tmp_path: Path) -> None:
    run_ranks(2, _check_files, str(tmp_path))


def _check_failing_files(rank: int, folder: str) -> None:
    keys = {"activations": "nvme", "activations_nvme_path": str(Path(folder) / ("missing" if rank else ""))}
    model = Net(False)
    with pytest.raises((OSError, StateError), match="missing"):
        ZeroOptimizer(model, torch.optim.SGD, lr=0.1, config={"zcomm": keys})
    keys["activations_nvme_path"] = folder
    with _optimizer(model, {}, **keys):
        loss = model(_data(rank, 0))
        for path in Path(folder).glob(f"*-activations-rank{rank}/input*"):
            path.write_bytes(b"other" * (path.stat().st_size // 5))
        with pytest.raises(IntegrityError, match="input"):
            loss.backward()
        del loss
        model(_data(rank, 1)).backward()


def test_failing_files_are_errors(tmp_path: Path) -> None:
    run_ranks(2, _check_failing_files, str(tmp_path))


def test_an_input_dropped_under_a_lock_of_the_store(tmp_path: Path) -> None:
    """A garbage collection under a lock of the store, as after a failed backward: nothing waits for that lock."""
    storage = FileInputStorage(ActivationSettings(tier=Tier.NVME, path=str(tmp_path)), None)
    stored = storage.store(torch.ones(1024), None)
    stored.prefetch()
    cycle: list[Any] = [stored]
    cycle.append(cycle)
    del stored, cycle

    def collect() -> None:
        with storage._store._open.lock, storage._store.buffers._lock:
            gc.collect()

    collector = threading.Thread(target=collect, daemon=True)
    collector.start()
    collector.join(30)
    assert not collector.is_alive()
    again = storage.store(torch.full((1024,), 2.0), None)
    assert again.fetch().eq(2).all()
    assert storage.memory().num_allocations == 1  # in the file of the input that was dropped
    storage.close()
