"""Masters and moments in host memory or in files: the bits of training without offload, and the bytes moved."""

# covers zero/_storage/transfer_counters.py

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from tests.broken import Breaks
from tests.covering import covering_set
from tests.ranks import run_ranks
from tests.zero.models import batch, groups_of, loss_of, new_model
from tests.zero.training import assert_same_bits, full_values, zero_optimizer
from zcomm import ConfigError, StateError
from zero._storage.transfer_counters import moved

LAST = 1
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TIERS: dict[str, dict[str, Any]] = {
    "cpu": {"device": "cpu"},
    "part": {"device": "cpu", "ratio": 0.6},
    "nvme": {"device": "nvme"},
    "nvme in turn": {"device": "nvme", "ratio": 0.6, "buffer_count": 1},
    "nvme ahead": {"device": "nvme", "pipeline_read": True, "pipeline_write": True, "buffer_count": 3},
}
OPTIMIZERS: dict[str, Any] = {
    "adam": lambda groups: zero.CPUAdam(groups, lr=1e-2),
    "narrow": lambda groups: zero.CPUAdam(groups, lr=1e-2, amsgrad=True, fp32_optimizer_states=False),
    "lion": lambda groups: zero.CPULion(groups, lr=1e-3),
    "adagrad": lambda groups: zero.CPUAdagrad(groups, lr=1e-2),
}
FACTORS: dict[str, list[Any]] = {
    "tier": list(TIERS),
    "stage": [1, 2, 3],
    "dtype": list(DTYPES),
    "num_micro": [1, 2],
    "max_norm": [0.0, 0.5],
    "plus": [False, True],
    "optimizer": list(OPTIMIZERS),
}
PLUS = {"quantized_weights": True, "quantized_gradients": True}


