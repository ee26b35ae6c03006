"""``zero.checkpoint``: losses and gradients equal the plain functions' bit for bit, wherever inputs are stored."""

# covers zero/_activations/checkpointer.py zero/_activations/usage.py zero/checkpointing.py

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import zero
from zcomm import ConfigError, StateError
from zero._activations.checkpointer import flatten, is_movable
from zero.checkpointing import ActivationMemory
from zero.plan.formulas import Activations, Counts, TrainingSetup, usage_of

WIDTH, BATCH, NUM_LAYERS = 32, 16, 4
NBYTES = 4 * WIDTH * BATCH
PLACES = ("device", "host")
Checkpoint = Callable[..., Any]


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    zero.checkpointing.configure()
    zero.checkpointing.get_cuda_rng_tracker().reset()


class Pair(NamedTuple):
    """A container type of the user."""

    hidden: Tensor
    scale: Any


class Layer(nn.Module):
    """Dropout, and inputs of every type."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, pair: Pair, extras: dict[str, Any], *, negates: bool) -> tuple[Pair, dict[str, Any]]:
        hidden, scale = pair
        inner = nn.functional.dropout(self.up(hidden).tanh(), 0.3)
        out = self.down(inner) * scale + extras["mask"].to(inner.dtype) * extras["nothing"][0]
        out = -out if negates else out
        return Pair(out + hidden, scale), {"norm": [out.detach().norm(), None, "text"], "sum": out.sum()}


class Net(nn.Module):
    """``checkpoint`` wraps the calls of its layers; None: they run plainly."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))

    def forward(self, x: Tensor, checkpoint: Checkpoint | None) -> Tensor:
        mask = (torch.arange(BATCH)[:, None] % 3 == 0).expand(BATCH, WIDTH)
        total: Any = 0
        pair = Pair(x, 1.5)
        for index, layer in enumerate(self.layers):
            extras = {"mask": mask, "nothing": [0.5, None]}
            call = layer if checkpoint is None else lambda *a, f=layer, **k: checkpoint(f, *a, **k)
            pair, more = call(pair, extras, negates=index % 2 == 1)
            total = total + more["sum"] + more["norm"][0]
        return total + pair.hidden.square().mean()


def _train(checkpoint: Checkpoint | None, dtype: torch.dtype = torch.float32, steps: int = 2) -> list[Tensor]:
    """Losses, and the gradients of parameters and input, summed over the steps."""
    torch.manual_seed(0)
    net = Net().to(dtype)
    x = torch.randn(BATCH, WIDTH, dtype=dtype, requires_grad=True)
    losses = []
    for _ in range(steps):
        loss = net(x * 2, checkpoint)
        loss.backward()
        losses.append(loss.detach())
    assert x.grad is not None
    after = torch.rand(3)  # recomputation restores the generator
    return [*losses, x.grad, after, *(p.grad for p in net.parameters() if p.grad is not None)]


def _assert_equal(got: list[Tensor], expected: list[Tensor]) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


OPTIONS = {
    "checkpoint_in_cpu": (False, True),
    "contiguous_checkpointing": (False, True),
    "num_checkpoints": (None, 2, NUM_LAYERS),
    "profile": (False, True),
}


def test_every_combination_equals_the_plain_functions() -> None:
    dtypes = itertools.cycle([torch.float32, torch.bfloat16, torch.float64])
    plain = {dtype: _train(None, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)}
    for values, dtype in zip(itertools.product(*OPTIONS.values()), dtypes, strict=False):
        zero.checkpointing.configure(**dict(zip(OPTIONS, values, strict=True)))
        assert zero.checkpointing.is_configured()
        _assert_equal(_train(zero.checkpoint, dtype), plain[dtype])
        memory = zero.checkpointing.memory()
        assert (memory.device, memory.host, memory.files) == (0, 0, 0)  # everything is freed


def _memory_after(steps: int, **options: Any) -> ActivationMemory:
    zero.checkpointing.configure(**options)
    _train(zero.checkpoint, steps=steps)
    return zero.checkpointing.memory()


