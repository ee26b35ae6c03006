"""Parameters that are several matrices (fused projections, experts), beside one process with a parameter for each."""

# covers zero/_sharding/stacked.py zero/_optim/muon.py

from __future__ import annotations

import itertools
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import SGD, AdamW, Optimizer

import zcomm
import zero
from tests.covering import covering_set
from tests.ranks import by_first_rank, run_ranks, topology
from tests.rotation import DAY
from tests.zero.models import as_vector, relative_error
from tests.zero.test_delta_hpz import EXACT
from tests.zero.training import full_values
from tests.zero.whole_optimizers import WideMuon
from zcomm import ConfigError, LayoutError
from zero import load_checkpoint, save_checkpoint
from zero._model import model_layout
from zero._optim import muon
from zero.errors import CheckpointError

WIDTH, STEPS = 32, 4
FUSED: dict[str, Any] = {"qkv": 3, "kv": (16, 8), "experts": 4, "odd": 3, "gate_up": 8}
SHAPES = {
    "qkv": (3 * WIDTH, WIDTH),
    "kv": (24, WIDTH),  # of unequal ones: they stay together
    "experts": (4, 16, WIDTH),
    "odd": (3, 5, WIDTH),  # not multiples of 256 elements: they stay together
    "gate_up": (4, 2 * 8, WIDTH),
}
ROWS = {"qkv": [WIDTH] * 3, "kv": [16, 8], "experts": [16] * 4, "odd": [5] * 3, "gate_up": [8] * 8}