def _options(case: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {
        "stage": case["stage"],
        "gradient_accumulation_steps": case["num_micro"],
        "gradient_clipping": case["max_norm"],
        "reduce_bucket_size": 3000,
        "allgather_bucket_size": 3000,
    }
    if case["plus"]:
        options |= PLUS | ({"hpz_partition_size": 1} if case["stage"] == 3 else {})
    if case["dtype"] == "fp16":
        options["fp16"] = {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 2, "hysteresis": 1}
    elif case["dtype"] == "bf16":
        options["bf16"] = {"enabled": True}
    return options


def _train(rank: int, case: dict[str, Any], **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Two steps, and in fp16 one more that is skipped; return the losses and the parameters."""
    model, losses = new_model(has_unused=True, has_frozen=True), []
    optimizer = OPTIMIZERS[case["optimizer"]](groups_of(model))
    with zero_optimizer(model, optimizer, **_options(case), **options) as wrapped:
        for step in range(3 if case["dtype"] == "fp16" else 2):
            for micro in range(case["num_micro"]):
                loss = loss_of(model, *batch(step, micro, rank)) / case["num_micro"]
                overflows = case["dtype"] == "fp16" and (step, micro, rank) == (1, 0, 1)
                wrapped.scale(loss * float("inf") if overflows else loss).backward()
                losses.append(loss.item())
            wrapped.step()
            wrapped.zero_grad()
            assert wrapped.was_step_applied == (case["dtype"] != "fp16" or step != 1)
        return losses, full_values(model)


def _offload(tier: str, folder: str) -> dict[str, Any]:
    """Sub-groups that cut parameters; in files their size is not a multiple of a page."""
    return {"offload_optimizer": TIERS[tier] | {"nvme_path": folder}, "sub_group_size": 1601}


def _check_case(rank: int, cases: list[dict[str, Any]], folder: str) -> None:
    for case in cases:
        expected, got = _train(rank, case), _train(rank, case, **_offload(case["tier"], folder))
        assert expected[0] == got[0], case
        assert_same_bits(expected[1], got[1])


@pytest.mark.parametrize("tier", list(TIERS))
def test_every_tier_has_the_bits_of_none(tier: str, tmp_path: Path) -> None:
    """The cases cover any two of tier, stage, precision, accumulation, clipping, ZeRO++ and optimizer."""
    cases = [case for case in covering_set(FACTORS, 2) if case["tier"] == tier]
    run_ranks(2, _check_case, cases, str(tmp_path))
    assert not list(tmp_path.iterdir())


def _check_bytes(rank: int) -> None:
    for stage in (1, 2, 3):
        for num_micro in (1, 3):
            model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 32, bias=False))
            numel = sum(p.numel() for p in model.parameters())
            options = {"stage": stage, "gradient_accumulation_steps": num_micro, "bf16": {"enabled": True}}
            with zero_optimizer(model, zero.CPUAdam, lr=0.1, offload_optimizer={"device": "cpu"}, **options) as wrapped:
                for _ in range(2):
                    with moved() as window:
                        for _ in range(num_micro):
                            model(torch.ones(2, 64).bfloat16()).sum().backward()
                        wrapped.step()
                        wrapped.zero_grad()
                    means = 1 if stage == 1 else num_micro
                    assert window.bytes(kind="gradients", link="to_host") == 2 * numel // 2 * means
                    assert window.bytes(kind="parameters", link="to_device") == 2 * numel // 2
                    assert window.bytes() == 2 * numel // 2 * (1 + means)


def test_bf16_moves_two_bytes_down_and_two_up() -> None:
    """Two ranks: half of every parameter each; from stage 2 on, gradients move after every backward."""
    run_ranks(2, _check_bytes)


def _check_torch(rank: int, folder: str) -> None:
    """A torch optimizer on the host, in float32: no transfer rounds."""
    case = {"num_micro": 2, "max_norm": 0.5, "dtype": "fp32", "plus": False}
    for stage, name in ((1, "torch"), (2, "torch"), (3, "torch"), (2, "sgd")):
        case |= {"stage": stage, "optimizer": name}
        expected = _train(rank, case)
        for tier in ("cpu", "nvme in turn"):
            got = _train(rank, case, **_offload(tier, folder), zero_force_ds_cpu_optimizer=False)
            assert expected[0] == got[0]
            assert_same_bits(expected[1], got[1])


OPTIMIZERS["torch"] = lambda groups: torch.optim.AdamW(groups, lr=1e-2)
OPTIMIZERS["sgd"] = lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True)


def test_torchs_optimizers_work_on_the_host(tmp_path: Path) -> None:
    run_ranks(2, _check_torch, str(tmp_path))


class Failing(torch.optim.SGD):
    """Fails at the second step, on one rank."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise MemoryError("no memory left")
        return super().step(closure)


def _check_failure(rank: int) -> None:
    model = new_model()
    with zero_optimizer(model, Failing, lr=0.1, stage=2, offload_optimizer={"device": "cpu"}) as optimizer:
        optimizer.parts.inner.fails = rank == 1
        loss_of(model, *batch(0, 0, rank)).backward()
        with pytest.raises(MemoryError if rank == 1 else StateError, match="no memory left"):
            optimizer.step()
        with pytest.raises(StateError, match=r"load the last checkpoint.*no memory left"):
            optimizer.step()


def test_a_failed_update_is_an_error_on_every_rank_and_stays_one() -> None:
    run_ranks(2, _check_failure)


def _check_refused(rank: int) -> None:
    with pytest.raises(ConfigError, match="float64"):
        zero.ZeroOptimizer(new_model(torch.float64), zero.CPUAdam, offload_optimizer={"device": "cpu"})
    with pytest.raises(ConfigError, match="nvme_path"):
        zero.ZeroOptimizer(new_model(), zero.CPUAdam, offload_optimizer={"device": "nvme"})


def test_what_is_refused() -> None:
    run_ranks(2, _check_refused)


def _steps(model: nn.Module, optimizer: Any, rank: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, *batch(step, 0, rank))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _states_of(optimizer: Any) -> dict[str, torch.Tensor]:
    """This rank's masters and moments."""
    state = optimizer.state_dict()
    found = {f"master {i}": master for i, master in enumerate(state["masters"])}
    for number, values in state["optimizer"]["state"].items():
        found |= {f"{name} {number}": value.clone() for name, value in values.items()}
    assert len(found) > len(state["masters"])
    assert not any(value.isnan().any() for value in found.values())
    return found


def _check_checkpoint(rank: int, folder: str) -> None:
    """Save from files, load into another tier and stage, and the reverse; then a state dict."""
    for saved, loaded in (("nvme ahead", "cpu"), ("cpu", "nvme")):
        checkpoint, model = f"{folder}/{saved}", new_model(torch.bfloat16)
        with zero_optimizer(model, zero.CPUAdam, lr=1e-2, stage=2, **_offload(saved, folder)) as optimizer:
            _steps(model, optimizer, rank, range(2))
            zero.save_checkpoint(optimizer, checkpoint, "two", async_op=True)
            state = copy.deepcopy(optimizer.state_dict())
            expected = _steps(model, optimizer, rank, range(2, 4)), full_values(model)
            optimizer.load_state_dict(state)
            got = _steps(model, optimizer, rank, range(2, 4)), full_values(model)
            assert got[0] == expected[0]
            assert_same_bits(got[1], expected[1])
        model = new_model(torch.bfloat16, seed=1)
        with zero_optimizer(model, zero.CPUAdam, lr=1e-2, stage=3, **_offload(loaded, folder)) as optimizer:
            zero.load_checkpoint(optimizer, checkpoint)
            got = _steps(model, optimizer, rank, range(2, 4)), full_values(model)
        assert got[0] == expected[0]
        assert_same_bits(got[1], expected[1])


def test_checkpoints_from_any_tier_to_any_other(tmp_path: Path) -> None:
    run_ranks(2, _check_checkpoint, str(tmp_path))


def _check_edits(rank: int, folder: str) -> None:
    model = new_model(torch.bfloat16)
    with zero_optimizer(model, zero.CPUAdam, lr=1e-2, stage=2, **_offload("nvme", folder)) as optimizer:
        report = optimizer.memory()
        numel = sum(p.numel() for p in model.parameters())
        assert report.states < 100, "at rest nothing is in memory"
        assert report.states_in_files >= 2 * 12 * numel // 2
        _steps(model, optimizer, rank, range(1))
        weight, value = model.head.weight, torch.linspace(-1, 1, model.head.weight.numel()).view_as(model.head.weight)
        zero.utils.safe_set_full_fp32_param(weight, value)
        zero.utils.safe_set_full_optimizer_state(weight, value * 2, "exp_avg")
        with torch.no_grad(), zero.GatheredParameters([model.shared.bias], modifier_rank=LAST):
            if rank == LAST:
                model.shared.bias[3] = 5.0
        assert torch.equal(zero.utils.safe_get_full_fp32_param(weight), value)
        assert torch.equal(zero.utils.safe_get_full_optimizer_state(weight, "exp_avg"), value * 2)
        assert zero.utils.safe_get_full_fp32_param(model.shared.bias)[3] == 5.0
        assert torch.equal(full_values(model)["wte.weight"], value.bfloat16())
        local = zero.utils.safe_get_local_fp32_param(weight)
        assert torch.isin(local, value).all()


def test_what_rests_in_files_can_be_read_and_set(tmp_path: Path) -> None:
    run_ranks(2, _check_edits, str(tmp_path))


def _check_broken_files(rank: int, folder: str) -> None:
    """A read or a write fails on one rank: all ranks are before the step, and continue as if nothing had failed."""
    case = {"lr": 1e-2, "stage": 2, "bf16": {"enabled": True}, "gradient_clipping": 0.5}
    model = new_model()
    with zero_optimizer(model, zero.CPUAdam, **case, **_offload("nvme ahead", folder)) as optimizer:
        expected = _steps(model, optimizer, rank, range(3)), _states_of(optimizer), full_values(model)
    for verb, at in (("write", 3), ("read", 4)):
        model = new_model()
        with zero_optimizer(model, zero.CPUAdam, **case, **_offload("nvme ahead", folder)) as optimizer:
            losses, store = _steps(model, optimizer, rank, range(1)), optimizer.parts.runtime.state_files.store
            before = _states_of(optimizer), full_values(model)
            loss = loss_of(model, *batch(1, 0, rank))
            loss.backward()
            call = getattr(store, verb)
            if rank == LAST:
                setattr(store, verb, Breaks(call, at, OSError(28, "no space", "disk")))
            with pytest.raises(OSError, match="no space"):
                optimizer.step()
            setattr(store, verb, call)
            assert_same_bits(_states_of(optimizer), before[0])
            assert_same_bits(full_values(model), before[1])
            optimizer.step()
            optimizer.zero_grad()
            got = [*losses, loss.item(), *_steps(model, optimizer, rank, range(2, 3))], _states_of(optimizer)
            assert got[0] == expected[0]
            assert_same_bits(got[1], expected[1])


def test_a_failed_step_on_files_never_was(tmp_path: Path) -> None:
    run_ranks(2, _check_broken_files, str(tmp_path))


def _check_which_backward(rank: int, folder: str) -> None:
    """Only the last backward of a step reads."""

    def calls(model: nn.Module, optimizer: Any) -> int:
        with moved() as window:
            optimizer.scale(loss_of(model, *batch(1, 0, rank))).backward()
        return window.calls(kind="states", link="read")

    model, options = new_model(), _offload("nvme ahead", folder)
    with zero_optimizer(model, zero.CPUAdam, lr=1e-2, stage=2, gradient_accumulation_steps=2, **options) as optimizer:
        for _ in range(2):
            assert [calls(model, optimizer) > 0 for _ in range(2)] == [False, True]
            optimizer.step()
            optimizer.zero_grad()
    model = new_model()
    with zero_optimizer(model, zero.CPUAdam, lr=1e-2, stage=2, **options) as optimizer:
        with optimizer.no_sync():
            assert calls(model, optimizer) == 0
        assert calls(model, optimizer) > 0


def test_only_the_backward_before_a_step_reads_states(tmp_path: Path) -> None:
    """The second optimizer is closed while it reads."""
    run_ranks(2, _check_which_backward, str(tmp_path))
    assert not list(tmp_path.iterdir())


def _check_read_once(rank: int, folder: str) -> None:
    """Backward reads as many sub-groups as buffers, the step the others: each once."""
    ahead, in_turn = _offload("nvme ahead", folder), _offload("nvme", folder)
    for options, num_ahead in ((ahead, 3), (in_turn, 0)):
        model = new_model()
        with zero_optimizer(model, zero.CPUAdam, lr=1e-2, stage=2, **options) as optimizer:
            _steps(model, optimizer, rank, range(1))
            num_groups = len(optimizer.parts.runtime.state_files.groups)
            assert num_groups > 3
            for expected in (2 * num_ahead, 0):  # masters and moments; none after a backward without a step
                with moved() as backward:
                    loss_of(model, *batch(1, 0, rank)).backward()
                assert backward.calls(kind="states", link="read") == expected
                optimizer.zero_grad()
            loss_of(model, *batch(1, 0, rank)).backward()
            with moved() as step:
                optimizer.step()
            assert step.calls(kind="states", link="read") == 2 * (num_groups - num_ahead)


def _check_buffers(rank: int, folder: str) -> None:
    """Of three sub-groups in memory two are not updated."""
    model = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
    with zero_optimizer(model, zero.CPUAdam, lr=1e-2, stage=3, **_offload("nvme ahead", folder)) as optimizer:
        for first in (0, 1, 1):
            nn.Sequential(*model[first:])(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        files = optimizer.parts.runtime.state_files
        assert len(files.groups) == 4
        size = max(files.master_nbytes(group) + files.moment_nbytes(group) for group in files.groups)
        assert files.store.buffers.nbytes <= 3 * size


def test_what_is_read_ahead_counts_as_buffers(tmp_path: Path) -> None:
    run_ranks(2, _check_buffers, str(tmp_path))


def test_the_first_states_are_read_during_backward(tmp_path: Path) -> None:
    run_ranks(2, _check_read_once, str(tmp_path))


def _train_with_writes(rank: int, folder: str, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """States are replaced between backward and step, in each way that there is."""
    model = new_model(torch.bfloat16, has_unused=True)
    with zero_optimizer(model, zero.CPUAdam, lr=1e-2, stage=2, **options) as optimizer:
        losses = _steps(model, optimizer, rank, range(2))
        zero.save_checkpoint(optimizer, f"{folder}/{len(options)}", "two")
        state, weight = copy.deepcopy(optimizer.state_dict()), model.head.weight
        value = torch.linspace(-1, 1, weight.numel()).view_as(weight)

        def set_states() -> None:
            zero.utils.safe_set_full_fp32_param(weight, value)
            zero.utils.safe_set_full_optimizer_state(weight, value * 2, "exp_avg")

        def set_parameters() -> None:
            with torch.no_grad(), zero.GatheredParameters(list(model.parameters()), modifier_rank=LAST):
                for param in model.parameters():
                    param.mul_(1.5)

        def load_state() -> None:
            optimizer.load_state_dict(state)

        def load_checkpoint() -> None:
            zero.load_checkpoint(optimizer, f"{folder}/{len(options)}", "two")

        changes = (set_states, set_parameters, load_state, set_states, load_checkpoint)
        for step, change in enumerate(changes, start=2):
            loss = loss_of(model, *batch(step, 0, rank))
            loss.backward()
            change()
            loss_of(model, *batch(step, 1, rank)).backward()  # what is loaded has no gradients
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return [*losses, *_steps(model, optimizer, rank, range(7, 8))], full_values(model) | _states_of(optimizer)


def _check_writes(rank: int, folder: str) -> None:
    expected = _train_with_writes(rank, folder)
    for keeps in (True, False):
        got = _train_with_writes(rank, folder, **_offload("nvme ahead", folder), keep_previous_states=keeps)
        assert expected[0] == got[0]
        assert_same_bits(expected[1], got[1])


def test_what_is_written_after_backward_is_what_the_step_reads(tmp_path: Path) -> None:
    run_ranks(2, _check_writes, str(tmp_path))


class Unread:
    """A transfer that fails."""

    is_done = True

    def wait(self) -> None:
        raise OSError(5, "unreadable", "disk")


def _check_unread(rank: int, folder: str) -> None:
    """A read during backward that fails on one rank is the step's error on all, and the next attempt reads again."""

    def training(at: int | None, read: Any = None) -> Any:
        """Three steps; in the second backward a rank's reads are ``read``, if given, and break at call ``at``."""
        model = new_model()
        with zero_optimizer(model, zero.CPUAdam, lr=1e-2, stage=2, **_offload("nvme ahead", folder)) as optimizer:
            losses, store = _steps(model, optimizer, rank, range(1)), optimizer.parts.runtime.state_files.store
            works = store.read
            breaks = Breaks(read or works, at or 0, MemoryError("no memory left"))
            if rank == LAST:
                store.read = breaks
            losses.append(loss := loss_of(model, *batch(1, 0, rank)))
            loss.backward()
            assert at is None or rank != LAST or breaks.left <= 0, "no read has failed"
            store.read = works
            if read is not None:
                with pytest.raises(OSError, match="unreadable"):
                    optimizer.step()
            optimizer.step()
            optimizer.zero_grad()
            return [*losses, *_steps(model, optimizer, rank, range(2, 3))], _states_of(optimizer)

    expected = training(None)
    for got in [training(at) for at in range(1, 5)] + [training(None, lambda *_: Unread())]:
        assert got[0] == expected[0]
        assert_same_bits(got[1], expected[1])


def test_a_failed_read_during_backward_is_done_again(tmp_path: Path) -> None:
    run_ranks(2, _check_unread, str(tmp_path))


def _check_in_place(rank: int, folder: str) -> None:
    model = new_model()
    options = _offload("nvme", folder) | {"keep_previous_states": False, "stage": 1, "lr": 1e-2}
    with zero_optimizer(model, zero.CPUAdam, **options) as optimizer:
        _steps(model, optimizer, rank, range(1))
        store = optimizer.parts.runtime.state_files.store
        loss_of(model, *batch(1, 0, rank)).backward()
        if rank == LAST:
            store.write = Breaks(store.write, 2, OSError(28, "no space", "disk"))
        for match in ("no space", "load the last checkpoint"):
            with pytest.raises((OSError, StateError), match=match):
                optimizer.step()


def test_without_the_previous_states_a_failed_step_is_the_last(tmp_path: Path) -> None:
    run_ranks(2, _check_in_place, str(tmp_path))


def _check_unused(rank: int, folder: str) -> None:
    """A layer unused in an odd number of steps must find, in its file, the states of the last step that used it."""
    torch.manual_seed(2)
    model = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
    plain = copy.deepcopy(model)
    nvme = {"device": "nvme", "nvme_path": folder}
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    inner = zero.CPUAdam(model.parameters(), lr=1e-2, weight_decay=1e-2)

    def loss_of_step(layers: nn.ModuleList, step: int, of_rank: int) -> torch.Tensor:
        hidden = layers[0](torch.full((1, 64), 0.1 * (step + 1) + of_rank)).tanh()
        return (layers[1](hidden) if step in (0, 1, 3) else hidden).square().mean()

    with zero_optimizer(model, inner, stage=3, offload_optimizer=nvme, sub_group_size=4096) as optimizer:
        for step in range(6):
            loss_of_step(model, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            for of_rank in range(2):
                (loss_of_step(plain, step, of_rank) / 2).backward()
            reference.step()
            reference.zero_grad()
        got = full_values(model)
    for name, expected in plain.named_parameters():
        torch.testing.assert_close(got[name], expected.detach(), rtol=1e-5, atol=1e-5)


def test_what_a_step_does_not_use_stays_as_it_is_in_files(tmp_path: Path) -> None:
    run_ranks(2, _check_unused, str(tmp_path))


def _check_ranks_without_elements(rank: int, folder: str) -> None:
    """The model fits one shard: the other rank updates nothing, and still takes part in every collective."""
    torch.manual_seed(0)
    plain = nn.Linear(3, 2)
    start = copy.deepcopy(plain.state_dict())
    reference = torch.optim.SGD(plain.parameters(), lr=0.5)
    for _ in range(2):
        plain(torch.ones(1, 3)).sum().backward()
        reference.step()
        reference.zero_grad()
    for stage in (1, 2, 3):
        for device in ("cpu", "nvme"):
            for is_late in (False, True):
                model = nn.Linear(3, 2)
                model.load_state_dict(start)
                options = {
                    "lr": 0.5,
                    "stage": stage,
                    "delayed_update": is_late,
                    "delay_start": 1,
                    **_offload(device, folder),
                }
                with zero_optimizer(model, torch.optim.SGD, **options) as optimizer:
                    for _ in range(2):
                        model(torch.ones(1, 3)).sum().backward()
                        optimizer.step()
                        optimizer.zero_grad()
                    optimizer.finish_update()
                    got = full_values(model)
                for name, param in plain.named_parameters():
                    torch.testing.assert_close(got[name], param.detach())


def test_ranks_that_have_no_elements_take_part(tmp_path: Path) -> None:
    run_ranks(2, _check_ranks_without_elements, str(tmp_path))
