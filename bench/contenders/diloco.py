"""The contender DiLoCo: nodes train apart, and average every few steps what has changed since the last time.

This is torchft's DiLoCo as installed, with the outer optimizer of its paper (arXiv:2311.08105). torchft's Manager,
which needs a server for its quorum, is replaced by an all-reduce of torch.distributed: nothing fails here. Inside a
node DistributedDataParallel sums gradients in every step.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from contenders.contender import Contender, ContenderSetup

if TYPE_CHECKING:
    from zcomm import Topology

__all__ = ["OUTER_RATE", "LocalSteps", "build"]

OUTER_RATE = 0.7
"""The paper's learning rate of what has changed between two exchanges."""


class LocalSteps:
    """A model that every node trains by itself, with ``inner``, and that all have in common every ``every`` steps."""

    def __init__(
        self,
        model: nn.Module,
        inner: Optimizer,
        topology: Topology | None,
        *,
        every: int,
        outer_rate: float = OUTER_RATE,
    ) -> None:
        from torchft.local_sgd import DiLoCo

        local = topology.ranks_per_node if topology is not None else int(os.environ["LOCAL_WORLD_SIZE"])
        shape = (dist.get_world_size() // local, local)
        mesh = init_device_mesh(next(model.parameters()).device.type, shape, mesh_dim_names=("nodes", "ranks"))
        nodes, ranks = mesh.get_group("nodes"), mesh.get_group("ranks")
        self.wrapped = DistributedDataParallel(model, process_group=ranks, gradient_as_bucket_view=True)
        self.outer = SGD(model.parameters(), lr=outer_rate, momentum=0.9, nesterov=True)
        self._diloco = DiLoCo(_Manager(nodes, ranks), [model], inner, self.outer, every, use_bucketization=True)
        self._diloco.__enter__()

    def note_loaded(self) -> None:
        """Take the model's present parameters for those that the nodes have in common."""
        self._diloco._save_parameters()

    def close(self) -> None:
        """Remove the hooks from the inner optimizer."""
        self._diloco.__exit__(None, None, None)


class _Manager:
    """What DiLoCo asks of torchft's Manager, for ranks of which none fails."""

    _use_async_quorum = False

    def __init__(self, nodes: dist.ProcessGroup, ranks: dist.ProcessGroup) -> None:
        self._nodes, self._ranks, self._step = nodes, ranks, 0

    def allreduce(self, tensor: Tensor, *, should_quantize: bool) -> _Done:
        """Average ``tensor``, which a node's ranks have in common, over the nodes: each of them sends a part."""
        assert not should_quantize, "not asked for"
        count = self._ranks.size()
        padded = torch.cat([tensor.flatten(), tensor.new_zeros(-tensor.numel() % count)])
        mine = padded.chunk(count)[self._ranks.rank()].clone()
        dist.all_reduce(mine, group=self._nodes)
        dist.all_gather(list(padded.chunk(count)), mine.div_(self._nodes.size()), group=self._ranks)
        tensor.copy_(padded[: tensor.numel()].view_as(tensor))
        return _Done()

    def should_commit(self) -> bool:
        """Count an exchange; it has always succeeded."""
        self._step += 1
        return True

    def current_step(self) -> int:
        """Exchanges so far."""
        return self._step

    def start_quorum(self) -> None:
        """All ranks are there."""

    def register_state_dict_fn(self, *_: object) -> None:
        """Nobody joins later."""

    disallow_state_dict_read = allow_state_dict_read = start_quorum


class _Done:
    """An exchange that has ended."""

    def wait(self) -> None:
        """Return at once."""

    def get_future(self) -> Future[list[Tensor]]:
        """A future that is done."""
        future: Future[list[Tensor]] = Future()
        future.set_result([])
        return future


def build(setup: ContenderSetup, *, accumulation: int) -> Contender:
    """Its step is ``accumulation`` optimizer steps, on a batch each, and one exchange."""
    optimizer = AdamW(setup.model.parameters(), lr=setup.learning_rate, fused=True)
    local = LocalSteps(setup.model, optimizer, setup.topology, every=accumulation)
    device, autocast = next(setup.model.parameters()).device, setup.autocast()

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros((), device=device)
        for batch in zip(tokens.chunk(accumulation), targets.chunk(accumulation), strict=True):
            with autocast:
                loss: Tensor = local.wrapped(*batch)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach() / accumulation
        return total

    return Contender(step, accumulation, local.close)
