"""Delayed updates are exactly one step late, whatever reads, saves or stops the run.

The oracle trains in one process by the formula: gradients at the parameters after the last update but one, and a plain
``zero.CPUAdam`` over full float32 masters.
"""

# covers zero/_optim/delayed_update.py zero/_optim/file_update.py zero/_optim/optimizer_clone.py

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import zero
from tests.ranks import run_ranks
from tests.zero.delayed import CPU, LAST, Gated, masters_of, nvme, train_late
from tests.zero.logs import logged
from tests.zero.models import batch, groups_of, loss_of, new_model
from tests.zero.training import assert_same_bits, full_values, zero_optimizer

STEPS = 6


def _rate(step: int) -> float:
    return 1.0 / (1 + step % 3)


def _expected(rank: int, case: dict[str, Any], late: set[str]) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of this rank, and the parameters after the last update."""
    model, num_micro = new_model(has_unused=True), case.get("gradient_accumulation_steps", 1)
    params = dict(model.named_parameters())
    master_of = {param: param.detach().clone() for param in params.values()}
    groups = [{**group, "params": [master_of[p] for p in group["params"]]} for group in groups_of(model)]
    inner = zero.CPUAdam(groups, lr=1e-2)
    scheduler, losses = LambdaLR(inner, _rate), []
    for step in range(STEPS):
        sums = {param: torch.zeros_like(param) for param in params.values()}
        for micro in range(num_micro):
            grads = []
            for of_rank in range(2):
                loss = loss_of(model, *batch(step, micro, of_rank)) / num_micro
                grads.append(torch.autograd.grad(loss, list(params.values()), allow_unused=True))
                losses += [loss.item()] if of_rank == rank else []
            for param, first, second in zip(params.values(), *grads, strict=True):
                if first is not None:
                    sums[param] += (first + second) / 2
        limit = case.get("gradient_clipping", 0)
        norm = torch.cat([value.double().flatten() for value in sums.values()]).norm().item()
        factor = min(1.0, limit / (norm + 1e-6)) if limit else 1.0
        before = {param: master.clone() for param, master in master_of.items()}
        for name, param in params.items():
            if "unused" not in name:
                master_of[param].grad = sums[param] * factor
        inner.step()
        scheduler.step()
        for name, param in params.items():
            is_late = name in late and step >= case["delay_start"]
            param.data.copy_((before if is_late else master_of)[param])
    return losses, {name: master_of[param] for name, param in params.items()}


def _cases(tier: str, folder: str) -> list[dict[str, Any]]:
    if tier == "cpu":
        return [
            CPU | {"stage": 1},
            CPU | {"stage": 2, "delay_start": 2, "gradient_accumulation_steps": 3},
            CPU | {"stage": 3, "gradient_clipping": 0.05},
            CPU | {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        ]
    return [
        nvme(folder, stage=2),
        nvme(folder, stage=3, gradient_accumulation_steps=2, gradient_clipping=0.05, delay_start=3),
        CPU | {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0}},
    ]


def _check_staleness(rank: int, tier: str, folder: str) -> None:
    for case in _cases(tier, folder):
        model, Gated.num_steps_begun = new_model(has_unused=True), 0
        with zero_optimizer(model, Gated(groups_of(model), lr=1e-2), **case) as optimizer:
            scheduler = LambdaLR(optimizer, _rate)
            late = {s.name for b in optimizer.parts.runtime.buckets if b.states.is_on_host for s in b.layout.slots}
            losses = train_late(model, optimizer, rank, range(STEPS), scheduler=scheduler, **case)
            Gated.num_steps_begun += 1
            optimizer.finish_update()
            got = full_values(model)
        expected = _expected(rank, case, late)
        if "gradient_clipping" in case:
            assert losses == pytest.approx(expected[0], rel=1e-6)
            for name, value in got.items():
                torch.testing.assert_close(value, expected[1][name], rtol=1e-5, atol=1e-7)
        else:
            assert losses == expected[0], case
            assert_same_bits(got, expected[1])


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_forward_reads_the_parameters_of_one_update_before(tier: str, tmp_path: Path) -> None:
    """Updates run as late as they can: after the next backward, and after the scheduler's next step."""
    run_ranks(2, _check_staleness, tier, str(tmp_path))


def _check_torch(rank: int) -> None:
    """torch.optim optimizers have the same delay, and keep their step counts."""
    results = []
    for inner in (torch.optim.AdamW, zero.CPUAdam):
        model = new_model()
        given, as_given = inner(groups_of(model), lr=1e-2, weight_decay=0.1), {"zero_force_ds_cpu_optimizer": False}
        with zero_optimizer(model, given, **CPU, **as_given, stage=2) as optimizer:
            assert optimizer.parts.inner is given
            losses = train_late(model, optimizer, rank, range(4), scheduler=LambdaLR(optimizer, _rate))
            assert zero.utils.safe_get_full_optimizer_state(model.head.weight, "step") == 4
            results.append(losses)
    assert results[0] == pytest.approx(results[1], rel=1e-5)


