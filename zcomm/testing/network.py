"""Messages, the store and process groups of simulated ranks, below what the library calls of torch.distributed.

As gloo's: a send is complete once its receive is there. Receives match sends of the same group, peer and tag, in order;
messages with other tags may overtake. Each takes a time of its own. A killed rank closes its connections.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zcomm.testing.scheduler import Scheduler

Flip = Callable[[Tensor], None]


@dataclass
class SimulatedWork:
    """A send or a receive."""

    network: SimulatedNetwork
    tensor: Tensor
    ranks: tuple[int, int]
    """Global ranks: sender and receiver."""
    timeout_s: float
    what: str
    own: tuple[str, int]
    """Name of the group, and global rank."""
    is_done: bool = False
    error: str = ""

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = self.timeout_s if timeout is None else timeout.total_seconds()
        if not self.is_done:
            self.network.scheduler.wait(lambda: self.is_done, seconds, self.what, in_c=True)
        if not self.is_done:
            self.network.close_group(*self.own, "Application timeout caused pair closure")
            raise RuntimeError(f"Timed out waiting {seconds * 1000:.0f}ms for {self.what} operation to complete")
        if self.error:
            raise RuntimeError(self.error)
        return True

    def fail(self, error: str) -> None:
        if not self.is_done:
            self.is_done, self.error = True, error


class SimulatedNetwork:
    """Carries messages between ranks. ``flip`` may change what a message carries."""

    def __init__(self, scheduler: Scheduler, latency_s: tuple[float, float] = (1e-5, 1e-3)) -> None:
        self.scheduler, self.latency_s = scheduler, latency_s
        self.closed: set[tuple[str, int]] = set()
        """Groups in which a rank has closed its connections: with the group, or, as gloo, once a wait has timed out."""
        self.dead: set[int] = set()
        self.flip: Flip | None = None
        self.values: dict[str, bytes] = {}
        """Of the store that all ranks share."""
        self._sends: defaultdict[object, deque[SimulatedWork]] = defaultdict(deque)
        self._receives: defaultdict[object, deque[SimulatedWork]] = defaultdict(deque)
        self._groups: defaultdict[str, set[int]] = defaultdict(set)

    def post(self, work: SimulatedWork, place: object, *, is_send: bool) -> SimulatedWork:
        """Start ``work``; it meets its counterpart at the same ``place``."""
        gone = [rank for rank in work.ranks if rank in self.dead or (work.own[0], rank) in self.closed]
        if gone:
            work.fail(f"Connection closed by peer [rank {gone[0]}]")
            return work
        mine, others = (self._sends, self._receives) if is_send else (self._receives, self._sends)
        if others[place]:
            other = others[place].popleft()
            send, receive = (work, other) if is_send else (other, work)
            seconds = self.scheduler.value(*self.latency_s)
            self.scheduler.after(seconds, lambda: self._deliver(send, receive))
        else:
            mine[place].append(work)
        return work

    def _deliver(self, send: SimulatedWork, receive: SimulatedWork) -> None:
        if send.is_done or receive.is_done:  # a rank has died meanwhile
            return
        sent, received = (work.tensor.detach().view(-1).view(torch.uint8) for work in (send, receive))
        if sent.numel() > received.numel():
            for work in (send, receive):
                work.fail("a message is longer than its receive: gloo ends the process")
            return
        received[: sent.numel()].copy_(sent)
        if self.flip is not None:
            self.flip(received)
        self.scheduler.note(f"message {send.ranks} {sent.numel()}")
        send.is_done = receive.is_done = True

    def close_rank(self, rank: int) -> None:
        """``rank`` is dead: what waits for it fails after a moment."""
        self.dead.add(rank)
        self.close(lambda work: rank in work.ranks, f"Connection closed by peer [rank {rank}]")

    def close_group(self, name: str, rank: int, error: str) -> None:
        """``rank`` closes its connections of the group ``name``."""
        self.closed.add((name, rank))
        self.close(lambda work: work.own[0] == name and rank in work.ranks, error)

    def close(self, belongs: Callable[[SimulatedWork], bool], error: str) -> None:
        """What waits for a counterpart, and ``belongs`` to a closed connection, fails after a moment."""
        for works in (*self._sends.values(), *self._receives.values()):
            for work in [work for work in works if belongs(work)]:
                works.remove(work)
                self.scheduler.after(self.scheduler.value(*self.latency_s), partial(work.fail, error))

    def connect(self, name: str, ranks: Sequence[int], rank: int, timeout_s: float) -> None:
        """Return once all ``ranks`` make the group ``name``."""
        self._groups[name].add(rank)
        if not self.scheduler.wait(lambda: self._groups[name] >= set(ranks), timeout_s, f"group {name}"):
            raise RuntimeError(f"Timed out after {timeout_s:g} s: connecting group {name}")


class SimulatedStore(dist.Store):  # type: ignore[misc, name-defined]
    """A key-value store that all ranks share. Every request is a point where other ranks may run."""

    def __init__(self, network: SimulatedNetwork, timeout_s: float) -> None:
        super().__init__()
        self._network, self._timeout_s = network, timeout_s

    def _request(self, what: str) -> dict[str, bytes]:
        self._network.scheduler.pause(what)
        return self._network.values

    def set(self, key: str, value: str | bytes) -> None:
        self._request(f"set {key}")[key] = _as_bytes(value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._network.values[key]

    def check(self, keys: list[str]) -> bool:
        values = self._request("check")
        return all(key in values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = self._timeout_s if timeout is None else timeout.total_seconds()
        values = self._network.values
        if not self._network.scheduler.wait(lambda: all(key in values for key in keys), seconds, f"keys {keys}"):
            raise dist.DistStoreError(f"wait timeout after {seconds * 1000:.0f}ms, keys: {', '.join(keys)}")

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        values, wanted = self._request(f"compare_set {key}"), _as_bytes(expected)
        if (key not in values and not wanted) or values.get(key) == wanted:
            values[key] = _as_bytes(desired)
        return values.get(key, wanted)

    def add(self, key: str, amount: int) -> int:
        values = self._request(f"add {key}")
        total = int(values.get(key, b"0")) + amount
        values[key] = str(total).encode()
        return total

    def delete_key(self, key: str) -> bool:
        return self._request(f"delete {key}").pop(key, None) is not None

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys)
        return [self._network.values[key] for key in keys]

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> SimulatedStore:
        return SimulatedStore(self._network, self._timeout_s)


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class SimulatedGroup(dist.ProcessGroup):
    """A process group of CPU ranks that sends and receives by tag, as one of gloo."""

    def __init__(self, network: SimulatedNetwork, name: str, ranks: Sequence[int], rank: int, timeout_s: float) -> None:
        super().__init__(ranks.index(rank), len(ranks))  # type: ignore[call-arg]
        self._network, self._name, self._ranks, self._timeout_s = network, name, list(ranks), timeout_s
        self._mine = ranks.index(rank)

    @property
    def group_name(self) -> Any:
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:  # noqa: ARG002
        options = SimpleNamespace(_timeout=timedelta(seconds=self._timeout_s))
        return SimpleNamespace(options=options, send=self.send, recv=self.recv)

    def get_group_store(self) -> SimulatedStore:
        return SimulatedStore(self._network, self._timeout_s)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> SimulatedWork:  # type: ignore[override]
        return self._post(tensors[0], (self._mine, peer), tag, is_send=True)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> SimulatedWork:  # type: ignore[override]
        return self._post(tensors[0], (peer, self._mine), tag, is_send=False)

    def _post(self, tensor: Tensor, ends: tuple[int, int], tag: int, *, is_send: bool) -> SimulatedWork:
        of_job, name = (self._ranks[ends[0]], self._ranks[ends[1]]), "send" if is_send else "recv"
        own = self._name, self._ranks[self._mine]
        work = SimulatedWork(self._network, tensor, of_job, self._timeout_s, name, own)
        self._network.scheduler.pause(name)
        return self._network.post(work, (self._name, ends, tag), is_send=is_send)
