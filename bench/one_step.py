"""Trace one training step at stage 3 on 4 ranks: ``torchrun --nproc-per-node 4 bench/one_step.py``.

Prints the table of docs/design/schedule.md. The model has three layers of one weight each; the step is the third, which
follows the recorded order. The columns say what each rank holds of a layer's weight after the event, by the memory
behind ``layer.weight``:

    shard   this rank's quarter        incoming   also a buffer that is being filled        full   all of it
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zcomm import Topology
from zero import ZeroOptimizer

NUM_LAYERS, WIDTH = 3, 32
NUM_BEFORE = 2
"""Steps before: the first records the order, the second is the first to follow it."""


class Event(NamedTuple):
    """An action of a rank, and what it holds of each layer's weight afterwards."""

    does: str
    layer: int | None
    nbytes: tuple[int, ...]
    """Bytes behind each ``layer.weight``; those of one element if it is released."""
    is_incoming: tuple[bool, ...]


class Recorder:
    """Records the events of a model's layers, by wrapping methods that its ZeroOptimizer calls."""

    def __init__(self, model: nn.Sequential, optimizer: ZeroOptimizer) -> None:
        self.events: list[Event] = []
        self.layers = list(model)
        runtime = optimizer._runtime
        self.buckets = runtime.buckets
        for number, (layer, bucket) in enumerate(zip(self.layers, self.buckets, strict=True)):
            assert bucket.params == [layer.weight], "a bucket for each layer"
            self._wrap(bucket, "start_gathering", lambda *_, n=number: ("starts to gather", n))
            self._wrap(bucket, "release", lambda *_, n=number: ("releases", n))
            layer.register_forward_pre_hook(lambda *_, n=number: self.note("uses in forward", n))
            layer.register_forward_hook(lambda _layer, _args, output, n=number: self._watch(output, n))
        self._wrap(
            runtime.reducer.reduction, "start", lambda grads, *_: ("reduces the gradient of", grads.bucket.index)
        )
        for grads in runtime.reducer.all:
            self._wrap(grads.store, "add", lambda _, n=grads.bucket.index: ("has its shard of the gradient of", n))
        self._wrap(optimizer._update, "run", lambda: ("updates its shards", None))

    def _wrap(self, owner: Any, name: str, does: Callable[..., tuple[str, int | None]]) -> None:
        method = getattr(owner, name)

        def wrapper(*args: Any) -> Any:
            result = method(*args)
            self.note(*does(*args))
            return result

        setattr(owner, name, wrapper)

    def _watch(self, output: Tensor, number: int) -> None:
        output.register_hook(lambda _: self.note("uses in backward", number))  # type: ignore[no-untyped-call]

    def note(self, does: str, layer: int | None) -> None:
        """Add an event."""
        with torch._C.DisableTorchFunctionSubclass():  # a released weight raises when it is used
            nbytes = tuple(layer.weight.untyped_storage().nbytes() for layer in self.layers)
        self.events.append(Event(does, layer, nbytes, tuple(b.state.value == "gathering" for b in self.buckets)))


def record(topology: Topology) -> tuple[list[Event], list[tuple[int, int]]]:
    """Train some steps; return this rank's events of the last, and the elements that it owns of each weight."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=3, lr=1e-3, topology=topology)
    recorder = Recorder(model, optimizer)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(topology.rank))
    for _ in range(NUM_BEFORE + 1):
        recorder.events.clear()
        recorder.note("owns its shards", None)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    row = topology.shard_index("local")
    numels = [bucket.layout.shard_numel for bucket in recorder.buckets]
    optimizer.close()
    return recorder.events, [(row * numel, (row + 1) * numel) for numel in numels]


def table(events: list[Event], owned: list[list[tuple[int, int]]]) -> str:
    """Return the page; ``owned``: for each rank, its elements of each layer."""
    ranges = ", ".join(f"rank {rank} {first} to {stop - 1}" for rank, ((first, stop), *_) in enumerate(owned))
    lines = [
        f"Owners of the {WIDTH * WIDTH} elements of each layer: {ranges}.",
        "",
        "| every rank | " + " | ".join(f"layer {number}" for number in range(NUM_LAYERS)) + " |",
        "|" + "---|" * (NUM_LAYERS + 1),
    ]
    for event in events:
        where = "" if event.layer is None else f" layer {event.layer}"
        does, _, phase = event.does.partition(" in ")
        text = f"{does}{where}" + (f" in {phase}" if phase else "")
        lines.append(f"| {text} | " + " | ".join(_held(event, number) for number in range(NUM_LAYERS)) + " |")
    return "\n".join(lines) + "\n"


def _held(event: Event, number: int) -> str:
    if event.nbytes[number] >= 4 * WIDTH * WIDTH:
        return "full"
    return "incoming" if event.is_incoming[number] else "shard"


def main() -> int:
    """Record on every rank, compare the records and print one."""
    dist.init_process_group("gloo")
    topology = Topology(ranks_per_node=dist.get_world_size())
    of_ranks: list[Any] = [None] * topology.world_size
    dist.all_gather_object(of_ranks, record(topology))
    assert all(events == of_ranks[0][0] for events, _ in of_ranks), "every rank does the same"
    if topology.rank == 0:
        sys.stdout.write(table(of_ranks[0][0], [owned for _, owned in of_ranks]))
    topology.close()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