def test_torchs_optimizers_can_be_delayed() -> None:
    run_ranks(2, _check_torch)


class Waiting(torch.optim.SGD):
    """Its step waits in a thread until the event is set."""

    goes_on = threading.Event()

    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        assert Waiting.goes_on.wait(20)
        super().step()


def test_a_rate_in_a_tensor_counts_as_it_was_when_the_step_was_decided() -> None:
    """Schedulers write to such a rate in place before the delayed update has run."""
    model, rate = nn.Linear(4, 3, bias=False), torch.tensor(0.5)
    before = model.weight.detach().clone()
    Waiting.goes_on.set()
    optimizer = zero.ZeroOptimizer(model, Waiting(model.parameters(), lr=rate, foreach=False), **CPU, stage=1)
    Waiting.goes_on.clear()
    try:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"].fill_(100)
        Waiting.goes_on.set()
        optimizer.finish_update()
        torch.testing.assert_close(model.weight.detach(), before - 0.5 * 2)
        assert optimizer.param_groups[0]["lr"] == 100, "of the next step"
    finally:
        Waiting.goes_on.set()
        optimizer.close()


def _check_fast_updates(rank: int) -> None:
    """An update is computed before the previous one is written back: each has memory of its own."""
    results = []
    for is_fast in (False, True):
        model = new_model()
        with zero_optimizer(model, zero.CPUAdam, lr=1e-2, stage=2, **CPU) as optimizer:
            delayed = optimizer.parts.runtime.delayed
            write_shards = delayed.write_shards

            def write_late(delayed: Any = delayed, write_shards: Any = write_shards) -> Any:
                if delayed._future is not None:
                    delayed._future.result()
                return write_shards()

            delayed.write_shards = write_late if is_fast else write_shards
            results.append(train_late(model, optimizer, rank, range(4)))
    assert results[0] == results[1]


def test_updates_may_overtake_the_publication_before() -> None:
    run_ranks(2, _check_fast_updates)


def _read_all(model: nn.Module, optimizer: Any, folder: str, step: int) -> None:
    """Call everything that reads state."""
    weight = model.head.weight
    master = zero.utils.safe_get_full_fp32_param(weight)
    assert master is not None
    assert zero.utils.safe_get_local_fp32_param(weight) is not None
    assert zero.utils.safe_get_full_optimizer_state(weight, "exp_avg") is not None
    assert not torch.equal(full_values(model)["wte.weight"], master.to(weight.dtype)), "parameters are behind"
    optimizer.state_dict()
    zero.save_checkpoint(optimizer, folder, f"step{step}", async_op=step % 2 == 1)
    zero.checkpoints.save_model_file(optimizer, Path(folder) / f"{step}.safetensors")
    zero.checkpoints.save_model_file(optimizer, Path(folder) / f"{step}.bin")
    if optimizer.topology.rank == 0:
        saved = torch.load(f"{folder}/{step}.bin", weights_only=True)["wte.weight"]
        assert torch.equal(saved, master.to(weight.dtype)), "what is saved has the last update"
    model.eval()
    with torch.no_grad():
        loss_of(model, *batch(99, 0, 0))
    model.train()
    optimizer.memory()


def _check_resuming(rank: int, folder: str) -> None:
    case = {"bf16": {"enabled": True}, "gradient_clipping": 0.05}
    for number, (first, second) in enumerate(
        (
            (CPU | {"stage": 2}, CPU | {"stage": 3}),
            (CPU | {"stage": 3, "delay_start": 4}, nvme(folder, stage=1, delay_start=4)),
            (nvme(folder, stage=3), CPU | {"stage": 2}),
        )
    ):
        model, saved = new_model(), f"{folder}/{number}"
        with zero_optimizer(model, zero.CPUAdam, lr=1e-2, **case, **first) as optimizer:
            expected = train_late(model, optimizer, rank, range(STEPS))
        model = new_model()
        with zero_optimizer(model, zero.CPUAdam, lr=1e-2, **case, **first) as optimizer:
            got = train_late(model, optimizer, rank, range(3))
            if number == 1:
                zero.save_checkpoint(optimizer, saved, "step2")
            else:
                _read_all(model, optimizer, saved, 2)
            state = copy.deepcopy(optimizer.state_dict())
            got += train_late(model, optimizer, rank, range(3, STEPS))
            assert got == expected, "looking at a run changes it"
            masters = zero.utils.safe_get_full_fp32_param(model.head.weight)
            optimizer.load_state_dict(state)
            assert train_late(model, optimizer, rank, range(3, STEPS)) == expected[3:], "from a state dict"
            assert torch.equal(zero.utils.safe_get_full_fp32_param(model.head.weight), masters)
        model = new_model(seed=1)
        with zero_optimizer(model, zero.CPUAdam, lr=1e-2, **case, **second) as optimizer:
            zero.load_checkpoint(optimizer, saved, "step2")
            assert train_late(model, optimizer, rank, range(3, STEPS)) == expected[3:], "from a checkpoint"
            assert torch.equal(zero.utils.safe_get_full_fp32_param(model.head.weight), masters)


