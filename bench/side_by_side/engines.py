"""Training engines with one interface: DDP, DiLoCo and ZeroOptimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from contenders.ddp import ONE_BUCKET, WHOLE_SHARE, send_by_powersgd
from contenders.diloco import LocalSteps
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Muon, Optimizer

from side_by_side.configurations import Configuration
from zcomm import Topology, volume
from zero import ZeroOptimizer, split_for_muon
from zero.utils import safe_get_full_fp32_param, safe_get_full_grad

__all__ = ["Engine", "build_engine"]

ADAM: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
MUON: dict[str, Any] = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1}


class Engine(Protocol):
    """The interface that a run uses."""

    model: nn.Module
    """The user's model; its forward returns the loss."""
    was_step_applied: bool

    def loss(self, tokens: Tensor, targets: Tensor, *, is_last: bool) -> Tensor:
        """Run the forward of a micro-batch, and return the loss."""

    def backward(self, loss: Tensor) -> None:
        """Run the backward of ``loss``, with the loss scale if there is one."""

    def step(self, schedule: float, max_norm: float) -> None:
        """Clip the gradients, update with learning rates times ``schedule``, clear the gradients. Collective."""

    def gradient(self, param: nn.Parameter) -> Tensor | None:
        """Return the full averaged gradient; call it between the last backward and the step. Collective."""

    def master(self, param: nn.Parameter) -> Tensor:
        """Return the full master parameter, float32. Collective."""

    def uncounted_inter_nbytes(self, step: int) -> int:
        """Return the bytes between nodes that zcomm does not count, by formula: of step ``step`` from 0, all ranks."""

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the training state."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state``. Collective."""

    def close(self) -> None:
        """Free the engine's resources."""


class _Ddp:
    """DistributedDataParallel and torch's AdamW."""

    def __init__(self, model: nn.Module, lr: float, topology: Topology) -> None:
        self.model, self._topology = model, topology
        self._optimizer = AdamW(model.parameters(), lr=lr, **ADAM)
        self._wrapped = self._wrap()
        self._schedule = _Schedule(self._optimizer)
        self.was_step_applied = True

    def _wrap(self) -> DistributedDataParallel:
        return DistributedDataParallel(self.model)

    def loss(self, tokens: Tensor, targets: Tensor, *, is_last: bool) -> Tensor:
        self._wrapped.require_backward_grad_sync = is_last
        loss: Tensor = self._wrapped(tokens, targets) if torch.is_grad_enabled() else self.model(tokens, targets)
        return loss

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self, schedule: float, max_norm: float) -> None:
        clip_grad_norm_(self.model.parameters(), max_norm)
        self._schedule.set(schedule)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def gradient(self, param: nn.Parameter) -> Tensor | None:
        return param.grad

    def master(self, param: nn.Parameter) -> Tensor:
        return param.detach()

    def uncounted_inter_nbytes(self, step: int) -> int:
        """A two-hop all-reduce: each element crosses the network once."""
        numel = sum(self._numel_sent(param, step) for param in self.model.parameters())
        nodes, per_node = self._topology.num_nodes, self._topology.ranks_per_node
        sent = volume.all_reduce_sent(numel, torch.float32, nodes, per_node, ("none", "none"))
        return sent.inter * self._topology.world_size

    def _numel_sent(self, param: nn.Parameter, step: int) -> int:  # noqa: ARG002  (of some engines it depends on both)
        return param.numel()

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        pass


class _PowerSgd(_Ddp):
    """DDP that sends factors of gradients, of one rank, after a first part of the training."""

    def __init__(self, model: nn.Module, lr: float, topology: Topology, rank: int, steps: int) -> None:
        self._rank, self._first_step = rank, max(2, round(WHOLE_SHARE * steps))
        super().__init__(model, lr, topology)
        self._factors = send_by_powersgd(self._wrapped, rank, first_step=self._first_step)

    def _wrap(self) -> DistributedDataParallel:
        return DistributedDataParallel(self.model, bucket_cap_mb=ONE_BUCKET)

    def _numel_sent(self, param: nn.Parameter, step: int) -> int:
        rows, columns = len(param), param.numel() // len(param)
        factors = (rows + columns) * self._rank
        return factors if step >= self._first_step and 2 * factors < param.numel() else param.numel()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"factors": self._factors.__getstate__()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._factors.__setstate__(state["factors"])
        # DDP orders its bucket anew after the first backward: the errors that are kept have the order after that.
        self._factors.start_powerSGD_iter = self._factors.iter + 2


