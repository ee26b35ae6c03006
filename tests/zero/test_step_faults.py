"""Faults during a training step on files: an error on every rank, the state before the step, and training continues."""

# covers zero/_optim/step_pieces.py

from __future__ import annotations

import ctypes
import errno
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero
from tests import ranks
from tests.broken import mount, mounted
from tests.ranks import run_ranks
from tests.zero.models import new_model
from tests.zero.training import assert_same_bits, full_values, train, zero_optimizer
from zcomm import StateError
from zero._storage.file_store import FileStore
from zero._storage.tier_settings import FileSettings

LAST = 1
M_MMAP_THRESHOLD = -3  # glibc's malloc.h
NO_MEMORY = r"no host memory for a buffer of \d+ bytes|you tried to allocate \d+ bytes"
BF16 = {"bf16": {"enabled": True}, "lr": 1e-2}


@contextmanager
def _thin_disk(folder: Path) -> Iterator[tuple[Path, Path]]:
    """A sparse file system that promises more than its disk has; yields both."""
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("mkfs.ext4 is not installed")
    with mounted(folder / "below", 2**26) as below:
        image, disk = below / "image", folder / "disk"
        with image.open("wb") as file:
            file.truncate(2**25)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-b", "4096", "-O", "^has_journal", str(image)], check=True)
        mount("-o", "loop", str(image), at=disk)
        try:
            yield disk, below
        finally:
            subprocess.run(["umount", str(disk)], check=True)


def _resize(disk: str, below: str, nbytes: int | None) -> None:
    """On one rank, while the others wait. None: shrink to the used size, so that the disk is full."""
    dist.barrier()
    if dist.get_rank() == 0:
        subprocess.run(["sync", "-f", disk], check=True)
        status = os.statvfs(below)
        size = nbytes or (status.f_blocks - status.f_bfree) * status.f_frsize
        subprocess.run(["mount", "-o", f"remount,size={size}", below], check=True)
    dist.barrier()


def _offload(folder: str, **more: Any) -> dict[str, Any]:
    return {"offload_optimizer": {"device": "nvme", "nvme_path": folder}, "sub_group_size": 1601, **BF16, **more}


def _states(optimizer: zero.ZeroOptimizer) -> dict[str, torch.Tensor]:
    state = optimizer.state_dict()
    found = {f"master {i}": master for i, master in enumerate(state["masters"])}
    for number, values in state["optimizer"]["state"].items():
        found |= {f"{name} {number}": value.clone() for name, value in values.items()}
    return found


def _backward(model: nn.Module, rank: int, step: int) -> None:
    width = 512
    x = torch.linspace(-1, 1 + rank + step, 4 * width, dtype=torch.bfloat16).view(4, width)
    model(x).float().square().mean().backward()


def _check_full_disk(rank: int, disk: str, below: str, checkpoints: str) -> None:
    """Sub-groups are larger than the zeros that ext4 writes beside a write."""
    torch.manual_seed(0)
    model, other = nn.Linear(512, 512), nn.Linear(512, 512)
    options = {"stage": 2, **_offload(disk), "sub_group_size": 2**16}
    with zero_optimizer(model, zero.CPUAdam, **options) as optimizer:
        _backward(model, rank, 0)
        optimizer.step()
        optimizer.zero_grad()
        zero.save_checkpoint(optimizer, checkpoints, "one")
        before = _states(optimizer), full_values(model)
        _resize(disk, below, None)
        _backward(model, rank, 1)
        with pytest.raises(OSError, match=r"No space left on device.* bytes are free") as error:
            optimizer.step()
        assert error.value.errno == errno.ENOSPC
        assert_same_bits(_states(optimizer), before[0])
        assert_same_bits(full_values(model), before[1])
        _resize(disk, below, 2**26)
        optimizer.step()  # the same gradients
        expected = _states(optimizer), full_values(model)
    with zero_optimizer(other, zero.CPUAdam, keep_previous_states=False, **options) as optimizer:
        zero.load_checkpoint(optimizer, checkpoints)
        _backward(other, rank, 1)
        optimizer.step()
        assert_same_bits(_states(optimizer), expected[0])
        assert_same_bits(full_values(other), expected[1])


def test_a_disk_that_is_full_during_a_step(tmp_path: Path) -> None:
    with _thin_disk(tmp_path) as (disk, below):
        run_ranks(2, _check_full_disk, str(disk), str(below), str(tmp_path / "checkpoints"))