def test_a_run_that_is_looked_at_saved_and_resumed_has_the_same_bits(tmp_path: Path) -> None:
    """Resumed at another stage and tier, too; the reference run was never read or saved."""
    run_ranks(2, _check_resuming, str(tmp_path))


def _changes(model: nn.Module, rank: int) -> Iterator[None]:
    """Call everything that changes masters or states, one after the other."""
    weight, whole = model.head.weight, full_values(model)
    value = torch.linspace(-1, 1, weight.numel()).view(weight.shape)
    yield zero.utils.safe_set_full_fp32_param(weight, value)
    yield zero.utils.safe_set_full_optimizer_state(weight, value, "exp_avg")
    yield _modify(model.shared.bias, rank)
    yield model.load_state_dict({name: values + 1 for name, values in whole.items()}, strict=False)
    model.load_state_dict(whole, strict=False)
    assert_same_bits(full_values(model), whole)
    yield


def _check_changes(rank: int) -> None:
    """Values set while an update is in flight are kept as well as the update, and parameters equal masters."""
    for stage in (2, 3):
        model = new_model()
        with zero_optimizer(model, zero.CPUAdam, lr=1e-2, stage=stage, bf16={"enabled": True}, **CPU) as optimizer:
            train_late(model, optimizer, rank, range(2))
            for _ in _changes(model, rank):
                assert_same_bits(full_values(model), masters_of(model))
                train_late(model, optimizer, rank, range(2))
                assert optimizer.parts.runtime.has_pending_update


def _modify(param: nn.Parameter, rank: int) -> None:
    with torch.no_grad(), zero.GatheredParameters([param], modifier_rank=LAST):
        if rank == LAST:
            param[3] = 5.0
    with zero.GatheredParameters([param]):
        assert param[3] == 5.0


def test_changes_publish_first() -> None:
    run_ranks(2, _check_changes)


def _check_closing(rank: int) -> None:
    """Closing with an update in flight applies it to the model; a state dict that cannot include it raises."""
    for stage in (1, 2, 3):
        model, at_once = new_model(), new_model()
        options = {"stage": stage, "lr": 1e-2, "offload_optimizer": {"device": "cpu"}}
        with zero_optimizer(at_once, zero.CPUAdam, **options) as optimizer:  # the first update has the same gradients
            train_late(at_once, optimizer, rank, range(1))
            expected = full_values(at_once)
        with zero_optimizer(model, zero.CPUAdam, **options | CPU) as optimizer:
            before = full_values(model)
            train_late(model, optimizer, rank, range(1))
            assert_same_bits(full_values(model), before)
            with logged() as texts:
                saved = model.state_dict()
            assert any("finish_update" in text for text in texts) == (stage < 3)
            if stage == 3 and rank == 0:
                assert_same_bits({name: saved[name] for name in expected}, expected)
            with zero.GatheredParameters(model.parameters()):
                optimizer.close()
            assert_same_bits({name: p.detach() for name, p in model.named_parameters()}, expected)


def test_closing_waits_and_publishes() -> None:
    run_ranks(2, _check_closing)


def _check_memory(rank: int) -> None:
    model = new_model()
    with zero_optimizer(model, zero.CPUAdam, lr=1e-2, stage=2, bf16={"enabled": True}, **CPU) as optimizer:
        shard = sum(bucket.layout.shard_numel for bucket in optimizer.parts.runtime.buckets)
        assert optimizer.memory().buffers["parameters of a delayed update"] == 2 * 2 * shard
        assert optimizer.memory().buffers["gradients of a delayed update"] == 0
        train_late(model, optimizer, rank, range(3))
        report = optimizer.memory()
        assert report.gradients == report.buffers["gradients of a delayed update"] == 2 * shard
        assert "during the next step" in str(optimizer.effective)
    model = new_model()
    built = zero_optimizer(model, zero.CPUAdam, lr=1e-2, stage=2, delayed_update=True)
    with logged() as texts, built as optimizer:
        assert optimizer.memory().buffers["parameters of a delayed update"] == 0
        assert "during the next step" not in str(optimizer.effective)
    if rank == 0:
        assert any("delayed_update=True has no effect: offload_optimizer.device is none" in text for text in texts)


def test_what_it_costs_is_reported_and_without_offload_it_is_inactive() -> None:
    run_ranks(2, _check_memory)
