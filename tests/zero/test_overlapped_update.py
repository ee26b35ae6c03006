"""Updates that run during the next forward: the numbers of updates that step() waits for, whenever they end.

The oracle is the same training without the overlap, which other tests hold to one process.
"""

from __future__ import annotations

import copy
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

import zero
from tests.ranks import run_ranks
from tests.zero.delayed import LAST, masters_of
from tests.zero.models import TinyGPT, batch, groups_of, loss_of, new_model
from tests.zero.training import assert_same_bits, full_values, zero_optimizer
from zcomm import ConfigError, StateError

HOST: dict[str, Any] = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
OVERLAPPED = HOST | {"overlapped_update": True}
STEPS = 5


class Late(zero.CPUAdam):
    """In a thread, each tensor waits until somebody waits for its bucket, or a while: the forward overtakes it."""

    has_waited, patience_s = 0, 5.0
    waits_for: threading.Event = threading.Event()

    def step_tensor_(self, param: Tensor, *args: Any, **kwargs: Any) -> None:
        """As of CPUAdam."""
        if threading.current_thread() is not threading.main_thread():
            Late.has_waited += Late.waits_for.wait(Late.patience_s)
            time.sleep(2e-3)
        super().step_tensor_(param, *args, **kwargs)


class Recomputed(TinyGPT):
    """Its blocks are recomputed in backward."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.position
        for block in self.blocks:
            x = self.shared(checkpoint(block, x, use_reentrant=False)).tanh() + x
        return self.head(self.norm(x))


def _train(model: nn.Module, optimizer: Any, rank: int, steps: range, **case: Any) -> list[float]:
    losses, num_micro = [], case.get("gradient_accumulation_steps", 1)
    for step in steps:
        for micro in range(num_micro):
            Late.waits_for.set()
            loss = loss_of(model, *batch(step, micro, rank)) / num_micro
            optimizer.scale(loss).backward()
            losses.append(loss.item())
        Late.waits_for.clear()
        optimizer.step()
        optimizer.zero_grad()
    Late.waits_for.set()
    return losses


def _run(rank: int, make: Any, build: Any, case: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], bool]:
    torch.manual_seed(0)
    model, ranks_per_node = make(), case.get("ranks_per_node")
    options = {key: value for key, value in case.items() if key != "ranks_per_node"}
    with zero_optimizer(model, build(model), ranks_per_node=ranks_per_node, **options) as optimizer:
        scheduler = LambdaLR(optimizer, lambda step: 1.0 / (1 + step % 3))
        losses = []
        for step in range(STEPS):
            losses += _train(model, optimizer, rank, range(step, step + 1), **case)
            scheduler.step()
        is_behind = optimizer.inside.runtime.is_behind
        return losses, full_values(model), is_behind


def _late(model: nn.Module) -> Late:
    return Late(groups_of(model), lr=1e-2)


def _check_bits(rank: int, cases: dict[str, dict[str, Any]]) -> None:
    for name, case in cases.items():
        make = Recomputed if name == "recomputed" else new_model
        build = _late if name != "torch" else (lambda model: torch.optim.AdamW(groups_of(model), lr=1e-2))
        expected = _run(rank, make, build, case)
        Late.has_waited, Late.patience_s = 0, 0.01 if name == "residents" else 5.0  # step() waits for residents
        got = _run(rank, make, build, case | {"overlapped_update": True})
        assert got[0] == expected[0], name
        assert_same_bits(got[1], expected[1])
        assert got[2], "nothing was under way after the last step"
        assert not expected[2]
        assert name == "torch" or Late.has_waited > 0, "no update ran in a thread"


CASES = {
    "plain": HOST,
    "micro": HOST | {"gradient_accumulation_steps": 3, "gradient_clipping": 0.05, "bf16": {"enabled": True}},
    "part": HOST | {"offload_optimizer": {"device": "cpu", "ratio": 0.5}, "bf16": {"enabled": True}},
    "param": HOST | {"offload_param": {"device": "cpu"}, "stage3_max_live_parameters": 3000},
    "prefetch": HOST | {"stage3_prefetch_bucket_size": 10_000, "stage3_max_reuse_distance": 10_000},
    "residents": HOST | {"stage3_param_persistence_threshold": 100, "fp16": {"enabled": True}},
    "link": HOST | {"bf16": {"enabled": True}, "compressed_link": True},
    "recomputed": HOST,
    "torch": HOST | {"zero_force_ds_cpu_optimizer": False},
}


def test_the_bits_are_those_of_updates_that_are_waited_for() -> None:
    run_ranks(2, _check_bits, CASES)


def test_with_all_of_zeropp() -> None:
    switches = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": 2}
    run_ranks(4, _check_bits, {"zeropp": HOST | {"ranks_per_node": 2, "bf16": {"enabled": True}} | switches})


def _check_looking(rank: int, folder: str) -> None:
    """Everything that looks at a run, changes or resumes it, with the update under way or half caught up with."""
    case = {"bf16": {"enabled": True}, "gradient_clipping": 0.05, "lr": 1e-2}
    model = new_model(has_unused=True)
    with zero_optimizer(model, zero.CPUAdam, **case, **HOST) as optimizer:
        expected = _train(model, optimizer, rank, range(STEPS))
        last = masters_of(model)
    model = new_model(has_unused=True)
    with zero_optimizer(model, zero.CPUAdam, **case, **OVERLAPPED) as optimizer:
        got = _train(model, optimizer, rank, range(3))
        state = copy.deepcopy(optimizer.state_dict())
        zero.save_checkpoint(optimizer, folder, "step2")
        model.eval()
        with torch.no_grad():
            first = loss_of(model, *batch(99, 0, rank)).item()
            half = copy.deepcopy(optimizer.state_dict())  # the unused layer has not caught up
            optimizer.finish_update()
            assert first == loss_of(model, *batch(99, 0, rank)).item(), "an evaluation has the last update"
        model.train()
        assert_same_bits(full_values(model), masters_of(model))
        got += _train(model, optimizer, rank, range(3, STEPS))
        assert got == expected, "looking at a run changes it"
        assert_same_bits(masters_of(model), last)
        for saved in (state, half):
            optimizer.load_state_dict(saved)
            assert _train(model, optimizer, rank, range(3, STEPS)) == expected[3:], "from a state dict"
        with torch.no_grad(), zero.GatheredParameters([model.shared.bias], modifier_rank=LAST):
            if rank == LAST:
                model.shared.bias[3] = 5.0
        with zero.GatheredParameters([model.shared.bias]):
            assert model.shared.bias[3] == 5.0
    for options in (OVERLAPPED, HOST, HOST | {"stage": 1}):
        model = new_model(seed=1, has_unused=True)
        with zero_optimizer(model, zero.CPUAdam, **case, **options) as optimizer:
            zero.load_checkpoint(optimizer, folder, "step2")
            assert _train(model, optimizer, rank, range(3, STEPS)) == expected[3:], "from a checkpoint"
            assert_same_bits(masters_of(model), last)


def _check_crossing(rank: int, folder: str) -> None:
    """From a run whose parameters are behind to one whose never are, and back: all layers are of one update."""
    late = HOST | {"delayed_update": True, "delay_start": 0}
    common: dict[str, Any] = {"lr": 1e-2, "stage3_param_persistence_threshold": 100, "bf16": {"enabled": True}}
    for number, (first, second) in enumerate(((late, OVERLAPPED), (OVERLAPPED, late))):
        model = new_model()
        with zero_optimizer(model, zero.CPUAdam, **common, **first) as optimizer:
            _train(model, optimizer, rank, range(3))
            zero.save_checkpoint(optimizer, f"{folder}/{number}", "step2")
            expected = masters_of(model)
            state = optimizer.state_dict()
        model = new_model(seed=1)
        with zero_optimizer(model, zero.CPUAdam, **common, **second) as optimizer:
            zero.load_checkpoint(optimizer, f"{folder}/{number}", "step2")
            with torch.no_grad():
                loss = loss_of(model, *batch(99, 0, rank))
            assert_same_bits(full_values(model), expected)
            optimizer.load_state_dict(state)
            assert_same_bits(full_values(model), expected)
            with torch.no_grad():
                assert torch.equal(loss, loss_of(model, *batch(99, 0, rank)))


def test_from_a_delayed_run_to_an_overlapped_one_and_back(tmp_path: Any) -> None:
    run_ranks(2, _check_crossing, str(tmp_path))


def test_what_looks_at_a_run_sees_the_last_update_and_does_not_change_it(tmp_path: Any) -> None:
    run_ranks(2, _check_looking, str(tmp_path))


class Behind(zero.CPUAdam):
    """In a thread, the second block's update waits until the first block's forward has run."""

    has_run, num_overdue, num_updates, num_tensors, waiting = threading.Event(), 0, 0, 0, 0

    def step_tensor_(self, param: Tensor, *args: Any, **kwargs: Any) -> None:
        """As of CPUAdam."""
        Behind.num_updates += 1
        if Behind.num_updates % Behind.num_tensors == Behind.waiting:
            Behind.num_overdue += not Behind.has_run.wait(10)
        super().step_tensor_(param, *args, **kwargs)


def _check_overlap(rank: int) -> None:
    model = new_model(is_tied=False)
    model.blocks[0].register_forward_hook(lambda *_: Behind.has_run.set())
    options = OVERLAPPED | {"stage3_prefetch_bucket_size": 10**6}
    with zero_optimizer(model, Behind, lr=1e-2, **options) as optimizer:
        names = [piece.bucket.name for piece in optimizer.inside.pieces]
        Behind.num_tensors, Behind.waiting = len(names), names.index("blocks.1") + 1
        Behind.num_overdue = Behind.num_updates = 0
        for step in range(4):
            loss_of(model, *batch(step, 0, rank)).backward()
            Behind.has_run.clear()
            optimizer.step()
        loss_of(model, *batch(4, 0, rank))
        assert Behind.num_updates == 4 * Behind.num_tensors
        assert Behind.num_overdue == 0, "the first layer's forward waited for the next one's update"


def test_a_layer_waits_for_no_other_layers_update() -> None:
    """Even where a plan says to gather layers ahead."""
    run_ranks(2, _check_overlap)


class Failing(zero.CPUAdam):
    """Its third step of a tensor fails, on one rank."""

    fails = False

    def step_tensor_(self, param: Tensor, *args: Any, **kwargs: Any) -> None:
        """As of CPUAdam."""
        if Failing.fails and self.state[param].get("step", 0) == 2:
            raise MemoryError("no room for a test")
        super().step_tensor_(param, *args, **kwargs)


def _check_failure(rank: int) -> None:
    model, Failing.fails = new_model(), rank == LAST
    with zero_optimizer(model, Failing, lr=1e-2, **OVERLAPPED) as optimizer:
        _train(model, optimizer, rank, range(3))
        with pytest.raises((MemoryError, StateError), match="no room for a test"):
            _train(model, optimizer, rank, range(3, 4))
        with pytest.raises(StateError, match="load the last checkpoint"):
            optimizer.step()


def test_an_update_that_fails_on_one_rank_raises_on_all_in_the_next_step() -> None:
    run_ranks(2, _check_failure)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stage": 2}, "needs stage 3.*stage=2"),
        ({"delayed_update": True}, "exclude one another"),
        ({"offload_optimizer": {"device": "nvme", "nvme_path": "/nowhere"}}, "offload_optimizer.device='nvme'"),
        ({"offload_param": {"device": "nvme", "nvme_path": "/nowhere"}}, "offload_param.device='nvme'"),
    ],
)
def test_what_it_is_not_made_for_is_refused(change: dict[str, Any], message: str) -> None:
    run_ranks(2, _check_refused, change, message)


def _check_refused(rank: int, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message), zero_optimizer(new_model(), zero.CPUAdam, **OVERLAPPED | change):
        pass
