"""``ZeroOptimizer.state_dict()``: one rank's shard of the state, to be loaded on the same rank of the same layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from zcomm import LayoutError
from zero._optim.loss_scale import LossScale
from zero._optim.masters import MasterPiece, compact
from zero._ranks.rank_errors import on_every_rank
from zero._runtime.runtime import Runtime
from zero._sharding.bucket import Bucket


def shard_state(
    runtime: Runtime, inner: Optimizer, pieces: list[MasterPiece], loss_scale: LossScale | None
) -> dict[str, Any]:
    """This rank's masters, optimizer states and layout; copies of what is in files.

    Collective if a delayed update is running, or parameters in files lack one.
    """
    runtime.finish_update()
    masters: list[Tensor] = []
    states: dict[int, dict[str, Any]] = {}
    for bucket in runtime.buckets:
        if bucket.is_trainable:
            is_in_files = bucket.states.is_in_files
            with runtime.states_in_memory(bucket):
                masters.append(bucket.master.clone() if is_in_files else compact(bucket.master))
                for piece in pieces if is_in_files else ():
                    if piece.bucket is bucket and piece.master in inner.state:
                        state = inner.state[piece.master].items()
                        states[id(piece.master)] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state}
    packed = inner.state_dict()
    leaves = (param for group in inner.param_groups for param in group["params"])
    for number, leaf in enumerate(leaves):
        if id(leaf) in states:
            packed["state"][number] = states[id(leaf)]
    return {
        "layout": _layout(runtime),
        "masters": masters,
        "optimizer": packed,
        "loss_scale": None if loss_scale is None else loss_scale.state_dict(),
        **{part.state_key: part.state_dict() for part in runtime.parts if part.state_key is not None},
    }


def load_masters(runtime: Runtime, buckets: Sequence[Bucket], masters: Sequence[Tensor]) -> None:
    """Set the masters of ``buckets``, wherever they are stored."""
    for bucket, master in zip(buckets, masters, strict=True):
        with runtime.in_memory([bucket], is_changed=True):
            bucket.master.copy_(master)


def restore_parts(runtime: Runtime, saved: Mapping[str, Any]) -> None:
    """Restore the parts of the runtime, and parameters that lacked the last update. Collective."""
    for part in runtime.parts:
        if part.state_key is not None and (behind := part.load_state_dict(saved.get(part.state_key))):
            runtime.write_back(behind, are_written=True)


def _layout(runtime: Runtime) -> dict[str, Any]:
    topology, buckets = runtime.topology, runtime.buckets
    return {
        "sharded": runtime.stage.shards_states,
        "world_size": topology.world_size,
        "shard_index": topology.shard_index("local"),
        "buckets": [(b.name, b.layout.numel, _names_in(b)) for b in buckets if b.is_trainable],
    }


def _names_in(bucket: Bucket) -> list[Any]:
    """The names of its parameters; with whole tensors also where they are."""
    layout = bucket.layout
    names: list[Any] = [slot.name for slot in layout.slots]
    parts = [slot.parts for slot in layout.slots]
    return [*names, layout.sizes, parts] if any(parts) else names


def check_fits(runtime: Runtime, saved: dict[str, Any]) -> None:
    """Raise LayoutError on every rank if any rank's shard was saved from another layout. Collective."""

    def check() -> None:
        wrong = [
            f"{key}: saved {saved.get(key)!r}, here {value!r}"
            for key, value in _layout(runtime).items()
            if saved.get(key) != value
        ]
        if wrong:
            raise LayoutError("a shard fits only the layout it was saved from: " + "; ".join(wrong)[:600])

    on_every_rank(check, runtime.topology)