class Stacks(nn.Module):
    """Has every kind of stack; ``is_apart``: with a parameter for each matrix."""

    def __init__(self, *, is_apart: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, WIDTH)
        self.plain = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 11)
        for name, shape in SHAPES.items():
            values = 0.3 * torch.randn(shape)
            if is_apart:
                parts = values.view(-1, WIDTH).split(ROWS[name])
                setattr(self, name, nn.ParameterList([nn.Parameter(part.clone()) for part in parts]))
            else:
                setattr(self, name, nn.Parameter(values))

    def rows(self, name: str) -> Tensor:
        """All rows of ``name``."""
        held = getattr(self, name)
        return torch.cat(list(held)) if isinstance(held, nn.ParameterList) else held.view(-1, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.plain(self.embedding(tokens))
        q, k, v = F.linear(x, self.rows("qkv")).chunk(3, -1)
        x = x + q * k.sigmoid() + v
        x = x + F.pad(F.linear(x, self.rows("kv")).tanh(), (0, WIDTH - 24))
        for name in ("experts", "odd", "gate_up"):
            x = x + F.linear(x, self.rows(name)).tanh() @ self.rows(name)
        return self.head(x)


class WideStackedMuon(zero.Muon):
    """:class:`WideMuon`, which is given stacks."""

    zero_updates = "tensors"
    step = WideMuon.step


def _optimizers(model: nn.Module, name: str = "muon") -> list[Optimizer]:
    """Muon, or Adafactor, over everything but embedding, head and biases; of either model."""
    is_other = {n: n.startswith(("embedding", "head")) or n.endswith("bias") for n, _ in model.named_parameters()}
    own = [param for n, param in model.named_parameters() if not is_other[n]]
    others = AdamW([param for n, param in model.named_parameters() if is_other[n]], lr=3e-3)
    if name == "adafactor":
        return [torch.optim.Adafactor(own, lr=0.01, foreach=False), others]
    return [WideStackedMuon(own, lr=0.02, weight_decay=0.1), others]


def _declared(**fused: Any) -> Stacks:
    model = Stacks().double()
    for name, parts in (fused or FUSED).items():
        getattr(model, name).stacked_parts = parts
    return model


def _loss(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    tokens = torch.randint(11, (6,), generator=generator)
    return F.cross_entropy(model(tokens[:-1]), tokens[1:])


def _expected(name: str, world_size: int, num_micro: int = 1, steps: int = STEPS) -> dict[str, Tensor]:
    """What one process trains, with a parameter for each matrix: all parameters, and the momentum of the stacks."""
    model = Stacks(is_apart=True).double()
    optimizers = _optimizers(model, name)
    for step in range(steps):
        for micro, rank in itertools.product(range(num_micro), range(world_size)):
            (_loss(model, step, micro, rank) / num_micro / world_size).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = {n: p.detach() for n, p in model.named_parameters() if n.partition(".")[0] not in SHAPES}
    found |= {n: model.rows(n).detach().view(shape) for n, shape in SHAPES.items()}
    for n, shape in SHAPES.items() if name == "muon" else ():
        buffers = [optimizers[0].state[param]["momentum_buffer"] for param in getattr(model, n)]
        found[f"momentum {n}"] = torch.cat(buffers).view(shape)
    return found


@cache
def _expected_here(name: str, num_micro: int = 1, steps: int = STEPS) -> dict[str, Tensor]:
    """On a rank: the same for the batches of all ranks, computed once for all tests of this pool."""
    return by_first_rank(partial(_expected, name, torch.distributed.get_world_size(), num_micro, steps))


def _train(model: nn.Module, optimizer: zero.ZeroOptimizer, rank: int, steps: range, num_micro: int = 1) -> None:
    for step in steps:
        for micro in range(num_micro):
            (_loss(model, step, micro, rank) / num_micro).backward()
        optimizer.step()
        optimizer.zero_grad()


def _check_values(model: nn.Module, expected: dict[str, Tensor], case: Any) -> None:
    for name, values in full_values(model).items():
        error = (values - expected[name]).abs().max().item()
        assert error < 1e-10, f"{case}: {name} {error}"


FACTORS: dict[str, list[Any]] = {
    "stage": [0, 1, 2, 3],
    "optimizer": ["muon", "adafactor"],
    "num_micro": [1, 3],
    "is_built": [False, True],
    "offload": ["none", "cpu", "params", "nvme", "all nvme"],
    "is_spread": [True, False],
}


def _options(case: dict[str, Any], folder: str) -> dict[str, Any]:
    options: dict[str, Any] = {"stage": case["stage"], "gradient_accumulation_steps": case["num_micro"]}
    if case["stage"] and case["offload"] != "none":
        place = {"device": "nvme", "nvme_path": folder} if "nvme" in case["offload"] else {"device": "cpu"}
        options |= {"offload_optimizer": place, "sub_group_size": 600}
        if case["stage"] == 3 and case["offload"] in ("params", "all nvme"):
            options["offload_param"] = place | ({"max_in_cpu": 0} if "nvme" in case["offload"] else {})
    return options


def _spreading(*, is_spread: bool) -> Any:
    return mock.patch.object(model_layout, "JOINED_NUMEL", 600 if is_spread else 2**16)


def _check_cases(rank: int, cases: list[dict[str, Any]], per_node: int, folder: str) -> None:
    for case in cases:
        expected = _expected_here(case["optimizer"], case["num_micro"])
        with zero.Init() if case["is_built"] else nullcontext():
            model = Stacks().double()
        for name, parts in FUSED.items():
            getattr(model, name).stacked_parts = parts
        with _spreading(is_spread=case["is_spread"]):
            optimizer = zero.ZeroOptimizer(
                model, _optimizers(model, case["optimizer"]), topology=topology(per_node), **_options(case, folder)
            )
        _train(model, optimizer, rank, range(STEPS), case["num_micro"])
        _check_values(model, expected, case)
        got = as_vector(full_values(model).values())
        of_ranks = zcomm.control.gather_float64(got, optimizer.topology)
        assert (of_ranks == of_ranks[0]).all(), f"{case}: ranks differ"
        for name in SHAPES if case["optimizer"] == "muon" else ():
            momentum = zero.utils.safe_get_full_optimizer_state(getattr(model, name), "momentum_buffer")
            assert momentum is not None
            assert (momentum - expected[f"momentum {name}"].float()).abs().max() < 1e-6, f"{case}: {name}"
        optimizer.close()


@pytest.mark.parametrize(("world_size", "per_node"), [(1, 1), (2, 1), (3, 3), (4, 2)])
def test_as_one_process_with_a_parameter_for_each(world_size: int, per_node: int, tmp_path: Path) -> None:
    cases = covering_set(FACTORS, 2)
    run_ranks(
        world_size, _check_cases, cases if world_size == 4 else cases[world_size - 1 :: 3], per_node, str(tmp_path)
    )


def _check_placed(rank: int) -> None:
    model = _declared()
    with _spreading(is_spread=True):
        optimizer = zero.ZeroOptimizer(model, _optimizers(model), topology=topology(2), stage=2)
    for name, num_parts in (("experts", 4), ("gate_up", 8), ("qkv", 3), ("kv", 2), ("odd", 3)):
        own = [float(piece.param is getattr(model, name)) for piece in optimizer.parts.pieces]
        counts = zcomm.control.gather_float64(torch.tensor([sum(own)]), optimizer.topology).flatten().tolist()
        assert sum(counts) == num_parts, (name, counts)
        assert (max(counts) == num_parts) is (name in ("kv", "odd")), (name, counts)
    assert "21 tensors are updated as a whole" in str(optimizer.effective)
    optimizer.close()


def test_parts_are_dealt_out_one_by_one() -> None:
    run_ranks(4, _check_placed)


def _check_modes(rank: int) -> None:
    """Where nothing is quantized, modes with deltas are one process, too; ranks agree."""
    expected = _expected_here("muon")
    for options in (
        {"stage": 3, "mode": "delta_hpz", **EXACT},
        {"stage": 2, "mode": "delta", "weight_format": "none"},
        {"stage": 3, "hpz_partition_size": 2},
    ):
        model = _declared().float()
        with _spreading(is_spread=True):
            optimizer = zero.ZeroOptimizer(model, _optimizers(model), topology=topology(2), **options)
        _train(model, optimizer, rank, range(STEPS))
        got = full_values(model)
        assert relative_error(as_vector(got.values()), as_vector(expected[name] for name in got)) < 1e-5, options
        of_ranks = zcomm.control.gather_float64(as_vector(got.values()), optimizer.topology)
        assert (of_ranks == of_ranks[0]).all(), f"{options}: ranks differ"
        optimizer.close()


def test_modes() -> None:
    run_ranks(4, _check_modes)


def _check_failed(rank: int) -> None:
    """Ranks have empty shards of some parameters, and still gather them."""
    model, expected = _declared(), _declared()
    with pytest.raises(LayoutError, match="sums gradients in float32"), _spreading(is_spread=True):
        zero.ZeroOptimizer(model, _optimizers(model), topology=topology(2), stage=3, mode="delta_hpz")
    assert torch.equal(as_vector(model.parameters()), as_vector(expected.parameters()))


def test_a_failed_construction_leaves_the_model_full() -> None:
    run_ranks(4, _check_failed)


def _check_moves(rank: int, folder: str, name: str) -> None:
    """Saved with one declaration, stage and placement, loaded with another."""
    expected = _expected_here(name, steps=5)
    moves = [(0, 3, True), (3, 1, False), (1, 2, True), (2, 0, False), (3, 3, True)]
    for before, after, is_spread in moves:
        model = _declared()
        with _spreading(is_spread=not is_spread):
            optimizer = zero.ZeroOptimizer(model, _optimizers(model, name), topology=topology(2), stage=before)
        _train(model, optimizer, rank, range(3))
        save_checkpoint(optimizer, folder, f"{before}{after}")
        optimizer.close()
        model = _declared()
        with _spreading(is_spread=is_spread):
            of = topology(4 if after == 2 else 1)
            optimizer = zero.ZeroOptimizer(model, _optimizers(model, name), topology=of, stage=after)
        load_checkpoint(optimizer, folder, f"{before}{after}")
        _train(model, optimizer, rank, range(3, 5))
        _check_values(model, expected, (before, after))
        optimizer.close()


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_checkpoints_move_between_stages_and_placements(name: str, tmp_path: Path) -> None:
    run_ranks(4, _check_moves, str(tmp_path), name)


def _check_declarations(rank: int, folder: str, place: dict[str, Any]) -> None:
    """Momentum has a value for each element, so a checkpoint fits any declaration; Adafactor's factors do not."""
    for name in ("muon", "adafactor"):
        momenta = []
        for index, declared in enumerate(({"qkv": 3, "experts": 4, **_rest()}, {"qkv": 1, "experts": 8, **_rest()})):
            model = _declared(**declared)
            with _spreading(is_spread=index == 0):
                optimizer = zero.ZeroOptimizer(model, _optimizers(model, name), topology=topology(2), stage=2, **place)
            if index and name == "adafactor":
                with pytest.raises(
                    CheckpointError, match=r"'qkv' was updated as 3 tensors, and is as 1 here \(load_opt"
                ):
                    load_checkpoint(optimizer, folder, name)
            elif index:
                load_checkpoint(optimizer, folder, name)
            else:
                _train(model, optimizer, rank, range(2))
                save_checkpoint(optimizer, folder, name)
            if name == "muon":
                states = [zero.utils.safe_get_full_optimizer_state(p, "momentum_buffer") for p in model.parameters()]
                momenta.append(as_vector([value for value in states if value is not None]))
                _train(model, optimizer, rank, range(2, 3))
            optimizer.close()
        assert len(momenta) != 1
        assert not momenta or torch.equal(*momenta)


def _rest() -> dict[str, Any]:
    return {name: parts for name, parts in FUSED.items() if name not in ("qkv", "experts")}


@pytest.mark.parametrize("device", ["none", "nvme"])
def test_checkpoints_move_between_declarations(device: str, tmp_path: Path) -> None:
    files = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}} if device == "nvme" else {}
    run_ranks(4, _check_declarations, str(tmp_path / "saved"), files)


