"""Asynchronous collectives on CUDA: which stream waits for which, by the calls of torch, and on a GPU."""

# covers zcomm/_transport/device_streams.py

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import zcomm
from tests.recorded_streams import DEVICE, OnDevice, Recorded
from zcomm._transport.work import SideStreams, Steps, WorkQueue, run


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return Recorded(monkeypatch)


def _tensor() -> Tensor:
    return torch.empty(0).as_subclass(OnDevice)


def test_a_side_stream_starts_after_the_current_one_which_waits_in_the_end(recorded: Recorded) -> None:
    queue = WorkQueue()
    work = run(recorded.steps("a"), _tensor(), _tensor(), torch.empty(0), async_op=True, queue=queue)
    assert recorded.log == [
        "side1 after main", "a on side1", "event on side1", "tensor until side1", "tensor until side1",
    ]  # fmt: skip
    recorded.log.clear()
    assert work is not None
    assert work.is_completed()
    work.wait()
    work.wait()
    assert recorded.log == ["main after event"] * 2
    recorded.log.clear()
    run(recorded.steps("b"), _tensor(), async_op=False, queue=queue)
    assert recorded.log == ["b on main"]
    run(recorded.steps("c"), _tensor(), async_op=True, queue=queue)
    run(recorded.steps("d"), _tensor(), async_op=True, queue=WorkQueue())
    assert recorded.num_streams == 2, "one a topology, made once"


def test_a_side_stream_goes_before_the_computations_kernels(recorded: Recorded) -> None:
    with SideStreams().after_current(DEVICE, []):
        pass
    assert recorded.priorities == [-1]


def test_tensors_of_a_collective_that_fails_are_kept_for_what_was_started(recorded: Recorded) -> None:
    with pytest.raises(ValueError, match="broken"):
        run(recorded.steps("a", ValueError("broken")), _tensor(), async_op=True, queue=WorkQueue())
    assert recorded.log == ["side1 after main", "a on side1", "tensor until side1"]
    assert recorded.current.name == "main"


@pytest.mark.gpu
def test_the_current_stream_goes_on_beside_a_collective() -> None:
    queue, x = WorkQueue(), torch.ones(1, device=DEVICE)
    x.mul_(1)  # A kernel's first launch loads it, which waits for the device.

    def steps() -> Steps:
        torch.cuda._sleep(1_000_000_000)  # cycles: half a second
        x.mul_(2)
        yield None

    work = run(steps(), x, async_op=True, queue=queue)
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    side = queue.side._streams[x.device]
    assert not side.query(), "the computation waited for the collective"
    assert work is not None
    work.wait()
    assert (x + 1).item() == 3


@pytest.mark.gpu
@pytest.mark.parametrize("wire", ["none", "int8", "int4"])
def test_what_is_freed_or_written_around_a_call_does_not_change_its_result(wire: str) -> None:
    """The input is written late, and its memory is reused immediately."""
    values = torch.randn(2**22, device=DEVICE)
    expected = torch.empty_like(values)
    zcomm.all_gather_single(expected, values, format=wire)
    for _ in range(20):
        torch.cuda._sleep(20_000_000)
        source, output = values.clone(), torch.empty_like(values)
        work = zcomm.all_gather_single(output, source, format=wire, async_op=True)
        del source
        others = [torch.full_like(values, float("nan")) for _ in range(4)]
        assert work is not None
        work.wait()
        assert torch.equal(output, expected)
        del others, output