def _check_small_disk(rank: int, disk: str, words: str) -> None:
    """A failed construction changes nothing."""
    model = new_model()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    nvme = {"device": "nvme", "nvme_path": disk}
    for tier in ({"offload_optimizer": nvme}, {"offload_param": nvme | {"max_in_cpu": 0}}):
        with pytest.raises((OSError, StateError), match=words) as error:
            zero.ZeroOptimizer(model, zero.CPUAdam, stage=3, lr=1e-2, **tier)
        assert disk in str(error.value)
        assert_same_bits(dict(model.named_parameters()), before)
        assert not list(Path(disk).glob(f"*rank{rank}"))


def _check_reserved(rank: int, disk: str) -> None:
    """Another program fills the disk: all that steps need was reserved."""
    results = []
    for tier in (_offload(disk), dict(BF16)):
        model = new_model()
        with zero_optimizer(model, zero.CPUAdam, stage=3, **tier) as optimizer:
            if "offload_optimizer" in tier:
                dist.barrier()
                if rank == 0:
                    _fill(Path(disk) / "filler")
                dist.barrier()
            train(model, optimizer, rank, steps=2)
            results.append(full_values(model))
    assert_same_bits(*results)


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    status = os.statvfs(path)
    assert status.f_bavail == 0


def test_a_small_a_full_and_a_read_only_disk(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", 2**15) as disk:
        run_ranks(2, _check_small_disk, str(disk), r"\d+ bytes are needed and \d+ are free")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        run_ranks(2, _check_small_disk, str(disk), "must exist and be writable: Read-only")
    with mounted(tmp_path / "full", 2**20) as disk:
        run_ranks(2, _check_reserved, str(disk))


def _check_memory(rank: int, folder: str) -> None:
    """One rank cannot allocate more memory during its first step."""
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)  # memory freed before is not reused
    states = []
    for fails in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(2048, 2048, bias=False)
        with zero_optimizer(
            model, zero.CPUAdam, stage=2, **(_offload(folder) | {"sub_group_size": 10**9})
        ) as optimizer:
            model(torch.ones(1, 2048, dtype=torch.bfloat16)).sum().backward()
            if fails:
                before = full_values(model)
                unlimited = resource.getrlimit(resource.RLIMIT_DATA)
                if rank == LAST:
                    # Not RLIMIT_AS: threads' arenas reserve addresses, as many as there happen to be threads.
                    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
                    used = int(status["VmData"].split()[0]) * 1024
                    resource.setrlimit(resource.RLIMIT_DATA, (used + 2**20, unlimited[1]))
                try:
                    with pytest.raises((MemoryError, RuntimeError), match=NO_MEMORY):
                        optimizer.step()
                finally:
                    resource.setrlimit(resource.RLIMIT_DATA, unlimited)
                assert_same_bits(full_values(model), before)
            optimizer.step()
            states.append(_states(optimizer) | full_values(model))
    assert_same_bits(*states)


def test_host_memory_that_is_exhausted_during_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On separate ranks: they keep the memory limit."""
    monkeypatch.setattr(ranks, "_POOLS", {})
    try:
        run_ranks(2, _check_memory, str(tmp_path))
    finally:
        ranks.close_pools()


def _check_two_jobs(rank: int, folder: str) -> None:
    def values(path: str | None, *, interrupted: bool = False) -> dict[str, torch.Tensor]:
        options = {"stage": 3, **(BF16 if path is None else _offload(path))}
        if path is not None:
            options["offload_param"] = {"device": "nvme", "nvme_path": path, "max_in_cpu": 0}
        model = new_model()
        with zero_optimizer(model, zero.CPUAdam, **options) as optimizer:
            train(model, optimizer, rank, steps=1)
            if interrupted:
                own = sorted(Path(path or "").glob(f"*rank{rank}"))
                assert_same_bits(values(path), alone)
                assert own == sorted(Path(path or "").glob(f"*rank{rank}"))
                assert len(own) >= 2 + (rank == 0)
            train(model, optimizer, rank, steps=1)
            return full_values(model)

    alone = values(None)
    assert_same_bits(values(folder, interrupted=True), alone)


def test_two_jobs_on_one_path(tmp_path: Path) -> None:
    """One job starts and ends while another is between two steps, and a third process has files there, too."""
    other = FileStore(tmp_path, files=FileSettings(), name="states", topology=None)
    file, data = other.create("masters", 4096), other.buffer(4096).fill_(7)
    other.write(file, 0, data).wait()
    run_ranks(2, _check_two_jobs, str(tmp_path))
    other.read(file, 0, data.zero_()).wait()
    assert (data == 7).all()
    other.close()
    assert not list(tmp_path.iterdir())
