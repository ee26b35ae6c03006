"""Random faults during training on files: each step happens fully or not at all, and the result has the same bits.

The expected results come from a run without offload or faults. A fault is injected on one rank, in forward and
backward, in the step, or in both; then it is healed. Either every rank must get an error, or none. If state can be read
at all, it is that before the step or after it, and a step that raised is retried. Where data are lost, training
continues from the last checkpoint. ZERO_TEST_FAULTS=100 injects so many.
"""

# covers zero/_storage/file_store.py

from __future__ import annotations

import errno
import json
import os
import random
import resource
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zero
from tests.broken import Breaks
from tests.file_faults import FAULTS, PAGE, flip
from tests.ranks import run_ranks, topology
from tests.zero.models import batch, loss_of, new_model
from tests.zero.training import assert_same_bits, full_values
from zcomm import ZcommError
from zero._storage.file_store import FileStore, StoredFile

NUM_FAULTS = int(os.environ.get("ZERO_TEST_FAULTS", "10"))
AT_ONCE = 5
"""Faults per call of the ranks."""
STEPS, SAVE_EVERY = 6, 2
COMMON: dict[str, Any] = {"lr": 1e-2, "bf16": {"enabled": True}, "gradient_clipping": 0.5}
STAGE_3 = {"stage": 3, "fp32_optimizer_states": False}
PARAMETERS = {"device": "nvme", "max_in_cpu": 0, "buffer_size": 600}
FAILURES = (OSError, MemoryError, ZcommError, RuntimeError)


def _options(case: str, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Without offload, and with it."""
    path, small = {"nvme_path": folder}, {"reduce_bucket_size": 3000, "allgather_bucket_size": 3000}
    ahead = {"device": "nvme", "pipeline_read": True, "pipeline_write": True, "buffer_count": 3} | path
    if case == "stage 2":
        plain = COMMON | small | {"stage": 2, "gradient_accumulation_steps": 2}
        return plain, plain | {"offload_optimizer": ahead, "sub_group_size": 1601}
    plain = COMMON | small | STAGE_3
    return plain, plain | {"offload_optimizer": ahead, "offload_param": PARAMETERS | path, "sub_group_size": 1601}


def _snapshot(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Full parameters, masters and moments."""
    found = full_values(model)
    for name, param in model.named_parameters():
        found[f"{name} master"] = zero.utils.safe_get_full_fp32_param(param)
        for key in ("exp_avg", "exp_avg_sq", "step"):
            state = zero.utils.safe_get_full_optimizer_state(param, key)
            if state is not None:
                found[f"{name} {key}"] = state
    return found


class Training:
    """A model whose optimizer is rebuilt from the last checkpoint when data are lost."""

    def __init__(self, rank: int, options: dict[str, Any], checkpoints: str) -> None:
        self.rank, self.options, self.checkpoints = rank, options, checkpoints
        self.num_micro = options.get("gradient_accumulation_steps", 1)
        self.saved = 0
        self.build()

    def build(self) -> None:
        self.step, self.model = self.saved, new_model()
        self.optimizer = zero.ZeroOptimizer(self.model, zero.CPUAdam, topology=topology(2), **self.options)
        if self.saved:
            zero.load_checkpoint(self.optimizer, self.checkpoints, str(self.saved))

    def restart(self, *, from_scratch: bool = False) -> None:
        with suppress(*FAILURES):
            self.optimizer.close()
        self.saved = 0 if from_scratch else self.saved
        self.build()

    def backward(self) -> None:
        for micro in range(self.num_micro):
            loss = loss_of(self.model, *batch(self.step, micro, self.rank)) / self.num_micro
            self.optimizer.scale(loss).backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self) -> None:
        zero.save_checkpoint(self.optimizer, self.checkpoints, str(self.step))
        self.saved = self.step

    def stores(self) -> list[FileStore]:
        runtime = self.optimizer.parts.runtime
        found = [runtime.state_files.store, runtime.state_files.gradients.store]
        return found + (
            [] if runtime.parameter_storage._staging is None else [runtime.parameter_storage._staging.store]
        )


# Kinds of faults, on one rank


@contextmanager
def _broken_call(owner: Any, name: str, at: int, error: Exception) -> Iterator[None]:
    call = getattr(owner, name)
    setattr(owner, name, Breaks(call, at, error))
    try:
        yield
    finally:
        setattr(owner, name, call)


@contextmanager
def _wrong_byte(file: StoredFile, at: int) -> Iterator[None]:
    flip(file, at % file.nbytes)
    yield


