"""The stage-3 schedule on live ranks: it changes no bit, keeps its limits, and works with models that users modify."""

# covers zero/_sharding/units.py

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zcomm
from tests.ranks import run_ranks
from tests.zero.logs import logged
from tests.zero.training import assert_same_bits, full_values, zero_optimizer
from zero import ZeroOptimizer, gathered_for_generation
from zero._sharding.units import find_units

WIDTH, VOCAB = 48, 300


class LoRA(nn.Module):
    """A frozen layer with a small trainable branch, as in adapters."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Layer(nn.Module):
    """Two levels of modules, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), LoRA(nn.Linear(3 * WIDTH, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x)) * self.scale
        return x + self.mlp(x)


class Model(nn.Module):
    """Some 60,000 elements: an embedding of 14,400, layers of 19,000 of which one is used twice, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.wte.weight
        self.use_reentrant: bool | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        # Reentrant checkpointing gives a gradient for each use, which are averaged separately: sums in another order.
        for layer in self.layers if self.use_reentrant else (*self.layers, self.layers[0]):
            x = layer(x) if self.use_reentrant is None else checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return self.head(x)


def new_model(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(3)
    return Model().to(dtype)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(VOCAB, (2, 7), generator=generator)
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.roll(1, 1).flatten())


def _plain(model: Model, step: int, rank: int) -> Tensor:
    return loss_of(model, step, rank)


def _checkpointed(model: Model, step: int, rank: int, *, use_reentrant: bool) -> Tensor:
    model.use_reentrant = use_reentrant
    return loss_of(model, step, rank)


def _with_inference(model: Model, step: int, rank: int) -> Tensor:
    loss = loss_of(model, step, rank)
    model.eval()
    with torch.no_grad():
        for _ in range(2):
            loss_of(model, step + 50, rank)
        with gathered_for_generation(model), zcomm.traffic() as sent:
            for _ in range(rank + 1):  # of different lengths
                loss_of(model, step + 60, rank)
        assert sent.bytes() == 0
    model.train()
    return loss


def _changing(model: Model, step: int, rank: int) -> Tensor:
    """Every second step has another order, and another number of forwards."""
    loss = loss_of(model, step, rank)
    return loss + model.layers[1](torch.ones(1, WIDTH)).sum() * 1e-3 if step % 2 else loss


LOOPS: dict[str, Callable[[Model, int, int], Tensor]] = {
    "plain": _plain,
    "reentrant checkpointing": lambda *a: _checkpointed(*a, use_reentrant=True),
    "checkpointing": lambda *a: _checkpointed(*a, use_reentrant=False),
    "inference": _with_inference,
    "a changing order": _changing,
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no prefetch": {"stage3_prefetch_bucket_size": 0},
    "no overlap": {"overlap_comm": False},
    "parts": {"stage3_prefetch_bucket_size": 5000, "stage3_max_live_parameters": 9000, "allgather_bucket_size": 5000},
    "kept": {"stage3_max_reuse_distance": 10**9},
    "kept within a cap": {"stage3_max_reuse_distance": 10**9, "stage3_max_live_parameters": 40_000},
    "small ones stay whole": {"stage3_param_persistence_threshold": 1000},
    "some stay whole": {"stage3_param_persistence_threshold": 1000, "stage3_model_persistence_threshold": 700},
}


def _train(rank: int, loop: str, num_micro: int = 1, **options: Any) -> dict[str, Tensor]:
    model = new_model()
    params = [p for p in model.parameters() if p.requires_grad]
    with zero_optimizer(model, torch.optim.AdamW(params, lr=1e-2), **options) as optimizer:
        for step in range(3):
            for micro in range(num_micro):
                LOOPS[loop](model, num_micro * step + micro, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        return full_values(model)


def _check_same_bits(rank: int, loop: str) -> None:
    expected = _train(rank, loop, stage=2)
    for options in SCHEDULES.values():
        assert_same_bits(_train(rank, loop, stage=3, **options), expected)
    if loop == "plain":
        expected = _train(rank, loop, stage=2, num_micro=2)
        assert_same_bits(_train(rank, loop, stage=3, num_micro=2, **SCHEDULES["kept within a cap"]), expected)


@pytest.mark.parametrize("loop", LOOPS)
def test_no_schedule_changes_a_bit(loop: str) -> None:
    run_ranks(2, _check_same_bits, loop)


@contextmanager
def _watched_pool(optimizer: ZeroOptimizer, dtype: torch.dtype) -> Iterator[list[int]]:
    """The elements of ``dtype`` that the pool has handed out, sampled after each handout."""
    pool, held, seen = optimizer._runtime.pool, {}, [0]
    take, give = pool.take, pool.give

    def taking(numel: int, kind: torch.dtype) -> Tensor:
        buffer = take(numel, kind)
        if kind is dtype:
            held[buffer.data_ptr()] = numel
            seen.append(sum(held.values()))
        return buffer

    def giving(buffer: Tensor) -> None:
        held.pop(buffer.data_ptr(), None)
        give(buffer)

    pool.take, pool.give = taking, giving
    yield seen
    del pool.take, pool.give


def _peak_and_sent(rank: int, **options: Any) -> tuple[int, int, list[str]]:
    """For a planned step: the peak of gathered bfloat16 elements, and the bytes that all-gathers sent."""
    options["gradient_format"] = "bf16"  # on the wire: gradients are kept in float32
    model = new_model(torch.bfloat16)
    params = [p for p in model.parameters() if p.requires_grad]
    with logged() as texts, zero_optimizer(model, torch.optim.SGD(params, lr=0.1), stage=3, **options) as optimizer:
        for step in range(3):
            with _watched_pool(optimizer, torch.bfloat16) as seen, zcomm.traffic() as sent:
                loss_of(model, step, rank).backward()
                optimizer.step()
                optimizer.zero_grad()
    return max(seen), sent.bytes(operation="all_gather"), texts


def _check_caps(rank: int) -> None:
    numel = sum(p.numel() for p in new_model().parameters())
    embedding, slack = VOCAB * WIDTH, 40 * 256  # of padding
    lean, lean_sent, texts = _peak_and_sent(rank, stage3_prefetch_bucket_size=0)
    ahead, ahead_sent, _ = _peak_and_sent(rank)
    mlp = sum(p.numel() for p in new_model().layers[0].mlp.parameters())
    assert embedding + 3 * WIDTH * WIDTH <= lean <= embedding + mlp + slack, "backward holds the tied weight throughout"
    assert lean < ahead <= lean + embedding + slack, "at most the largest layer ahead"
    assert ahead_sent == lean_sent
    assert not texts[1:], texts
    kept, kept_sent, _ = _peak_and_sent(rank, stage3_max_reuse_distance=10**9)
    assert numel <= kept <= numel + slack, "whole from forward to backward"
    assert numel <= kept_sent <= numel + slack, "each once: half of it from here, in 2 bytes"
    within, _, texts = _peak_and_sent(rank, stage3_max_live_parameters=30_000)
    assert within <= 30_000 < ahead
    assert not texts[1:], texts
    exceeded, _, texts = _peak_and_sent(rank, stage3_max_live_parameters=9)
    assert exceeded <= lean
    assert sum("stage3_max_live_parameters=4096 is exceeded" in text for text in texts) == (rank == 0), texts
    assert sum("stage3_max_live_parameters=9 raised to 4096" in text for text in texts) == (rank == 0), texts
    whole, whole_sent, _ = _peak_and_sent(rank, stage3_param_persistence_threshold=1000)
    assert whole < ahead
    assert whole_sent < ahead_sent


def test_caps_hold_and_say_what_they_cost() -> None:
    run_ranks(2, _check_caps)


def _check_backward_gathers(rank: int) -> None:
    """Bytes of all-gathers: this rank sends half of 2 per element."""
    embedding, layer, head, tokens = 4096, 1024, 2048, torch.arange(8)[None] + rank
    for reuse, is_frozen in ((1, False), (0, False), (1, True)):
        torch.manual_seed(0)
        body = [nn.Linear(32, 32, bias=False) for _ in range(2)]
        model = nn.Sequential(nn.Embedding(128, 32), *body, nn.Linear(32, 64, bias=False)).to(torch.bfloat16)
        model[0].requires_grad_(not is_frozen)
        saved: list[Tensor] = []  # by the user, for backward: the embedding's own weight
        model[0].register_forward_hook(lambda m, _, out: out * m.weight.square().mean() if saved else None)  # noqa: B023
        options: dict[str, Any] = {"gradient_format": "bf16", "stage3_max_reuse_distance": reuse}
        params = [p for p in model.parameters() if p.requires_grad]
        with zero_optimizer(model, torch.optim.SGD(params, lr=0.1), stage=3, **options) as optimizer:
            for _ in range(3):
                with zcomm.traffic() as sent:
                    model(tokens).float().square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            again = 2 * layer + (0 if reuse else head)
            assert sent.bytes(operation="all_gather") == embedding + 2 * layer + head + again
            saved.append(tokens)
            with zcomm.traffic() as sent:
                model(tokens).float().square().mean().backward()
                optimizer.zero_grad()
            if not is_frozen:
                assert sent.bytes(operation="all_gather") >= 2 * embedding + 4 * layer + head, "it is needed after all"


def test_backward_gathers_neither_embeddings_nor_what_forward_used_last() -> None:
    run_ranks(2, _check_backward_gathers)


def test_a_module_larger_than_the_cap_is_gathered_in_parts() -> None:
    def names(max_numel: int) -> list[str]:
        return [unit.name for unit in find_units(model, max_numel)]

    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), nn.MultiheadAttention(4, 2))
    assert names(80) == ["0", "1"]
    assert names(40) == ["0", "1"], "40 elements fit; attention uses its children without calling them"
    assert names(39) == ["0.0", "0.2", "1"]
    assert names(1) == ["0.0", "0.2", "1"], "a layer is the least"
    model[0].compile(backend="eager")
    assert names(1) == ["0", "1"], "compiled code is used as a whole"


def _check_exchanges(rank: int) -> None:
    """No prefetch exceeds its limit, and no exchange exceeds its own."""
    model = new_model(torch.bfloat16)
    params = [p for p in model.parameters() if p.requires_grad]
    options = {"stage3_prefetch_bucket_size": 4096, "allgather_bucket_size": 6000}
    with zero_optimizer(model, torch.optim.SGD(params, lr=0.1), stage=3, **options) as optimizer:
        sizes = []
        for step in range(2):
            loss_of(model, step, rank).backward()
            optimizer.step()
        for exchanges in optimizer._runtime.gatherer._schedules.values():
            sizes += exchanges.exchanges
    assert sizes
    assert all(parts[0] <= 4096 and max(parts) <= 6000 for parts in sizes if parts)
    assert max(map(len, sizes)) == 3


def test_large_parameters_travel_in_chunks() -> None:
    run_ranks(2, _check_exchanges)


def _check_order_is_learnt(rank: int) -> None:
    model = new_model()
    params = [p for p in model.parameters() if p.requires_grad]
    with logged() as texts, zero_optimizer(model, torch.optim.SGD(params, lr=0.1), stage=3) as optimizer:
        control = []
        for step, loop in enumerate(("plain", "plain", "a changing order", "a changing order", "plain", "plain")):
            with zcomm.traffic() as sent:
                LOOPS[loop](model, 2 * step + 1, rank).backward()
                optimizer.step()
                optimizer.zero_grad()
            control.append(sent.calls(operation="control"))
    assert control[0] > control[1], "the first iteration is compared"
    assert control[2] > control[1], "a changed one, too"
    assert control[3] == control[5] == control[1]
    assert sum("order in which layers are used has changed" in text for text in texts) == (rank == 0), "said once"


def test_a_changed_order_is_compared_recorded_and_said_once() -> None:
    run_ranks(2, _check_order_is_learnt)


def _check_compiled(rank: int, how: str) -> None:
    def run(stage: int) -> dict[str, Tensor]:
        model = new_model()
        params = [p for p in model.parameters() if p.requires_grad]
        if how == "wrapped":
            model.layers = nn.ModuleList(torch.compile(layer, backend="aot_eager") for layer in model.layers)
        else:
            for layer in model.layers:
                layer.compile(backend="aot_eager")
        with zero_optimizer(model, torch.optim.SGD(params, lr=0.1), stage=stage) as optimizer:
            for step in range(3):
                loss_of(model, step, rank).backward()
                optimizer.step()
                optimizer.zero_grad()
            values = full_values(model)
        torch._dynamo.reset()
        return values

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler reads a tensor's .grad even without the library
        assert_same_bits(run(3), run(2))


@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_compiled_layers(how: str) -> None:
    run_ranks(2, _check_compiled, how)


def _check_two_models(rank: int) -> None:
    """Two models that alternate, over the same process groups."""

    def run(stage: int) -> list[dict[str, Tensor]]:
        models = [new_model(), new_model()]
        params = [[p for p in m.parameters() if p.requires_grad] for m in models]
        with (
            zero_optimizer(models[0], torch.optim.SGD(params[0], lr=0.1), stage=stage) as first,
            zero_optimizer(models[1], torch.optim.SGD(params[1], lr=0.2), stage=stage) as second,
        ):
            for step in range(3):
                (loss_of(models[0], step, rank) + 2 * loss_of(models[1], step, rank)).backward()
                first.step()
                loss_of(models[0], step + 9, rank).backward()
                second.step()
                first.zero_grad()
                second.zero_grad()
            return [full_values(model) for model in models]

    for got, expected in zip(run(3), run(2), strict=True):
        assert_same_bits(got, expected)


def test_two_models_in_one_process() -> None:
    run_ranks(2, _check_two_models)