class _DiLoCo(_Ddp):
    """Nodes that train apart, each by DDP, and exchange what has changed every ``every`` steps."""

    def __init__(self, model: nn.Module, lr: float, topology: Topology, every: int, outer_rate: float) -> None:
        self._every, self._outer_rate = every, outer_rate
        super().__init__(model, lr, topology)

    def _wrap(self) -> DistributedDataParallel:
        options = {"every": self._every, "outer_rate": self._outer_rate}
        self._local = LocalSteps(self.model, self._optimizer, self._topology, **options)
        return self._local.wrapped

    def uncounted_inter_nbytes(self, step: int) -> int:
        """Of a mean step."""
        return super().uncounted_inter_nbytes(step) // self._every

    def state_dict(self) -> dict[str, Any]:
        """After an exchange, when all nodes have the same parameters."""
        return super().state_dict() | {"outer": self._local.outer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._local.outer.load_state_dict(state["outer"])
        self._local.note_loaded()

    def close(self) -> None:
        self._local.close()


class _Zero:
    """ZeroOptimizer at stage 3."""

    def __init__(self, model: nn.Module, lr: float, topology: Topology, configuration: Configuration) -> None:
        options = dict(configuration.options)
        if configuration.stays_in_node:
            options["hpz_partition_size"] = topology.ranks_per_node
        self.model = model
        self._optimizer = ZeroOptimizer(
            model, _optimizers(model, lr, has_muon=configuration.has_muon), topology=topology, stage=3,
            gradient_accumulation_steps=configuration.accumulation, **options,
        )  # fmt: skip
        self._schedule = _Schedule(self._optimizer)

    @property
    def was_step_applied(self) -> bool:
        return self._optimizer.was_step_applied

    def loss(self, tokens: Tensor, targets: Tensor, *, is_last: bool) -> Tensor:  # noqa: ARG002  (it counts micro-batches)
        loss: Tensor = self.model(tokens, targets)
        return loss

    def backward(self, loss: Tensor) -> None:
        self._optimizer.scale(loss).backward()

    def step(self, schedule: float, max_norm: float) -> None:
        self._optimizer.clip_grad_norm_(max_norm)
        self._schedule.set(schedule)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def gradient(self, param: nn.Parameter) -> Tensor | None:
        return safe_get_full_grad(param)

    def master(self, param: nn.Parameter) -> Tensor:
        master = safe_get_full_fp32_param(param)
        assert master is not None, "ZeroOptimizer manages every parameter of the model"
        return master

    def uncounted_inter_nbytes(self, step: int) -> int:  # noqa: ARG002  (the interface)
        return 0

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._optimizer.load_state_dict(dict(state))

    def close(self) -> None:
        self._optimizer.close()


def build_engine(configuration: Configuration, model: nn.Module, lr: float, topology: Topology, steps: int) -> Engine:
    """Make the engine of a configuration for ``model`` and a training of ``steps``. Collective.

    Raises the library's error if it refuses.
    """
    if configuration.powersgd_rank:
        return _PowerSgd(model, lr, topology, configuration.powersgd_rank, steps)
    if configuration.local_steps:
        return _DiLoCo(model, lr, topology, configuration.local_steps, configuration.outer_rate)
    if configuration.is_ddp:
        return _Ddp(model, lr, topology)
    return _Zero(model, lr, topology, configuration)


def _optimizers(model: nn.Module, lr: float, *, has_muon: bool) -> list[Optimizer]:
    if not has_muon:
        return [AdamW(model.parameters(), lr=lr, **ADAM)]
    # Query, key and value as one matrix, as other systems' Muon takes them.
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()} & {"query_key_value", "c_attn"}
    matrices, others, _ = split_for_muon(model, {f"{name}.weight": 1 for name in names})
    return [Muon(matrices, **MUON), AdamW(others, lr=lr, **ADAM)]


class _Schedule:
    """Sets the learning rate of every group to its first one times a factor."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._first = [group["lr"] for group in optimizer.param_groups]

    def set(self, factor: float) -> None:
        for group, first in zip(self._optimizer.param_groups, self._first, strict=True):
            group["lr"] = first * factor
