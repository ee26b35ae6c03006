"""ZeroOptimizer: ZeRO stages 0 to 3 and ZeRO++ behind the interface of a torch optimizer.

optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=3, lr=3e-4)
loss = model(x)            parameters are gathered and released by hooks (stage 3)
loss.backward()            gradients are averaged over the ranks on the way (all stages)
optimizer.step()           this rank's shard is updated; stages 1 and 2 gather the new parameters
optimizer.zero_grad()
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zcomm import ConfigError, LayoutError, StateError, Topology
from zero.clip import clip_grad_norm_
from zero.masters import as_groups, build_inner, build_pieces, check_elementwise
from zero.memory import MemoryReport, measure
from zero.runtime import Runtime, check_model
from zero.settings import Effective, split_options
from zero.state_dict import install_state_dict_hooks

__all__ = ["ZeroOptimizer"]

logger = logging.getLogger("zero")


class ZeroOptimizer(Optimizer):
    """An elementwise torch optimizer whose states, gradients and parameters are sharded over the ranks.

    Args:
        model: On its device and in its dtype: float32, or bf16 (then float32 master weights are kept). Rank 0's values
            are taken over by every rank.
        optimizer: A class, built here over the model's trainable parameters with ``options``; or an instance without
            state, whose parameter groups and settings are kept.
        topology: Which ranks share a node. Default: torchrun's environment.
        ranks_per_node: Instead of ``topology``: so many consecutive ranks stand in for a node.
        group: The data-parallel ranks; default: all.
        options: The fields of :class:`zero.ZeroSettings` (``stage``, ``quantized_weights``, ...); what is left goes to
            the optimizer class (``lr``, ``weight_decay``, ...).

    Raises:
        ConfigError: A setting that cannot be meant, an optimizer that is not elementwise, parameters in no group.
        LayoutError: Parameters on several devices, on meta, without floating point; models that differ between ranks.
        TopologyError: Ranks that do not divide into nodes, or ``hpz_partition_size`` that does not fit them.

    ``param_groups`` hold this rank's float32 master weights, so schedulers and manual changes of ``lr`` work as ever.
    Cost for each rank and step, P elements over N ranks: 2P(N-1)/N elements sent at stages 0, 1, 2; 3P(N-1)/N at
    stage 3; one small agreement per reduced backward. Source: arXiv:1910.02054, arXiv:2306.10209.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: type[Optimizer] | Optimizer,
        *,
        topology: Topology | None = None,
        ranks_per_node: int | None = None,
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        if not (isinstance(optimizer, Optimizer) or (isinstance(optimizer, type) and issubclass(optimizer, Optimizer))):
            raise ConfigError(f"optimizer must be a torch.optim.Optimizer class or instance: got {optimizer!r}")
        settings, optimizer_options = split_options(options)
        groups = as_groups(model, optimizer)
        device = check_model(model)
        # A wrong option or optimizer is refused before the model is touched.
        if isinstance(optimizer, type):
            check_elementwise(build_inner(optimizer, [{"params": []}], [], optimizer_options), device)
        else:
            check_elementwise(optimizer, device)
        self._owns_topology = topology is None
        self._runtime = Runtime(model, settings, _choose_topology(topology, ranks_per_node, group))
        shard_index = self._runtime.topology.shard_index("local")
        self._pieces = build_pieces(self._runtime.buckets, self._runtime.stage, shard_index)
        self._inner = build_inner(optimizer, groups, self._pieces, optimizer_options)
        self._is_built = False
        super().__init__(self._inner.param_groups, self._inner.defaults)
        self._is_built = True
        self._share_state()
        self._runtime.hooks.keep(install_state_dict_hooks(self._runtime))
        self._announce()

    def _share_state(self) -> None:
        """One list of groups and one state, seen by both optimizers."""
        self.param_groups = self._inner.param_groups
        self.state = self._inner.state

    def _announce(self) -> None:
        if self._runtime.topology.rank == 0:
            if not logger.hasHandlers():
                logger.addHandler(logging.StreamHandler())
            if logger.level == logging.NOTSET:
                logger.setLevel(logging.INFO)
            logger.info("%s", self.effective)

    @property
    def effective(self) -> Effective:
        """What is done on this model and topology, and what was asked for without effect."""
        return self._runtime.effective

    @property
    def topology(self) -> Topology:
        """The ranks and nodes the model is sharded over."""
        return self._runtime.topology

    def memory(self) -> MemoryReport:
        """Allocated bytes of model states on this rank, by kind."""
        return measure(self._runtime, self._inner)

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, ``backward()`` keeps gradients on this rank; the next outside, or ``step()``, averages the sum.

        At stages 2 and 3 this holds full gradients: ``memory().unreduced_gradients`` says how many bytes.
        """
        return self._runtime.no_sync()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """Scale all gradients so that their norm over all ranks, groups and parameters is at most ``max_norm``.

        Args:
            max_norm: The largest norm to leave.
            norm_type: 2 or infinity.
            error_if_nonfinite: Raise StateError, on every rank, if the norm is NaN or infinite.

        Returns:
            The norm before clipping, a float32 CPU scalar; the same bits on every rank and at stages 1, 2 and 3.

        Cost for each rank: one pass over its shards, 8 bytes to every other rank, one host sync.
        """
        return clip_grad_norm_(self._runtime, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's shard with the averaged gradients, and publish the new parameters. Collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        runtime = self._runtime
        runtime.hooks.recover()
        runtime.check_model_unchanged()
        runtime.reducer.flush()
        self._hand_out_gradients()
        self._inner.step()
        for piece in self._pieces:
            piece.master.grad = None
        runtime.step_ended()
        return loss

    def _hand_out_gradients(self) -> None:
        """Each master gets its part of the reduced gradient; parameters that no rank used get none."""
        widened: dict[int, Tensor] = {}
        with torch._C.DisableTorchFunctionSubclass():
            for piece in self._pieces:
                grads = self._runtime.reducer.by_bucket[piece.bucket.index]
                if not grads.used[piece.slot] or piece.param.grad is None:
                    continue
                result = self._runtime.reducer.results(grads)
                assert result is not None, "a used parameter without a gradient"
                if result.dtype != piece.master.dtype:  # gradients at rest in 16 bit
                    result = widened.setdefault(id(result), result.to(piece.master.dtype))
                piece.master.grad = result[piece.start : piece.start + piece.master.numel()]

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002, FBT001  (torch's signature)
        """Forget all gradients; ``param.grad`` becomes None, whatever ``set_to_none`` says."""
        self._runtime.hooks.recover()
        self._runtime.reducer.zero()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not after construction: the layout of shards is fixed then."""
        if getattr(self, "_is_built", False):
            raise StateError(
                "parameters cannot be added after construction: build the optimizer with all its parameter groups and "
                "pass that instance to ZeroOptimizer"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """This rank's shard: masters, optimizer states, and the layout they belong to."""
        return {
            "layout": self._layout(),
            "masters": [bucket.master for bucket in self._runtime.buckets if bucket.is_trainable],
            "optimizer": self._inner.state_dict(),
        }

    def _layout(self) -> dict[str, Any]:
        topology, buckets = self._runtime.topology, self._runtime.buckets
        return {
            "sharded": self._runtime.stage.shards_states,
            "world_size": topology.world_size,
            "shard_index": topology.shard_index("local"),
            "buckets": [(b.name, b.layout.numel, [s.name for s in b.layout.slots]) for b in buckets if b.is_trainable],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave on this rank of the same layout, and publish the parameters. Collective.

        Raises:
            LayoutError: The shards were saved with another world size, on another rank or from another model.
        """
        saved, mine = state_dict["layout"], self._layout()
        wrong = [
            f"{key}: saved {saved.get(key)!r}, here {value!r}" for key, value in mine.items() if saved.get(key) != value
        ]
        if wrong:
            raise LayoutError("a shard fits only the layout it was saved from: " + "; ".join(wrong)[:600])
        buckets = [bucket for bucket in self._runtime.buckets if bucket.is_trainable]
        for bucket, master in zip(buckets, state_dict["masters"], strict=True):
            bucket.master.copy_(master)
        self._inner.load_state_dict(state_dict["optimizer"])
        self._share_state()
        self._runtime.publish(buckets)

    def master_pieces(self) -> Iterator[tuple[nn.Parameter, int, Tensor]]:
        """``(parameter, first element, master values)`` for everything this rank updates."""
        for piece in self._pieces:
            base = self._runtime.topology.shard_index("local") * piece.bucket.layout.shard_numel
            slot = piece.bucket.layout.slots[piece.slot]
            first = piece.start + (base if self._runtime.stage.shards_states else 0) - slot.offset
            yield piece.param, first, piece.master[: slot.numel - first]  # without the padding

    def close(self) -> None:
        """Take the hooks off the model, drop the gradients, and free the process groups that were made for it.

        The model is an ordinary one again. At stage 3 a rank holds only a shard of its parameters: to keep them whole,
        close inside ``zero.GatheredParameters(model.parameters())``, or save them before.
        """
        self._runtime.close()
        if self._owns_topology:
            self._runtime.topology.close()


def _choose_topology(
    topology: Topology | None, ranks_per_node: int | None, group: dist.ProcessGroup | None
) -> Topology:
    if topology is not None:
        if ranks_per_node is not None or group is not None:
            raise ConfigError("topology= already says the group and the ranks per node: pass only one of them")
        return topology
    if ranks_per_node is not None:
        return Topology(ranks_per_node=ranks_per_node, group=group)
    return Topology.from_env(group)
