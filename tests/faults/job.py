"""Runs one rank of a job: trains a tiny model with checkpoints, resumes from the last one, has a fault at one step.

FOLDER/spec.json            what happens: tests.faults.definition.draw_spec
FOLDER/checkpoints, files   what it saves, and keeps on its disk
FOLDER/saved                the last step of which a save has ended on every rank
FOLDER/ATTEMPT-RANK.json    how the attempt ended on the rank: {"at", "error", "text", "hash", "began"}
FOLDER/fault                when the fault happened
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import zero
from tests.faults.definition import CONFIGS, SAVE_EVERY, STEPS, TIMEOUT_S
from tests.zero.models import batch, loss_of, new_model
from zcomm._base import env
from zcomm._transport import checked, environment_check

LR, HANG_S = 1e-2, 60
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGSTOP": signal.SIGSTOP}
SPOILED = {"NaN": float("nan"), "infinity": float("inf"), "huge value": 1e30}


class Rank:
    """This process as a rank of the job."""

    def __init__(self, folder: Path, attempt: int) -> None:
        self.folder, self.attempt = folder, attempt
        self.spec: dict[str, Any] = json.loads((folder / "spec.json").read_text())
        self.config = CONFIGS[self.spec["config"]]
        self.rank = dist.get_rank()
        self.kind: str = self.spec["fault"] if attempt == 0 else ""
        self.is_victim = bool(self.kind) and self.rank == self.spec["victim"]

    def suffers(self, *kinds: str) -> bool:
        """Whether one of these faults occurs on this rank."""
        return self.is_victim and self.kind in kinds

    def happened(self) -> None:
        (self.folder / "fault").write_text(str(time.time()))

    def build(self) -> tuple[torch.nn.Module, zero.ZeroOptimizer]:
        if self.suffers("another model", "another dtype", "another configuration", "another library"):
            self.happened()
        if self.suffers("another library"):
            usual = environment_check.facts
            environment_check.facts = lambda: usual() | {"zcomm-zero": "0.0.9"}
        model = new_model(torch.bfloat16)
        if self.suffers("another model"):
            model.shared = torch.nn.Linear(24, 25, dtype=torch.bfloat16)
        if self.suffers("another dtype"):
            model = model.double()
        options = {**self.config.options, "ranks_per_node": self.config.ranks_per_node}
        for name in ("offload_optimizer", "offload_param"):
            if name in options:
                disk = "small" if self.kind == "disk full, NVMe" else "files"
                options[name] = {**options[name], "nvme_path": str(self.folder / disk)}
        lr = LR * (2 if self.suffers("another configuration") else 1)
        return model, zero.ZeroOptimizer(model, zero.CPUAdam, lr=lr, **options)

    def load(self, optimizer: zero.ZeroOptimizer) -> int:
        """Return the step to resume at. A damaged newest checkpoint is reported, and the one before it is loaded."""
        folder = self.folder / "checkpoints"
        try:
            return int(zero.load_checkpoint(optimizer, folder).client_state.get("step", 0))
        except zero.CheckpointError as error:
            if self.spec["fault"] != "bit in a checkpoint":
                raise
            self.tell("load", error=error)
            tag = (self.folder / "before").read_text()
            return int(zero.load_checkpoint(optimizer, folder, tag).client_state["step"]) if tag else 0

    def train(self) -> None:
        model, optimizer = self.build()
        step = self.load(optimizer)
        self.tell("began", began=step)
        while step < STEPS:
            with self.fault_at(step):
                for micro in range(self.config.micro_batches):
                    self.backward(model, optimizer, step, micro)
                if self.kind != "skip" or step != self.spec["step"]:
                    optimizer.step()
                else:
                    optimizer.finish_update()  # as a step that is skipped does
            optimizer.zero_grad()
            step += 1
            if step % SAVE_EVERY == 0:
                self.save(optimizer, step)
        self.tell("end", hash=digest(model, optimizer))
        optimizer.close()

    def backward(self, model: torch.nn.Module, optimizer: zero.ZeroOptimizer, step: int, micro: int) -> None:
        tokens, targets = batch(step, micro, self.rank)
        is_here = (step, micro) == (self.spec["step"], self.spec["micro"])
        if is_here and self.suffers("another batch shape"):
            self.happened()
            tokens, targets = torch.cat([tokens] * 2, 1), torch.cat([targets] * 2, 1)
        defers = self.config.defers and micro < self.config.micro_batches - 1
        spoiled = self._spoiled(model) if is_here and self.suffers(*SPOILED) else nullcontext()
        with optimizer.no_sync() if defers else nullcontext(), spoiled:
            optimizer.scale(loss_of(model, tokens, targets) / self.config.micro_batches).backward()

    def save(self, optimizer: zero.ZeroOptimizer, step: int) -> None:
        folder = self.folder / ("small" if self.kind == "disk full, checkpoint" and step > self.spec["step"] else "")
        saving = zero.save_checkpoint(
            optimizer, folder / "checkpoints", f"step{step}", client_state={"step": step}, async_op=self.spec["async"]
        )
        if self.spec["async"]:
            saving.wait()
        if self.rank == 0:
            (self.folder / f"saved-{self.attempt}").write_text(str(step))

    def tell(self, what: str, error: BaseException | None = None, **more: Any) -> None:
        report: dict[str, Any] = {"at": time.time(), **more}
        if error is not None:
            report |= {"error": type(error).__name__, "text": str(error)}
        path = self.folder / f"{self.attempt}-{self.rank}-{what}.json"
        path.with_suffix(".new").write_text(json.dumps(report))
        path.with_suffix(".new").replace(path)

    @contextmanager
    def fault_at(self, step: int) -> Iterator[None]:
        """Inject the fault inside this block, if this is its step and no other place injects it."""
        if step != self.spec["step"] or not self.is_victim:
            yield
            return
        fault: Any = nullcontext()
        if self.kind in SIGNALS:
            self._after(lambda: self._signal(SIGNALS[self.kind]))
        elif self.kind == "bit in a message":
            fault = self._flipped_message()
        elif self.kind == "bit in an NVMe file":
            self._flip_file()
        elif self.kind in ("interface down", "rate zero"):
            self.happened()
            while not (self.folder / "cut").exists():
                time.sleep(0.01)
        elif self.kind == "out of memory":
            fault = self._no_memory()
        with fault:
            yield

    def _after(self, call: Callable[[], None]) -> None:
        timer = threading.Timer(self.spec["delay_s"], call)
        timer.daemon = True
        timer.start()

    def _signal(self, number: int) -> None:
        self.happened()
        if number == signal.SIGSTOP and os.fork() == 0:
            time.sleep(TIMEOUT_S + 2)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), number)

    @contextmanager
    def _spoiled(self, model: Any) -> Iterator[None]:
        value, draw = SPOILED[self.kind], random.Random(self.spec["draw"])

        def spoil(grad: Tensor) -> Tensor:
            grad = grad.clone()
            grad.view(-1)[draw.randrange(grad.numel())] = value
            return grad

        def hook(_module: Any, _inputs: Any, output: Tensor) -> None:
            output.register_hook(spoil)

        self.happened()
        handle = model.norm.register_forward_hook(hook)
        yield
        handle.remove()

    @contextmanager
    def _flipped_message(self) -> Iterator[None]:
        """Flip a bit in one of the next exchanges, in the next step if this one has too few."""
        draw, usual = random.Random(self.spec["draw"]), checked.wait_received
        left = [draw.randrange(1, 12)]

        def wait_received(pending: Any, received: Mapping[int, Tensor]) -> None:
            usual(pending, received)
            left[0] -= 1
            if left[0] <= 0 and received:
                checked.wait_received = usual
                part = received[draw.choice(sorted(received))]
                view = part.view(-1).view(torch.uint8)
                view[draw.randrange(view.numel())] ^= 1 << draw.randrange(8)
                self.happened()

        checked.wait_received = wait_received
        yield

    def _flip_file(self) -> None:
        draw = random.Random(self.spec["draw"])
        files = sorted(p for p in (self.folder / "files").rglob("*") if p.is_file() and f"rank{self.rank}" in str(p))
        files = [path for path in files if path.stat().st_size >= 8192]
        flip(draw.choice(files), draw)
        self.happened()

    @contextmanager
    def _no_memory(self) -> Iterator[None]:
        """Fail one of the next allocations of a step, whichever code makes it."""
        left, usual = [random.Random(self.spec["draw"]).randrange(1, 5)], torch.empty

        def empty(*args: Any, **kwargs: Any) -> Tensor:
            left[0] -= 1
            if left[0] == 0:
                self.happened()
                raise MemoryError("out of memory at an allocation")
            return usual(*args, **kwargs)

        torch.empty = empty
        try:
            yield
        finally:
            torch.empty = usual


def flip(path: Path, draw: random.Random) -> None:
    """Flip one bit of a file."""
    number = os.open(path, os.O_RDWR)
    at = draw.randrange(os.fstat(number).st_size)
    (byte,) = os.pread(number, 1, at)
    os.pwrite(number, bytes([byte ^ (1 << draw.randrange(8))]), at)
    os.close(number)


def digest(model: torch.nn.Module, optimizer: zero.ZeroOptimizer) -> str:
    """A digest of all full parameters and masters; "not finite" if a value is not. Collective."""
    found = hashlib.sha256()
    for name, param in model.named_parameters():
        whole = zero.utils.safe_get_full_fp32_param(param)
        if whole is None or not whole.isfinite().all():
            return "not finite"
        found.update(name.encode() + whole.numpy().tobytes())
    with zero.GatheredParameters(list(model.parameters())):
        for param in model.parameters():
            found.update(param.detach().float().numpy().tobytes())
    return found.hexdigest()


def live(folder: Path, attempt: int, **group: Any) -> int:
    """Run a rank from start to end; return its exit code."""
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(HANG_S, file=(folder / f"hang-{os.getpid()}").open("w"))
    spec = json.loads((folder / "spec.json").read_text())
    if spec["fault"] == "bit in a message":
        os.environ["ZCOMM_CHECK"] = "1"
        env.forget()
    if group:
        dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S), **group)
    else:
        zero.init_distributed("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    rank = Rank(folder, attempt)
    try:
        rank.train()
    except BaseException as error:
        rank.tell("error", error=error)
        return 1
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    is_fork = sys.argv[2:] == ["fork"]
    if is_fork:  # torchrun's own handler came with it
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    code = live(Path(sys.argv[1]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
    sys.stdout.flush()
    if code or not is_fork:  # a fork says by its return that it has ended
        os._exit(code)
