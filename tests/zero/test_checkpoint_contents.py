"""Everything that is saved loads: empty tensors, buffers of every dtype; what cannot load is not complete."""

# covers zero/_checkpoint/dcp.py

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zero
from tests.ranks import run_ranks
from tests.zero.models import new_model
from tests.zero.test_checkpoint import assert_equal_bits, whole_state
from tests.zero.test_checkpoint_failures import _refuses
from tests.zero.training import train, zero_optimizer
from zcomm import ConfigError
from zero import CheckpointError
from zero._checkpoint.dcp import FlatPart

SAFETENSORS = {
    "BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "U16", "I16", "F16", "BF16", "U32", "I32", "F32", "C64", "U64", "I64",
    "F64",
}  # fmt: skip


def _buffers(seed: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    draw = lambda *shape, dtype: torch.randn(*shape, generator=made, dtype=dtype)  # noqa: E731
    return {
        "empty": torch.empty(0),
        "empty_int": torch.empty(2, 0, 3, dtype=torch.int16),
        "complex": draw(2, 3, dtype=torch.complex128),
        "conjugate": draw(4, dtype=torch.complex64).conj(),
        "expanded": draw(1, dtype=torch.float32).expand(8),
        "columns": draw(3, 1, dtype=torch.float64).expand(3, 4),
        "transposed": draw(2, 3, dtype=torch.float32).t(),
        "scalar": torch.tensor(seed),
        "not_a_number": torch.tensor([float("nan"), float("inf"), seed]),
        "not_a_number_expanded": torch.tensor([float("nan")]).expand(4),
        "float8": draw(5, dtype=torch.float32).to(torch.float8_e4m3fn),
        "float8_wide": draw(1, dtype=torch.float32).to(torch.float8_e5m2).expand(3),
    }


class Odd(nn.Module):
    """Has a parameter and buffers of unusual kinds."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.inner = new_model(seed=seed)
        self.none = nn.Parameter(torch.empty(0, 3))
        for name, buffer in _buffers(seed).items():
            self.register_buffer(name, buffer)

    def forward(self, *args: Tensor) -> Tensor:
        return self.inner(*args) + self.none.sum()


CLIENT: dict[str, Any] = {
    "tensor": torch.empty(0, dtype=torch.int16),
    "matrix": torch.empty(3, 0, dtype=torch.bfloat16),
    "array": np.zeros((0, 3), dtype=np.uint8),
    "bytes": b"",
    "big_endian": np.arange(3, dtype=">f4"),
    "complex": torch.tensor([1 + 2j], dtype=torch.complex128),
    "sets": {frozenset({1, 2}): {frozenset(), 3}},
    "empties": ["", [], {}, (), set()],
}


def _is_equal(got: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        if got.is_floating_point():
            is_same = np.array_equal(got.double().numpy(), expected.double().numpy(), equal_nan=True)
        else:
            is_same = torch.equal(got, expected)
        return got.dtype == expected.dtype and got.shape == expected.shape and is_same
    if isinstance(expected, np.ndarray):
        return (
            got.dtype == expected.dtype.newbyteorder("=")
            and got.shape == expected.shape
            and bool((got == expected).all())
        )
    return type(got) is type(expected) and bool(got == expected)


def _save(rank: int, folder: str) -> None:
    for stage in (1, 3):
        model = Odd(seed=5)
        with zero_optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=stage) as optimizer:
            train(model, optimizer, rank, steps=1)
            zero.save_checkpoint(optimizer, folder, f"stage{stage}", client_state=CLIENT, async_op=stage == 3)
            state = whole_state(optimizer, model)
            if rank == 0:
                torch.save(state, f"{folder}/stage{stage}.pt")


def _load(rank: int, folder: str) -> None:
    for stage in (1, 3):
        model = Odd(seed=6)
        with zero_optimizer(model, torch.optim.AdamW(model.parameters()), stage=stage) as optimizer:
            for saved in (1, 3):
                for name, buffer in _buffers(seed=7).items():
                    if not buffer.is_conj() and 0 not in buffer.stride():
                        getattr(model, name).copy_(buffer)
                _, client = zero.load_checkpoint(optimizer, folder, f"stage{saved}")
                wrong = [name for name, value in CLIENT.items() if not _is_equal(client[name], value)]
                wrong += [
                    name for name, value in _buffers(seed=5).items() if not _is_equal(getattr(model, name), value)
                ]
                assert not wrong
                expected = torch.load(f"{folder}/stage{saved}.pt", weights_only=True)
                assert_equal_bits(whole_state(optimizer, model), expected)
            assert 0 in model.expanded.stride(), "still one place in memory"


def test_nothing_is_too_small_or_too_odd_to_be_loaded_again(tmp_path: Path) -> None:
    run_ranks(2, _save, str(tmp_path))
    for world_size in (1, 2, 3):
        run_ranks(world_size, _load, str(tmp_path))
    for path in tmp_path.glob("*/shard_*"):
        data = path.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        assert {entry["dtype"] for entry in header.values()} <= SAFETENSORS, "others read these files, too"


def _check_shared(rank: int, folder: Path) -> None:
    """A buffer of two modules, of which the first leaves it out of the state dict."""
    model, counts = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.full((2,), 7.0)
    model[0].register_buffer("counts", counts, persistent=False)
    model[1].register_buffer("counts", counts)
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=1) as optimizer:
        zero.save_checkpoint(optimizer, folder, "x")
        counts.zero_()
        zero.load_checkpoint(optimizer, folder, "x")
        assert counts.tolist() == [7.0, 7.0]


def test_a_shared_buffer_is_in_a_checkpoint_if_it_is_in_the_state_dict(tmp_path: Path) -> None:
    run_ranks(2, _check_shared, tmp_path)


def _check_refused(rank: int, folder: Path) -> None:
    model = new_model()
    model.register_buffer("varied", torch.arange(3.0))
    with zero_optimizer(model, stage=1) as optimizer:
        model.register_buffer("sums", torch.ones(3).to_sparse())

        def save(**state: Any) -> None:
            zero.save_checkpoint(optimizer, folder, "x", **state)

        _refuses(rank, save, "buffer 'sums' is a Tensor of torch.float32, torch.sparse_coo", "persistent=False")
        del model.sums
        for dtype in (torch.float8_e4m3fnuz, torch.float8_e8m0fnu):
            model.register_buffer("rare", torch.ones(3).to(dtype))
            _refuses(rank, save, f"buffer 'rare' is a Tensor of {dtype}", "persistent=False")
            del model.rare
        masked = np.ma.masked_array([1.0, 2.0], mask=[True, False])
        for value in (torch.ones(3).to_sparse(), torch.ones(3, device="meta"), np.longdouble(1), masked):
            _refuses(rank, lambda value=value: save(client_state={"v": value}), "client_state['v'] is a")
        _refuses(rank, lambda: save(stateful={0: optimizer}), "the names in stateful= must be str: got 0")
        save()
        model.register_buffer("varied", torch.zeros(1).expand(3))
        _refuses(rank, lambda: zero.load_checkpoint(optimizer, folder), "'varied' is expanded", ".clone()")
        model.register_buffer("varied", torch.ones(2, dtype=torch.complex128))
        _refuses(
            rank,
            lambda: zero.checkpoints.save_model_file(optimizer, folder / "out.safetensors"),
            "'varied' is torch.complex128, which safetensors cannot store",
        )


def test_what_cannot_be_stored_is_named(tmp_path: Path) -> None:
    run_ranks(2, _check_refused, tmp_path)


def _check_proof(rank: int, folder: Path) -> None:
    """Repeats an earlier bug, which left no trace of empty tensors: the check after a save must find it."""
    model = new_model()
    with zero_optimizer(model, stage=1) as optimizer, pytest.MonkeyPatch.context() as patch:
        zero.save_checkpoint(optimizer, folder, "a", client_state={"step": 1})
        chunks = FlatPart.chunks
        left_out = ["tree.0"]
        patch.setattr(FlatPart, "chunks", lambda self: [] if self.key in left_out else chunks(self))
        for left_out[0], words in (
            ("tree.0", ("'tree.0', of 3 elements, is missing",)),
            ("weight/wte.weight", ("'weight/wte.weight', of ", "is missing")),
            ("rank/1/json", ("rank/1/json",)),
            ("rank/1/tree.0", ("'rank/1/tree.0'",)),
        ):
            _refuses(
                rank,
                lambda: zero.save_checkpoint(optimizer, folder, "a", client_state={"step": torch.ones(3)}),
                "could not be loaded, and does not count",
                *words,
            )
        assert zero.load_checkpoint(optimizer, folder) == (folder / "a", {"step": 1})
        assert len(list((folder / "a").iterdir())) == 3, "nothing is left of what does not count"


def test_what_could_not_be_loaded_replaces_nothing(tmp_path: Path) -> None:
    run_ranks(2, _check_proof, tmp_path)


def _check_two(rank: int, folder: Path) -> None:
    torch.manual_seed(3)
    models = [nn.Linear(30, 30), nn.Linear(30, 30)]
    a, b = (zero.ZeroOptimizer(model, torch.optim.SGD, stage=1, lr=1.0) for model in models)

    def first_of(model: nn.Module) -> float:
        return float(model.weight.detach()[0, 0])

    of_a, of_b = map(first_of, models)
    assert of_a != of_b
    zero.save_checkpoint(a, folder, "sync")
    _refuses(
        rank,
        lambda: zero.save_checkpoint(b, folder, "sync"),
        "sync holds a checkpoint that another optimizer has saved",
    )
    zero.save_checkpoint(a, folder, "sync")
    zero.load_checkpoint(a, folder, "sync")
    assert first_of(models[0]) == of_a
    for number in range(8):
        tag, ended = f"async{number}", []
        for saving in [zero.save_checkpoint(z, folder, tag, async_op=True) for z in (a, b)]:
            try:
                saving.wait()
            except CheckpointError as error:
                ended.append(str(error).split(" since")[0])
            else:
                ended.append("saved")
        assert sorted(ended) == [f"{folder / tag} holds a checkpoint that another optimizer has saved", "saved"]
        winner = [of_a, of_b][ended.index("saved")]
        zero.load_checkpoint(a, folder, tag)
        assert first_of(models[0]) == winner
        zero.load_checkpoint(a, folder, "sync")
    zero.load_checkpoint(b, folder, "sync")
    zero.save_checkpoint(b, folder, "sync")  # the same run continues from there
    later = zero.ZeroOptimizer(nn.Linear(30, 30), torch.optim.SGD, stage=1, lr=1.0)
    zero.save_checkpoint(later, folder, "sync")  # a run that started after it
    for optimizer in (a, b, later):
        optimizer.close()


def test_two_optimizers_do_not_share_a_tag(tmp_path: Path) -> None:
    run_ranks(2, _check_two, tmp_path)
    run_ranks(1, _check_two, tmp_path / "alone")


class Coded(Tensor):
    """Stands for a state in fewer bits, in a class of its own."""


class Momentum(torch.optim.Optimizer):
    """Stores the momentum of large tensors in the form that ``form`` gives it."""

    form = staticmethod(lambda momentum: {"momentum": momentum})

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"])
                    plain = {"momentum": param.grad.clone()}
                    self.state[param] = self.form(plain["momentum"]) if param.numel() >= 4096 else plain


class Subclass(Momentum):
    form = staticmethod(lambda momentum: {"momentum": momentum.as_subclass(Coded)})


class Blockwise(Momentum):
    form = staticmethod(lambda momentum: {"codes": momentum.to(torch.uint8), "absmax": momentum.view(-1, 256).amax(1)})


def test_states_that_no_checkpoint_could_hold_are_refused_before_training() -> None:
    model = nn.Linear(8, 8)
    before = model.weight.detach().clone()
    with pytest.raises(ConfigError, match=r"Subclass keeps 'momentum' .* as a Coded"):
        zero.ZeroOptimizer(model, Subclass, stage=1)
    assert torch.equal(model.weight, before)
    zero.ZeroOptimizer(nn.Linear(8, 8), Momentum, stage=1).close()


def _check_blocks(rank: int, folder: str) -> None:
    """States in blocks, which cannot be cut, are saved and loaded by optimizers of whole tensors."""
    kept = []
    for is_new in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        optimizer = zero.ZeroOptimizer(model, Blockwise(model.parameters()), stage=3 if is_new else 1)
        if is_new:
            zero.load_checkpoint(optimizer, folder)
        else:
            model(torch.randn(4, 64, generator=torch.Generator().manual_seed(rank))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            zero.save_checkpoint(optimizer, folder, "blocks")
        named = {piece.bucket.layout.slots[piece.slot].name: piece.master for piece in optimizer.parts.pieces}
        kept.append({name: dict(optimizer.parts.inner.state[leaf]) for name, leaf in named.items()})
        optimizer.close()
    found = [name for name in kept[0] if name in kept[1]]
    assert found
    for name in found:
        assert kept[0][name].keys() == kept[1][name].keys() == {"codes", "absmax"} if "weight" in name else True
        assert all(torch.equal(value, kept[1][name][key]) for key, value in kept[0][name].items()), name


def test_states_in_blocks_are_saved(tmp_path: Path) -> None:
    run_ranks(2, _check_blocks, str(tmp_path))


class Counting(Momentum):
    """Keeps numbers of every type beside its momentum."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    steps = state.get("steps", 0) + 1
                    numbers = {"steps": steps, "decay": 0.5**steps, "seen": torch.tensor(3.0 * steps)}
                    numbers |= {"row": torch.tensor([2.0 * steps]), "cell": torch.tensor([[steps]])}
                    state.update(numbers, momentum=param.grad.clone())
                    param.sub_(param.grad, alpha=group["lr"] * state["decay"])


def _check_numbers(rank: int, folder: str, saves: bool) -> None:  # noqa: FBT001
    model = new_model()
    with zero_optimizer(model, Counting, stage=1 if saves else 3) as optimizer:
        if saves:
            train(model, optimizer, rank, steps=2)
            zero.save_checkpoint(optimizer, folder, "numbers")
        else:
            zero.load_checkpoint(optimizer, folder, "numbers")
        for state in optimizer.state.values():
            assert (type(state["steps"]), state["steps"]) == (int, 2)
            assert (type(state["decay"]), state["decay"]) == (float, 0.25)
            assert torch.equal(state["seen"], torch.tensor(6.0))
            assert torch.equal(state["row"], torch.tensor([4.0])), "with its dimension"
            assert torch.equal(state["cell"], torch.tensor([[2]]))
            assert state["momentum"].numel() > 1
        assert optimizer.state


def test_numbers_among_the_states_stay_what_they_are(tmp_path: Path) -> None:
    run_ranks(2, _check_numbers, str(tmp_path), True)
    run_ranks(2, _check_numbers, str(tmp_path), False)