def _check_access(rank: int) -> None:
    """States, gradients and masters of a stack are read and set as those of any parameter."""
    model = _declared()
    with _spreading(is_spread=True):
        optimizer = zero.ZeroOptimizer(model, _optimizers(model), topology=topology(2), stage=3)
    _train(model, optimizer, rank, range(1))
    param, values = model.experts, torch.arange(4.0 * 16 * WIDTH).view(4, 16, WIDTH)
    zero.utils.safe_set_full_optimizer_state(param, values, "momentum_buffer")
    zero.utils.safe_set_full_fp32_param(param, -values)
    assert torch.equal(zero.utils.safe_get_full_optimizer_state(param, "momentum_buffer"), values)
    assert torch.equal(zero.utils.safe_get_full_fp32_param(param), -values)
    local = zero.utils.safe_get_local_optimizer_state(param, "momentum_buffer")
    sizes = zcomm.control.gather_float64(torch.tensor([float(local.numel())]), optimizer.topology)
    assert sizes.sum() == param.numel()
    zero.utils.safe_set_local_optimizer_state(param, local + 1, "momentum_buffer")
    assert torch.equal(zero.utils.safe_get_full_optimizer_state(param, "momentum_buffer"), values + 1)
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert torch.equal(zero.utils.safe_get_full_optimizer_state(param, "momentum_buffer"), values + 1)
    optimizer.close()
    for is_spread, parts in ((False, 3), (True, 1)):
        model = _declared(**{**FUSED, "qkv": parts})
        with _spreading(is_spread=is_spread):
            optimizer = zero.ZeroOptimizer(model, _optimizers(model), topology=topology(2), stage=3)
        with pytest.raises(LayoutError, match="a shard fits only the layout it was saved from"):
            optimizer.load_state_dict(state)
        optimizer.close()


