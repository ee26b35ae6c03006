"""ZeroOptimizer as a torch optimizer: kinds, schedulers, closures, gradients, state; and refusals."""

# covers zero/_activations/forward_hooks.py zero/_optim/host_adam.py zero/_optim/masters.py zero/_step/clip.py

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import run_ranks, topology
from tests.zero.models import as_vector, batch, groups_of, loss_of, new_model, relative_error, train_plain
from tests.zero.training import assert_same_bits, full_values, train, zero_optimizer
from zcomm import ConfigError, LayoutError, StateError, TopologyError
from zero import ZeroOptimizer


class SignMomentum(torch.optim.Optimizer):
    """Like Lion: an elementwise optimizer that no library has."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                momentum.lerp_(param.grad, 1 - group["beta"])
                param.add_(momentum.sign(), alpha=-group["lr"])


class ByCommonNorm(torch.optim.SGD):
    """Couples tensors: divides all gradients by their common norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        grads = [p.grad for p in self.param_groups[0]["params"] if p.grad is not None]
        norm = sum(grad.square().sum() for grad in grads) ** 0.5
        for grad in grads:
            grad.div_(norm)
        super().step(closure)


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "SGD momentum": (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9, "nesterov": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3}),
    "Lion-like": (SignMomentum, {"lr": 1e-3}),
}


def _check_optimizer(rank: int, name: str, stage: int) -> None:
    cls, options = OPTIMIZERS[name]
    model, plain = new_model(torch.float64), new_model(torch.float64)
    train_plain(plain, cls(plain.parameters(), **options), world_size=2, steps=4)
    with zero_optimizer(model, cls, stage=stage, **options) as optimizer:
        train(model, optimizer, rank, steps=4)
        got = as_vector(full_values(model).values())
    assert relative_error(got, as_vector(plain.parameters())) < 1e-10


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_elementwise_optimizer(name: str, stage: int) -> None:
    run_ranks(2, _check_optimizer, name, stage)