@contextmanager
def _no_more_memory() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**20, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _fault(draw: random.Random, training: Training) -> tuple[str, Any]:
    """A kind and its context manager; the draws do not depend on their outcomes."""
    kind = draw.choice(["file", "file", "byte", "read", "write", "buffer", "update", "RLIMIT_AS"])
    store = training.stores()[draw.randrange(3) % len(training.stores())]
    files = [file for file in store._open.files.values() if file.nbytes >= 6 * PAGE]
    number, which, at, place = draw.randrange(len(FAULTS)), draw.random(), draw.randrange(1, 12), draw.randrange(2**30)
    file = files[int(which * len(files))] if files else None
    if kind in ("file", "byte") and file is None:
        kind = "read"
    if kind == "file":
        return FAULTS[number].__name__, FAULTS[number](file)
    if kind == "byte":
        return "wrong byte", _wrong_byte(file, place)
    if kind == "buffer":
        return "no buffer", _broken_call(store, "buffer", at, MemoryError("no memory left"))
    if kind == "update":
        error = MemoryError("no memory left")
        return "no memory in the update", _broken_call(training.optimizer.parts.inner, "step_tensor_", at, error)
    if kind == "RLIMIT_AS":
        return kind, _no_more_memory()
    error = OSError(errno.EIO, "input/output error", str(store.folder))
    return f"failing {kind}", _broken_call(store, kind, at, error)


def _on_all(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Return the call's result, or its error: every rank must have one, or no rank."""
    result, failure = None, None
    try:
        result = call()
    except FAILURES as error:
        failure = error
    texts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, None if failure is None else repr(failure))
    assert len({text is None for text in texts}) == 1, texts
    return result, failure


def _attempt(training: Training, scope: str, fault: Any) -> None:
    """One step with a fault."""
    with ExitStack() as stack:
        if scope != "step":
            stack.enter_context(fault)
        training.backward()
        if scope == "backward":
            stack.close()
        if scope == "step":
            stack.enter_context(fault)
        training.update()


def _inject(training: Training, draw: random.Random, known: list[dict[str, torch.Tensor]]) -> list[str]:
    """Inject one fault; return a description of what followed."""
    victim, scope = draw.randrange(2), draw.choice(["backward", "step", "both"])
    kind, fault = _fault(draw, training)
    if kind == "RLIMIT_AS":
        scope = "step"  # torch's own allocations in forward and backward cannot be retried
    found = [f"fault: {kind}"]
    _, error = _on_all(lambda: _attempt(training, scope, fault if training.rank == victim else nullcontext()))
    found.append("no error" if error is None else f"error: {type(error).__name__}")
    expected = known[training.step + (error is None)]
    if error is not None:
        training.optimizer.zero_grad()
    _, lost = _on_all(training.optimizer._update.check_usable)  # unless parameters could not be written back, either
    values: dict[str, torch.Tensor] = {}
    if lost is None:
        values, lost = _on_all(lambda: _snapshot(training.model))
    if lost is None:
        assert_same_bits(values, expected)
        if error is not None:
            _, lost = _on_all(lambda: (training.backward(), training.update()))
            values = None if lost else _snapshot(training.model)
            assert lost is not None or assert_same_bits(values, known[training.step + 1]) is None
            found.append("tried again")
    if lost is None:
        training.step += 1
        if training.step % SAVE_EVERY == 0:
            _, lost = _on_all(training.save)
    if lost is not None:
        found.append("from the last checkpoint")
        training.restart()
        assert_same_bits(_snapshot(training.model), known[training.step])
    return found


def _check(rank: int, case: str, numbers: range, folder: str) -> None:
    plain, tiers = _options(case, folder)
    reference, known = Training(rank, plain, folder), []
    for _ in range(STEPS):
        known.append(_snapshot(reference.model))
        reference.backward()
        reference.update()
        reference.step += 1
    known.append(_snapshot(reference.model))
    reference.optimizer.close()
    training = Training(rank, tiers, f"{folder}/checkpoints")
    counts: Counter[str] = Counter()
    for number in numbers:
        counts.update(_inject(training, random.Random(f"{case} {number}"), known))
        if training.step == STEPS:
            training.restart(from_scratch=True)
    while training.step < STEPS:
        training.backward()
        training.update()
        training.step += 1
    assert_same_bits(_snapshot(training.model), known[STEPS])
    training.optimizer.close()
    assert not list(Path(folder).glob(f"zero-*rank{rank}"))
    if rank == 0:
        Path(f"{folder}/counts {case} {numbers.start}.json").write_text(json.dumps(counts))


@pytest.mark.timeout(240 + 20 * NUM_FAULTS)
@pytest.mark.parametrize("case", ["stage 2", "stage 3"])
def test_random_faults_during_training(case: str, tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    for first in range(0, NUM_FAULTS // 2, AT_ONCE):
        run_ranks(2, _check, case, range(first, min(first + AT_ONCE, NUM_FAULTS // 2)), str(tmp_path))
    for path in tmp_path.glob("counts*.json"):
        counts.update(json.loads(path.read_text()))
    print(case, dict(counts))  # noqa: T201
    assert sum(n for text, n in counts.items() if text.startswith("fault")) == NUM_FAULTS // 2
    assert sum(n for text, n in counts.items() if text.startswith("error")) >= NUM_FAULTS // 8
    assert counts["tried again"] >= 1