def test_access() -> None:
    run_ranks(4, _check_access)


def _check_errors(rank: int) -> None:
    model = Stacks()
    model.qkv.stacked_parts = 2 if rank else 3
    with pytest.raises(LayoutError, match=r"parameter 'qkv'.*in 3 parts"):
        zero.ZeroOptimizer(model, _optimizers(_declare_all(model)), topology=topology(2), stage=1)
    model = _declare_all(Stacks())
    model.qkv.stacked_parts = 5 if rank == 1 else 3
    with pytest.raises(ConfigError, match=r"'qkv' has shape \(96, 32\), so 96 rows, and stacked_parts=5"):
        zero.ZeroOptimizer(model, _new_optimizers(model), topology=topology(2), stage=1)


def _declare_all(model: Stacks) -> Stacks:
    for name, parts in FUSED.items():
        if not hasattr(getattr(model, name), "stacked_parts"):
            getattr(model, name).stacked_parts = parts
    return model


def _new_optimizers(model: Stacks) -> list[Optimizer]:
    """With plain SGD, whose constructor does not look at declarations."""
    return [SGD(model.parameters(), lr=0.1)]


def test_a_declaration_that_is_wrong_on_one_rank_is_an_error_on_all() -> None:
    run_ranks(2, _check_errors)


@pytest.mark.parametrize("declared", [0, -3, 5, True, (96, 1), (95,), "qkv", 2.0, (48, 0, 48), ()])
def test_wrong_declarations(declared: Any) -> None:
    model = Stacks()
    with pytest.raises(ConfigError, match="stacked_parts must divide the rows"):
        zero.split_for_muon(model, {"qkv": declared})
    model.embedding.weight.stacked_parts = None
    model.head.bias.stacked_parts = 1
    with pytest.raises(ConfigError, match="stacked_parts must divide the rows"):
        zero.ZeroOptimizer(model, SGD(model.parameters(), lr=0.1), stage=0)


