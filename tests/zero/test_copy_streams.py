"""Copies between host memory and a GPU: on separate streams, ordered after computation, recorded with the allocator."""

# covers zero/_activations/memory_storage.py zero/_gather/gather_sources.py
# covers zero/_storage/file_shard.py zero/_storage/host_memory.py

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.recorded_streams import DEVICE, Event, OnDevice, Recorded
from zero._activations.memory_storage import Copies
from zero._gather import gather_sources
from zero._sharding.layout import BucketLayout
from zero._storage.file_shard import FileShard
from zero._storage.file_store import FileStore
from zero._storage.host_memory import CopyStream, HostMemory
from zero._storage.shard_storage import HostShard
from zero._storage.staging_buffers import StagingBuffers
from zero._storage.tier_settings import FileSettings


class Target(Tensor):
    """Records on which stream it is written, and whether the host would wait."""

    recorded: Recorded

    def copy_(self, _: Tensor, non_blocking: bool = False) -> Tensor:  # noqa: FBT001  (torch's signature)
        how = "" if non_blocking else ", the host waits"
        self.recorded.log.append(f"copy on {self.recorded.current.name}{how}")
        return self


class Row(Target):
    """The same on the GPU."""

    is_cuda = True


def _target(recorded: Recorded, kind: type[Target] = Target) -> Any:
    Target.recorded = recorded
    return torch.empty(4).as_subclass(kind)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return Recorded(monkeypatch)


def _source() -> Any:
    return torch.ones(4).as_subclass(OnDevice)


def test_gradients_go_to_the_host_beside_the_computation(recorded: Recorded) -> None:
    memory = HostMemory(DEVICE, pins=False)
    arrival = memory.fetch_gradient(_source(), _target(recorded))
    assert recorded.log == ["side1 after main", "copy on side1", "event on side1", "tensor until side1"]
    assert recorded.current.name == "main"
    recorded.log.clear()
    arrival.wait()
    assert recorded.log == ["host after event"], "the host needs the values"
    memory.fetch_gradient(_source(), _target(recorded))
    assert recorded.num_streams == 1, "made once"


def test_parameters_come_to_the_device_beside_the_computation(recorded: Recorded) -> None:
    copies = CopyStream(DEVICE)
    with copies.on_stream():
        _target(recorded).copy_(torch.ones(4), non_blocking=True)
    assert copies.event() is not None
    assert recorded.log == ["side1 after main", "copy on side1", "event on side1"]
    assert recorded.current.name == "main"


def test_a_shard_in_host_memory_is_sent_from_its_row(recorded: Recorded) -> None:
    """An exchange must send the filled row on the device, and not the shard in host memory."""
    shard, row = torch.arange(8.0), torch.zeros(4)
    sent = HostShard(shard, CopyStream(torch.device("cpu"))).fetch(2, 6, row)
    assert sent is row
    assert row.tolist() == [2, 3, 4, 5]
    storage, there = HostShard(shard, CopyStream(DEVICE)), _target(recorded)
    with storage.on_stream():
        assert storage.fetch(2, 6, there) is there
    assert recorded.log == ["side1 after main", "copy on side1", "event on side1"]


@pytest.mark.parametrize("writes", [lambda storage: storage.target(0, 4), lambda storage: storage.settle()])
def test_the_host_writes_a_shard_once_its_copies_have_read_it(recorded: Recorded, writes: Any) -> None:
    storage = HostShard(torch.zeros(8), CopyStream(DEVICE))
    writes(storage)
    assert not recorded.log
    with storage.on_stream():
        storage.fetch(2, 6, _target(recorded))
    recorded.log.clear()
    writes(storage)
    assert recorded.log == ["host after event"]
    storage.target(4, 8)
    assert recorded.log == ["host after event"], "one wait for each fetch"


@pytest.mark.parametrize("is_async", [False, True])
def test_computation_waits_for_an_exchange_that_nobody_waits_for(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch, *, is_async: bool
) -> None:
    """Without overlap the exchange has no work to wait for, but runs on the copy stream all the same."""
    storage = HostShard(torch.zeros(4), CopyStream(DEVICE))
    work = object() if is_async else None
    monkeypatch.setattr(gather_sources, "_gather_columns", lambda *_: work)
    options = SimpleNamespace(columns=lambda _: [(0, 4)], is_async=is_async, format="none")
    layout = BucketLayout.of(["weight"], [(4,)], 1, align=1)
    bucket = SimpleNamespace(layout=layout, storage=storage, shard_of=lambda full: full)
    primary: Any = gather_sources.Primary(bucket, options)  # type: ignore[arg-type]
    assert primary.start(0, _target(recorded)) is work
    joined = [] if is_async else ["main after side1"]
    assert recorded.log == ["side1 after main", "copy on side1", "event on side1", *joined]


def test_a_buffer_of_a_file_is_used_again_once_its_copy_is_made(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file's staging buffer is reused once its copy to the device is complete: not before, but then it is."""
    page, store = 4096, FileStore(tmp_path, files=FileSettings(), name="parameters", topology=None)
    staging = StagingBuffers(store, limit_nbytes=page)
    file = store.create("shard", page)
    storage = FileShard(torch.empty(1).expand(4), file, [(0, 4)], staging, CopyStream(DEVICE))
    used = []
    for has_passed in (True, True, False, False, True, True):
        monkeypatch.setattr(Event, "has_passed", has_passed)
        recorded.log.clear()
        with storage.on_stream():
            storage.fetch(0, 4, _target(recorded, Row))
        assert recorded.log == ["side1 after main", "copy on side1", "event on side1"]
        used.append(staging.nbytes // page)
    assert used == [1, 1, 2, 3, 3, 3], "a buffer more for each copy that is not made yet"
    staging.forget()
    store.close()


def test_saved_inputs_go_to_the_host_beside_the_computation(recorded: Recorded) -> None:
    copies = Copies()
    copies.to_host(_source(), _target(recorded))
    assert recorded.log == ["side1 after main", "copy on side1", "tensor until side1"]
    copies.to_host(_source(), _target(recorded))
    assert recorded.num_streams == 1, "one order of all copies"