def test_inputs_rest_in_host_memory() -> None:
    small = NUM_LAYERS * BATCH * WIDTH  # the masks, of one byte an element, stay
    plain = _memory_after(1)
    assert (plain.peak_device, plain.peak_host) == (NUM_LAYERS * NBYTES + small, 0)
    on_host = _memory_after(1, checkpoint_in_cpu=True)
    assert (on_host.peak_device, on_host.peak_host) == (small, NUM_LAYERS * NBYTES)
    shape = Activations(
        hidden=WIDTH, num_layers=9, batch=BATCH, sequence=1, is_checkpointed=True, num_checkpoints=NUM_LAYERS
    )
    for place in ("device", "host", "nvme"):  # the estimate equals the measurement
        moved = replace(shape, on_host=place == "host", in_files=place == "nvme")
        found = usage_of(Counts(numel=1), TrainingSetup(stage=0, param_nbytes=4), moved)
        assert [(u.place, u.nbytes) for u in found if u.kind == "activation checkpoints"] == [
            (place, on_host.peak_host)
        ]


@pytest.mark.parametrize("place", PLACES)
def test_the_buffer_is_allocated_once(place: str, caplog: Any) -> None:
    options = {"contiguous_checkpointing": True, "checkpoint_in_cpu": place == "host"}
    with caplog.at_level(logging.WARNING, logger="zero"):
        for number, in_first_step in ((NUM_LAYERS, 1), (None, NUM_LAYERS + 1), (2 * NUM_LAYERS, 1)):
            first = _memory_after(1, num_checkpoints=number, **options)
            later = _memory_after(4, num_checkpoints=number, **options)
            assert first.num_allocations == later.num_allocations == in_first_step
            assert later.arena == (number or NUM_LAYERS) * NBYTES
        assert not caplog.records
        once = 1 + (NUM_LAYERS - 3) + 1  # the first buffer, each that did not fit, the final buffer
        for steps in (1, 2, 5):
            caplog.clear()
            few = _memory_after(steps, num_checkpoints=3, **options)
            assert (few.arena, few.num_allocations) == (NUM_LAYERS * NBYTES, once)
            (record,) = caplog.records
            assert "number_checkpoints=3" in record.message
    zero.checkpointing.configure(contiguous_checkpointing=True)
    _train(zero.checkpoint)
    zero.checkpointing.reset()
    assert zero.checkpointing.memory().arena == 0


def test_the_buffer_grows_to_what_a_step_needs(monkeypatch: Any) -> None:
    """Checkpoints of several sizes, the smallest first: after the first step torch allocates none of them."""
    zero.checkpointing.configure(contiguous_checkpointing=True, num_checkpoints=3)
    weights = [nn.Parameter(torch.randn(n, n)) for n in (32, 48, 64)]
    asked: list[int] = []
    empty = torch.empty

    def counting(*size: Any, **options: Any) -> Tensor:
        asked.append(size[0])
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", counting)
    for _ in range(3):
        asked.clear()
        inputs = [torch.ones(8, w.shape[0]) * 0.1 for w in weights]
        losses = [zero.checkpoint(lambda x, w: (x @ w).sin().sum(), x, w) for x, w in zip(inputs, weights, strict=True)]
        sum(losses).backward()  # type: ignore[union-attr]
    assert [n for n in asked if n] == []  # empty tensors track the versions
    assert zero.checkpointing.memory().arena == sum(4 * 8 * n for n in (32, 48, 64))


def _layer(x: Tensor, weight: Tensor) -> Tensor:
    return nn.functional.dropout((x @ weight).sin(), 0.5)


@pytest.mark.parametrize("place", PLACES)
def test_nested_checkpoints_and_autocast(place: str) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(8, 40), torch.randn(40, 40, requires_grad=True)
    frozen = torch.randn(40, 40)

    def outer(checkpoint: Checkpoint, hidden: Tensor) -> Tensor:
        return checkpoint(_layer, checkpoint(_layer, hidden, weight), frozen) * 3

    def plain(f: Any, *args: Any) -> Any:
        return f(*args)

    found = []
    zero.checkpointing.configure(checkpoint_in_cpu=place == "host", contiguous_checkpointing=True, num_checkpoints=2)
    for checkpoint in (plain, zero.checkpoint):
        torch.manual_seed(1)
        weight.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = checkpoint(outer, checkpoint, checkpoint(outer, checkpoint, x)).float().square().sum()
        loss.backward()
        found.append((loss.detach(), weight.grad, torch.rand(1)))
    _assert_equal(list(found[0]), list(found[1]))  # type: ignore[arg-type]