def test_stacks_that_are_not_declared() -> None:
    model = Stacks()
    with pytest.raises(ConfigError, match=r"must be declared.*'qkv' of shape \(96, 32\).*fused={'qkv': 3}"):
        zero.split_for_muon(model)
    with pytest.raises(ConfigError, match=r"fused must name parameters of the model: 'kqv'.*did you mean 'kv'"):
        zero.split_for_muon(model, {"kqv": 3})
    with pytest.raises(ValueError, match="Muon only supports 2D"):
        torch.optim.Muon([model.experts])
    with pytest.raises(ConfigError, match=r"Muon updates matrices: got a parameter of shape \(4, 16, 32\)"):
        zero.Muon([model.experts])
    with pytest.raises(ConfigError, match=r"Muon updates matrices: got a parameter of shape \(11,\)"):
        zero.Muon([{"params": [model.head.bias]}])
    with pytest.raises(ConfigError, match=r"Muon refuses parameter 'experts' of shape"):
        zero.ZeroOptimizer(nn.ParameterDict({"experts": model.experts}), zero.Muon, lr=0.1)
    for cls in (torch.optim.Muon, zero.Muon):  # given by hand
        own = nn.ParameterDict({"qkv": model.qkv, "bias": model.head.bias})
        optimizers = [cls([own["qkv"]]), AdamW([own["bias"]])]
        with pytest.raises(ConfigError, match=r"must be declared.*'qkv' of shape \(96, 32\)"):
            zero.ZeroOptimizer(own, optimizers, stage=1)
        with pytest.raises(ConfigError, match=r"must be declared.*'qkv' of shape \(96, 32\)"):
            zero.ZeroOptimizer(nn.ParameterDict({"qkv": model.qkv}), cls, stage=1)
        own["qkv"].stacked_parts = 1
        zero.ZeroOptimizer(own, optimizers, stage=1).close()
        del own["qkv"].stacked_parts
    roles = zero.split_for_muon(model, {"qkv": 1}).roles
    assert roles["qkv"] == roles["plain.weight"] == "hidden matrix"
    assert roles["experts"] == "3 dimensions"
    split = zero.split_for_muon(model, FUSED)
    assert {split.roles[name] for name in FUSED} == {"stacked matrices"}
    assert {id(param) for param in split.matrices} >= {id(getattr(model, name)) for name in FUSED}
    model.experts.use_muon = False
    assert zero.split_for_muon(model, FUSED).roles["experts"] == "use_muon is False"


def test_muon_alone_updates_the_parts() -> None:
    """Without a ZeroOptimizer: as torch's Muon, which has a parameter for each."""
    model, apart = _declared(), Stacks(is_apart=True).double()
    names = list(SHAPES)
    stacked = zero.Muon([{"params": [getattr(model, name) for name in names]}], lr=0.02)
    theirs = torch.optim.Muon([part for name in names for part in getattr(apart, name)], lr=0.02)
    for step in range(3):
        for one, optimizer in ((model, stacked), (apart, theirs)):
            _loss(one, step, 0, 0).backward()
            optimizer.step()
            one.zero_grad()
    for name in names:
        assert torch.equal(model.rows(name), apart.rows(name)), name


def _random_matrices(generator: torch.Generator) -> list[nn.Parameter]:
    shapes = [(40, 24), (24, 40), (160, 160), (24, 40), (16, 16), (40, 24), (1, 24), (40, 24), (160, 160)]
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


@pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_batches_are_torchs_muon(adjust_lr_fn: str | None, nesterov: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001
    """Fed the same gradients: the same bits. The seed is the day."""
    monkeypatch.setattr(muon, "BATCH_NUMEL", 2000)  # two of 24 x 40
    ours, theirs = (_random_matrices(torch.Generator().manual_seed(DAY)) for _ in range(2))
    options = {"lr": 0.02, "adjust_lr_fn": adjust_lr_fn, "nesterov": nesterov}
    both = zero.Muon(ours, **options), torch.optim.Muon(theirs, **options)
    gradients = torch.Generator().manual_seed(DAY + 1)
    for _ in range(5):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=gradients)
            other.grad = one.grad.clone()
        ours[4].grad = theirs[4].grad = None
        for optimizer in both:
            optimizer.step()
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert [len(batch) for batch in muon._batches(ours)] == [2, 2, 1, 1, 1, 1, 1]


def test_json() -> None:
    """The optimizer of a configuration takes declared stacks, and does not refuse what is not declared."""
    model = Stacks()
    model.experts.stacked_parts = 4
    config = {"train_batch_size": 1, "optimizer": {"type": "Muon", "params": {"lr": 0.01}}}
    engine, optimizer, *_ = zero.initialize(model=model, config=config | {"zero_optimization": {"stage": 1}})
    shapes = [tuple(param.shape) for param in optimizer.param_groups[0]["params"]]
    assert shapes.count((16, WIDTH)) == 4
    assert (96, WIDTH) in shapes
    engine.backward(_loss(engine, 0, 0, 0))
    engine.step()
    engine.destroy()