def _check_padding(rank: int, stage: int) -> None:
    """AdamW without epsilon divides the padding's zeros by zeros; a quantized block's scale must not become NaN."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3, bias=False)
    x = torch.randn(2, 5)
    options = {"stage": stage, "quantized_weights": True}
    with zero_optimizer(model, torch.optim.AdamW(model.parameters(), lr=0.1, eps=0.0), **options) as optimizer:
        for _ in range(2):
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert full_values(model)["weight"].isfinite().all()
        assert all(master.isfinite().all() for master in optimizer.state_dict()["masters"])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_padding_stays_zero(stage: int) -> None:
    run_ranks(2, _check_padding, stage)


def _check_scheduler_and_closure(rank: int) -> None:
    plain, model = new_model(torch.float64), new_model(torch.float64)
    reference = torch.optim.AdamW(groups_of(plain), lr=1e-2)
    plain_scheduler = torch.optim.lr_scheduler.OneCycleLR(reference, max_lr=[1e-2, 3e-2], total_steps=5)
    train_plain(plain, reference, world_size=2, steps=4, after_step=plain_scheduler.step)
    with zero_optimizer(model, stage=2) as optimizer:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-2, 3e-2], total_steps=5)
        for step in range(4):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, *batch(step, 0, rank))
                loss.backward()
                return loss

            assert optimizer.step(closure).item() > 0
            optimizer.zero_grad()
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
        got = as_vector(full_values(model).values())
    assert relative_error(got, as_vector(plain.parameters())) < 1e-10


def test_scheduler_and_closure() -> None:
    run_ranks(2, _check_scheduler_and_closure)


def _check_torch_clip(rank: int, stage: int) -> None:
    model = new_model()
    with zero_optimizer(model, stage=stage) as optimizer:
        loss_of(model, *batch(0, 0, rank)).backward()
        if stage == 0:  # full averaged gradients, as after DDP's backward
            expected = new_model()
            for other in range(2):
                (loss_of(expected, *batch(0, 0, other)) / 2).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            assert norm.item() == pytest.approx(
                torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.1).item(), rel=1e-5
            )
            for param, other in zip(model.parameters(), expected.parameters(), strict=True):
                torch.testing.assert_close(param.grad, other.grad, rtol=1e-4, atol=1e-7)
        else:
            with pytest.raises(StateError, match=r"gradient of '.*clip_grad_norm_\(max_norm\)"):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with pytest.raises(StateError, match="sharded"):
                model.wte.weight.grad.norm()
        optimizer.zero_grad()
        assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_torch_clip_grad_norm_is_right_or_raises(stage: int) -> None:
    run_ranks(2, _check_torch_clip, stage)


def _check_infinity_norm(rank: int) -> None:
    plain, model = new_model(torch.float64), new_model(torch.float64)
    for other in range(3):
        (loss_of(plain, *batch(0, 0, other)) / 3).backward()
    with zero_optimizer(model, stage=3) as optimizer:
        loss_of(model, *batch(0, 0, rank)).backward()
        expected = max(p.grad.abs().max().item() for p in plain.parameters())
        assert optimizer.clip_grad_norm_(1e9, math.inf).item() == pytest.approx(expected, rel=1e-12)
        with pytest.raises(ConfigError, match="norm_type=1"):
            optimizer.clip_grad_norm_(1.0, 1)
        model.wte.weight.grad = None
        optimizer.zero_grad()
        (loss_of(model, *batch(0, 0, rank)) * (math.nan if rank == 1 else 1)).backward()
        for kind in (2.0, math.inf):
            assert math.isnan(optimizer.clip_grad_norm_(1.0, kind).item())
            with pytest.raises(StateError, match="nan"):
                optimizer.clip_grad_norm_(1.0, kind, error_if_nonfinite=True)


def test_infinity_norm_and_nan() -> None:
    run_ranks(3, _check_infinity_norm)


def _check_cleared_by_the_model(rank: int, stage: int) -> None:
    values = []
    for clears_through_model in (False, True):
        model = new_model()
        with zero_optimizer(model, stage=stage) as optimizer:
            for step in range(3):
                loss_of(model, *batch(step, 0, rank)).backward()
                optimizer.step()
                (model if clears_through_model else optimizer).zero_grad()
                groups = optimizer.param_groups
                assert clears_through_model or all(p.grad is None for group in groups for p in group["params"])
            loss_of(model, *batch(7, 0, rank)).backward()
            model.zero_grad()
            optimizer.step()  # no gradient to apply
            values.append(full_values(model))
    assert_same_bits(*values)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_model_zero_grad_clears_too(stage: int) -> None:
    run_ranks(2, _check_cleared_by_the_model, stage)


def _check_rank_dependent_use(rank: int, stage: int) -> None:
    """Rank 1 never uses the second layer; the single process uses it with half of the batch."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]).double()
    plain = copy.deepcopy(model)
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.1)
    with zero_optimizer(model, torch.optim.AdamW(model.parameters(), lr=0.1), stage=stage) as optimizer:
        for step in range(4):
            uses_second = step >= 1  # in step 0 no rank uses it: its weights must not even decay
            total = plain[0](x[0]).square().sum() + plain[0](x[1]).square().sum()
            (total + plain[1](x[0]).square().sum() * uses_second if uses_second else total).backward()
            for param in plain.parameters():
                param.grad = None if param.grad is None else param.grad / 2
            reference.step()
            reference.zero_grad()
            loss = model[0](x[rank]).square().sum()
            (loss + model[1](x[rank]).square().sum() if uses_second and rank == 0 else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
        got = full_values(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(got[name], param.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_used_on_some_ranks_only(stage: int) -> None:
    run_ranks(2, _check_rank_dependent_use, stage)


def _check_resume(rank: int, stage: int) -> None:
    model = new_model(torch.bfloat16)
    with zero_optimizer(model, stage=stage) as optimizer:
        train(model, optimizer, rank, steps=2)
        saved = copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, rank, steps=2)
        expected = full_values(model)
    model = new_model(torch.bfloat16, seed=9)
    with zero_optimizer(model, stage=stage) as optimizer:
        optimizer.load_state_dict(saved)
        train(model, optimizer, rank, steps=2)
        assert_same_bits(full_values(model), expected)
        saved["layout"]["world_size"] = 5
        with pytest.raises(LayoutError, match="world_size: saved 5, here 2"):
            optimizer.load_state_dict(saved)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_state_dict_resumes_bit_for_bit(stage: int) -> None:
    run_ranks(2, _check_resume, stage)


def _refused(error: type[Exception], match: str, build: Any) -> None:
    with pytest.raises(error, match=match):
        build()


def test_bad_configuration_is_refused() -> None:
    """With one rank, without torch.distributed: the error comes before any communication."""
    adamw = torch.optim.AdamW
    _refused(ConfigError, "stage=4", lambda: ZeroOptimizer(new_model(), adamw, stage=4))
    _refused(
        ConfigError,
        "did you mean 'quantized_weights'",
        lambda: ZeroOptimizer(new_model(), adamw, quantised_weights=True),
    )
    _refused(ConfigError, "reduce_bucket_size=0", lambda: ZeroOptimizer(new_model(), adamw, reduce_bucket_size=0))
    _refused(
        TopologyError, "hpz_partition_size=3", lambda: ZeroOptimizer(new_model(), adamw, stage=3, hpz_partition_size=3)
    )
    _refused(ConfigError, "LBFGS cannot update flat shards", lambda: ZeroOptimizer(new_model(), torch.optim.LBFGS))
    _refused(ConfigError, "ByCommonNorm is not elementwise", lambda: ZeroOptimizer(new_model(), ByCommonNorm, lr=0.1))
    frozen = new_model().requires_grad_(False)
    _refused(ConfigError, "none of them trainable", lambda: ZeroOptimizer(frozen, adamw))
    _refused(ConfigError, "ReLU has 0 parameters", lambda: ZeroOptimizer(nn.ReLU(), adamw(new_model().parameters())))


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "of the optimizer": (
        {"lr": 0.1, "momentun": 0.9},
        r"has the options 'momentun' \(did you mean 'momentum'\?\): SGD",
    ),
    "of ours": (
        {"lr": 0.1, "overlap_com": True},
        r"has the options 'overlap_com' \(did you mean 'overlap_comm'\?\): SGD",
    ),
    "a value": ({"lr": "3e-4"}, r"SGD could not be constructed with lr='3e-4': "),
    "a mode": ({"lr": 0.1, "mode": "delta-hpz"}, r"mode='delta-hpz' \(did you mean 'delta_hpz'\?\)"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_wrong_option_alone_is_named(name: str) -> None:
    options, text = OPTIONS[name]
    _refused(ConfigError, text, lambda: ZeroOptimizer(new_model(), torch.optim.SGD, **options))


def test_bad_models_are_refused() -> None:
    adamw = torch.optim.AdamW
    model = new_model()
    _refused(ConfigError, "in none, first", lambda: ZeroOptimizer(model, adamw([model.wte.weight])))
    _refused(ConfigError, "must be in the model", lambda: ZeroOptimizer(model, adamw(new_model().parameters())))
    used = adamw(model.parameters())
    loss_of(model, *batch(0, 0, 0)).backward()
    used.step()
    _refused(StateError, "has state", lambda: ZeroOptimizer(model, used))
    with torch.device("meta"):
        meta = nn.Linear(2, 2)
    _refused(LayoutError, "on meta", lambda: ZeroOptimizer(meta, torch.optim.SGD(meta.parameters())))
    _refused(LayoutError, "one device", lambda: ZeroOptimizer(nn.Sequential(nn.Linear(2, 2), meta), adamw))


def test_changed_model_is_a_named_error() -> None:
    model = new_model()
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=2)
    _refused(StateError, "another ZeroOptimizer", lambda: ZeroOptimizer(model, torch.optim.AdamW))
    _refused(StateError, "after construction", lambda: optimizer.add_param_group({"params": [torch.zeros(1)]}))
    model.blocks[0].mlp[0].weight = nn.Parameter(torch.zeros(53, 24))
    _refused(StateError, r"blocks\.0\.mlp\.0\.weight", optimizer.step)


def _check_models_differ(rank: int) -> None:
    with pytest.raises(LayoutError, match="same on every rank"):
        ZeroOptimizer(nn.Linear(3 + rank, 2), torch.optim.SGD, lr=0.1, topology=topology(2))
    bfloat16 = nn.Linear(3, 2, dtype=torch.bfloat16 if rank else torch.float32)
    with pytest.raises(LayoutError, match="model given to ZeroOptimizer must be the same"):
        ZeroOptimizer(bfloat16, torch.optim.SGD, lr=0.1, topology=topology(2))
    message = r"zero_optimization\.stage is 0 on rank 0 and 1 on rank 1"
    with pytest.raises(ConfigError, match=message):
        ZeroOptimizer(nn.Linear(3, 2), torch.optim.SGD, lr=0.1, stage=rank, topology=topology(2))
    with pytest.raises(ConfigError, match=r"optimizer: option lr is 0\.1 on rank 0 and 0\.2 on rank 1"):
        ZeroOptimizer(nn.Linear(3, 2), torch.optim.SGD, lr=0.1 + rank / 10, topology=topology(2))
    linear = nn.Linear(3, 2)
    sgd = torch.optim.SGD(linear.parameters(), lr=0.1, momentum=rank / 2)
    with pytest.raises(ConfigError, match=r"parameter group 0 momentum is 0\.0 on rank 0 and 0\.5 on rank 1"):
        ZeroOptimizer(linear, sgd, topology=topology(2))
    with pytest.raises(ConfigError, match="optimizer class is SGD on rank 0 and AdamW on rank 1"):
        ZeroOptimizer(linear, torch.optim.AdamW if rank else torch.optim.SGD, lr=0.1, topology=topology(2))


def test_ranks_that_disagree_all_raise() -> None:
    run_ranks(2, _check_models_differ)