@pytest.mark.parametrize("place", PLACES)
def test_backward_of_backward(place: str) -> None:
    found = []
    zero.checkpointing.configure(checkpoint_in_cpu=place == "host")
    for checkpoint in (lambda f, *args: f(*args), zero.checkpoint):
        torch.manual_seed(0)
        x, weight = torch.randn(8, 40, requires_grad=True), torch.randn(40, 40, requires_grad=True)
        y = checkpoint(_layer, x * 2, weight)
        (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        assert x.grad is not None
        assert weight.grad is not None
        found.append([y.detach(), gradient.detach(), x.grad, weight.grad])
    for got, expected in zip(found[1], found[0], strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("options", [{}, {"checkpoint_in_cpu": True}, {"contiguous_checkpointing": True}])
def test_inputs_modified_in_place_are_found(options: dict[str, bool]) -> None:
    zero.checkpointing.configure(**options)
    weight = torch.randn(40, 40, requires_grad=True)
    for shape in ((8, 40), (2, 40)):  # one that is moved, and one that is too small to be moved
        x = torch.randn(shape)
        y = zero.checkpoint(_layer, x, weight)
        x.view(-1)[3:5].mul_(2)
        with pytest.raises(StateError, match=rf"modified by an inplace operation.*shape=\({shape[0]}, 40\), version=1"):
            y.sum().backward()
    inside = zero.checkpoint(lambda x: (x.relu_() @ weight).sin(), torch.randn(8, 40))
    with pytest.raises(StateError, match="inplace"):
        inside.sum().backward()


class _RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:  # noqa: ARG004
        raise ValueError("in backward")


def test_after_an_exception_all_is_freed_and_works_again() -> None:
    zero.checkpointing.configure(contiguous_checkpointing=True, num_checkpoints=NUM_LAYERS)
    expected = _train(None)
    x, weight = torch.randn(8, 40), torch.randn(40, 40, requires_grad=True)
    calls: list[int] = []

    def fails(which: int, x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == which:
            raise ValueError("in the function")
        return (x @ weight).sin()

    with pytest.raises(ValueError, match="in the function"):
        zero.checkpoint(fails, 1, x)
    calls.clear()
    y = zero.checkpoint(fails, 2, x)
    with pytest.raises(ValueError, match="in the function"):
        y.sum().backward()
    z = zero.checkpoint(lambda x: _RaisesInBackward.apply(x @ weight).sin(), x)
    with pytest.raises(ValueError, match="in backward"):
        z.sum().backward()
    del y, z
    memory = zero.checkpointing.memory()
    assert (memory.device, memory.host) == (0, 0)
    _assert_equal(_train(zero.checkpoint), expected)


def test_a_graph_that_is_kept_is_computed_again() -> None:
    weight = torch.randn(40, 40, requires_grad=True)
    x = torch.randn(8, 40)
    for options in ({}, {"checkpoint_in_cpu": True, "contiguous_checkpointing": True}):
        zero.checkpointing.configure(**options)
        y = zero.checkpoint(_layer, x, weight)
        first, second = (torch.autograd.grad(y.sum(), weight, retain_graph=True)[0] for _ in range(2))
        assert torch.equal(first, second)


def test_without_gradients_nothing_is_saved() -> None:
    zero.checkpointing.configure(checkpoint_in_cpu=True)
    x, weight = torch.randn(8, 40), torch.randn(40, 40)
    with torch.no_grad():
        zero.checkpoint(_layer, x, weight.requires_grad_())
    with torch.inference_mode():
        zero.checkpoint(_layer, torch.randn(8, 40), weight)
    assert zero.checkpointing.memory().peak_host == 0


def test_an_input_of_several_functions_is_kept_once() -> None:
    zero.checkpointing.configure(checkpoint_in_cpu=True)
    x, bias = torch.randn(8, 40, requires_grad=True), torch.randn(8, 40)
    y = x * 1
    for _ in range(3):
        y = zero.checkpoint(lambda a, b: (a + b).sin(), y, bias)
    assert zero.checkpointing.memory().host == 4 * 4 * 8 * 40
    bias.add_(1)  # now with other values
    z = zero.checkpoint(lambda a, b: (a + b).sin(), x * 1, bias)
    assert zero.checkpointing.memory().host == 6 * 4 * 8 * 40
    z.sum().backward()
    assert torch.equal(x.grad, (x + bias).cos())  # type: ignore[arg-type]


def _forms() -> dict[str, Tensor]:
    base = torch.arange(24 * 24 * 2.0).view(24, 24, 2)
    return {
        "dense": base,
        "transposed": base.transpose(0, 2),
        "a row of each": base[:, 3:17, 0],
        "expanded": base[:, :1].expand(24, 7, 2),
        "reversed dimensions, every second": base.permute(2, 1, 0)[:, ::2],
        "scalar, expanded": torch.tensor(3.0).expand(20, 20),
        "with an offset": base.flatten()[5:905].view(30, 30),
        "one column": base[..., :1],
        "channels last": base.view(2, 3, 12, 16).contiguous(memory_format=torch.channels_last),
    }


@pytest.mark.parametrize("name", _forms())
def test_values_come_back_in_the_same_layout(name: str) -> None:
    tensor = _forms()[name]
    assert is_movable(tensor)
    values, form = flatten(tensor)
    assert values.ndim == 1
    assert values.numel() == len(set(tensor.flatten().tolist()))
    back = form.restore(values.clone())
    assert torch.equal(back, tensor)
    assert back.stride() == tensor.stride()


def test_what_is_not_moved() -> None:
    assert not is_movable(torch.zeros(1000).unfold(0, 30, 1))  # elements that share memory
    assert not is_movable(torch.zeros(100))
    assert not is_movable(nn.Parameter(torch.zeros(1000)))
    assert not is_movable(torch.zeros(1000, requires_grad=True))
    assert not is_movable(torch.zeros(1000, dtype=torch.int64))
    assert not is_movable(torch.zeros(1000, device="meta"))


def test_named_random_states() -> None:
    tracker = zero.checkpointing.get_cuda_rng_tracker()
    zero.checkpointing.model_parallel_cuda_manual_seed(5)
    torch.manual_seed(5 + 2718)
    expected = torch.rand(4)
    zero.checkpointing.model_parallel_cuda_manual_seed(5)
    before = torch.get_rng_state()
    with tracker.fork():
        assert torch.equal(torch.rand(4), expected)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ConfigError, match="a random state of this name exists"):
        tracker.add("model-parallel-rng", 1)
    with pytest.raises(ConfigError, match="there is no random state 'other'"), tracker.fork("other"):
        pass
    weight = torch.randn(40, 40, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        with tracker.fork():
            return _layer(x, weight)

    found = []
    for checkpoint in (lambda f, *args: f(*args), zero.checkpoint):
        zero.checkpointing.model_parallel_reconfigure_tp_seed(7)
        weight.grad = None
        checkpoint(function, checkpoint(function, torch.ones(8, 40))).sum().backward()
        with tracker.fork():
            found.append([weight.grad, torch.rand(1)])
    _assert_equal(found[0], found[1])  # type: ignore[arg-type]


def test_times_are_logged(caplog: Any) -> None:
    zero.checkpointing.configure(
        deepspeed_config={"activation_checkpointing": {"profile": True, "synchronize_checkpoint_boundary": True}}
    )
    with caplog.at_level(logging.INFO, logger="zero"):
        _train(zero.checkpoint, steps=2)
    assert [r.message.count(f"{NUM_LAYERS} x forward") for r in caplog.records] == [1, 1]
    assert all(f"{NUM_LAYERS} x recomputation" in r.message for r in caplog.records)


def test_the_device_is_waited_for_around_each_call_only_if_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = list[None]()
    monkeypatch.setattr("zero._activations.checkpointed_call.synchronize", lambda: counted.append(None))
    # Before and after each forward, and before each recomputation: torch ends a recomputation by an exception once
    # it has what backward needs.
    for is_set, number in ((False, 0), (True, 3 * NUM_LAYERS)):
        zero.checkpointing.configure(synchronize=is_set)
        counted.clear()
        _train(zero.checkpoint, steps=1)
        assert len(counted) == number


def test_options_of_torch_and_mistakes() -> None:
    weight = torch.randn(40, 40, requires_grad=True)
    torch.manual_seed(3)
    y = zero.checkpoint(_layer, torch.ones(8, 40), weight, preserve_rng_state=False, early_stop=False)
    y.sum().backward()
    with pytest.raises(ConfigError, match="use_reentrant=False"):
        zero.checkpoint(_layer, torch.ones(8, 40), weight, use_reentrant=True)
    with pytest.raises(StateError, match="no activation_checkpointing of its own"):
        zero.checkpointing.memory(nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="unknown keys"):
        zero.checkpointing.configure(deepspeed_config={"activation_checkpointing": {"cpu": True}})
