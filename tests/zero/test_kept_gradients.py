"""Gradients that stay over a step: as with torch they are the clipped ones, wherever the factor is applied."""

# covers zero/_step/final_gradients.py

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zero
from tests.ranks import run_ranks
from tests.zero.test_user_gradients import STAGES, WIDTH, _net, _value, _x
from tests.zero.training import full_values, zero_optimizer
from zcomm import StateError
from zero.utils import safe_get_full_grad, safe_set_full_grad


def _change(model: nn.Module, step: int, how: str, share: float = 1.0) -> None:
    """Change the gradients that are held; ``share``: of a backward in the mean."""
    weight = model.get_parameter("layers.1.weight")
    if how == "edit":
        assert weight.grad is not None
        weight.grad.add_(0.3)
    elif how == "assign":
        weight.grad = 0.1 * _value(weight, step).float()
    elif how == "backward":
        (model(_x(step, torch.float32)).square().sum() * 3.0 ** (3 - step) * share).backward()


def _check_kept(rank: int, adam_class: Any, options: dict[str, Any]) -> None:
    """Gradients stay over a step that has clipped them: as with torch they are the clipped ones."""
    plain, model = _net(torch.float32), _net(torch.float32)
    weight, shown = model.layers[1].weight, plain.layers[1].weight
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
    adam = adam_class(model.parameters(), lr=0.01, weight_decay=0.01)
    with zero_optimizer(model, adam, gradient_clipping=0.5, **options) as optimizer:
        for step, how in enumerate(("backward", "backward", "assign", "set", "nothing", "backward", "edit", "alone")):
            if how == "set" or (how == "edit" and options["stage"]):
                held = safe_get_full_grad(weight)
                assert held is not None
                safe_set_full_grad(weight, held + 0.3)
                _change(plain, step, "edit")
            elif how == "alone":  # a backward of rank 0, which is half of the mean; at stage 3 of both
                with optimizer.no_sync():
                    _change(model, step, "backward" if rank == 0 or options["stage"] == 3 else "")
                _change(plain, step, "backward", 1.0 if options["stage"] == 3 else 0.5)
            else:
                _change(model, step, how)
                _change(plain, step, how)
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            reference.step()
            optimizer.step()
            torch.testing.assert_close(torch.tensor(optimizer.last_grad_norm), norm, rtol=1e-4, atol=0)
            for name, values in full_values(model).items():
                torch.testing.assert_close(values, plain.state_dict()[name], rtol=1e-4, atol=2e-4, msg=f"{step} {name}")
            torch.testing.assert_close(safe_get_full_grad(weight), shown.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("where", ["torch", "zero", "host"])
def test_clipped_gradients_that_are_kept_are_added_to(stage: int, where: str) -> None:
    adam_class = zero.CPUAdam if where == "zero" else torch.optim.AdamW
    options = {"offload_optimizer": {"device": "cpu"}} if where == "host" else {}
    run_ranks(2, _check_kept, adam_class, {"stage": stage, **options})


def _check_read_in_step(rank: int, reads: bool) -> None:  # noqa: FBT001
    """A gradient that is read while the update runs stays as it is, and is the clipped one."""
    model = _net(torch.float32)
    sgd = torch.optim.SGD([p for p in model.parameters() if p.ndim == 1], lr=0.1)
    adam = torch.optim.AdamW([p for p in model.parameters() if p.ndim == 2], lr=0.1)
    seen = []
    sgd.register_step_pre_hook(lambda *_: seen.append(safe_get_full_grad(model.layers[1].weight)) if reads else None)
    options: dict[str, Any] = {"stage": 2, "offload_optimizer": {"device": "cpu"}, "gradient_clipping": 0.5}
    with zero_optimizer(model, [sgd, adam], **options) as optimizer:
        plain = _net(torch.float32)
        (plain(_x(0, torch.float32)).square().sum() * 100).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        torch.optim.AdamW([p for p in plain.parameters() if p.ndim == 2], lr=0.1).step()
        (model(_x(0, torch.float32)).square().sum() * 100).backward()
        optimizer.step()
        grad = plain.layers[1].weight.grad
        found = [value for value in seen if value is not None]  # there is none in the trial when it is constructed
        assert len(found) == reads
        for value in (*found, safe_get_full_grad(model.layers[1].weight)):
            torch.testing.assert_close(value, grad, rtol=1e-3, atol=1e-6)
        values = full_values(model)["layers.1.weight"]
        torch.testing.assert_close(values, plain.layers[1].weight.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reads", [False, True])
def test_a_gradient_read_within_an_update_is_the_clipped_one(reads: bool) -> None:  # noqa: FBT001
    run_ranks(2, _check_read_in_step, reads)


def _check_set_in_step(rank: int) -> None:
    model = _net(torch.float32)
    bias, weight, sets = model.layers[0].bias, model.layers[1].weight, list[int]()

    def set_gradient(*_: object) -> None:
        if sets:
            safe_set_full_grad(weight, torch.ones(WIDTH, WIDTH))

    sgd = torch.optim.SGD([bias], lr=0.1)
    adam = zero.CPUAdam([p for p in model.parameters() if p is not bias], lr=0.1)
    sgd.register_step_pre_hook(set_gradient)
    with zero_optimizer(model, [sgd, adam], stage=2, gradient_clipping=0.5) as optimizer:
        (model(_x(0, torch.float32)).square().sum() * 100).backward()
        sets.append(rank)
        with pytest.raises(StateError, match="set it before step"):
            optimizer.step()


def test_a_gradient_set_within_an_update_is_refused() -> None:
    run_ranks(2, _check_set_in_step)


def test_so_they_are_in_files(tmp_path: Any) -> None:
    files = {"device": "nvme", "nvme_path": str(tmp_path)}
    run_ranks(2, _check_kept, torch.optim.AdamW, {"stage": 2, "offload_optimizer": files})
