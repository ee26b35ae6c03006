"""Which ranks share a node: one value from which every process group comes.

world_size = num_nodes x ranks_per_node;  rank = node_rank * ranks_per_node + local_rank

numbering of shards   "rank":   rank (n, l) owns shard n * L + l, as in torch
                      "local":  rank (n, l) owns shard l * N + n; a node's secondary shard is then contiguous
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from dataclasses import replace
from functools import cached_property
from typing import Literal
from weakref import WeakValueDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zcomm._base import env
from zcomm._base.arguments import as_count, check_process_group
from zcomm._kernels.message_flags import look_at_all
from zcomm._transport import fingerprint, groups
from zcomm._transport.backend import (
    ALONE,
    Hop,
    backend_of,
    gather_ints,
    ints_over,
    ledger_of,
    takes_host_tensors,
    timeout_of,
)
from zcomm._transport.backend_choice import (
    BackendName,
    BackendWish,
    KernelsName,
    agree_on_carrier,
    check_names,
    resolved,
)
from zcomm._transport.background import Background
from zcomm._transport.collective_log import CollectiveLog
from zcomm._transport.deadlock_watch import DeadlockWatch, watch_of
from zcomm._transport.nccl_communicators import Communicators
from zcomm._transport.work import WorkQueue
from zcomm.errors import ConfigError, StateError, TopologyError

Numbering = Literal["rank", "local"]

_BY_KEY: WeakValueDictionary[str, Topology] = WeakValueDictionary()
_NUMBERS = itertools.count()


class Topology:
    """Nodes x ranks per node, and the process groups between them.

    It owns what collectives over it go through: its process groups, or communicators over NCCL, and the kernels.

    Args:
        ranks_per_node: So many consecutive ranks of ``group`` form a node; one machine can stand in for several.
        group: The ranks; default: all of torch.distributed, or this process alone if that is not initialised.
        backend: "torch", torch's process groups; "nccl", this package's communicator over NCCL, for CUDA tensors (see
            docs/communication.md); "auto" is "torch" until "nccl" is measured to be faster. The same bits.
        kernels: What encodes and decodes messages: "native", "triton", "cuda", "reference", or "auto": what
            ``ZCOMM_KERNELS`` says. The same bits.

    Raises:
        TopologyError: ``ranks_per_node`` does not divide the number of ranks; or torch.distributed is not initialised
            although ``WORLD_SIZE`` is more than 1. Raised before any communication.
        ConfigError: On every rank: one runs another zcomm-zero or torch, or alone has ZCOMM_CHECK=1 or the like, or
            another backend or kernels; or there are none of that name.
        BackendUnavailableError: On every rank: one cannot have the backend or the kernels. With reason and remedy.

    Collective: every rank of ``group`` constructs it, in the same order relative to other topologies.
    """

    def __init__(
        self,
        *,
        ranks_per_node: int,
        group: dist.ProcessGroup | None = None,
        backend: BackendWish = "auto",
        kernels: KernelsName = "auto",
    ) -> None:
        self._place(ranks_per_node, group)
        if self.world_size > 1:
            fingerprint.compare(group, backend=str(backend), kernels=str(kernels))
        self._choose(backend, kernels)
        self._connect()

    def _choose(self, backend: BackendWish, kernels: KernelsName) -> None:
        check_names(backend, kernels)
        timeout = timeout_of(self._parent) if self.world_size > 1 else None
        agree_on_carrier(backend, kernels, self.global_ranks, timeout)
        self.backend: BackendName = resolved(backend)
        """What carries the collectives over this, unless a call's ``backend=`` says otherwise."""
        self.kernels: KernelsName = kernels
        """What encodes and decodes for them."""

    def _place(self, ranks_per_node: int, group: dist.ProcessGroup | None) -> None:
        check_process_group(group)
        self._parent = group
        self.world_size, self.rank = _size_and_rank(group)
        ranks_per_node = as_count("ranks_per_node", ranks_per_node, at_least=1, error=TopologyError)
        if self.world_size % ranks_per_node:
            raise TopologyError(
                "the world size must be a multiple of ranks_per_node: "
                f"world_size={self.world_size}, ranks_per_node={ranks_per_node}"
            )
        self.ranks_per_node = ranks_per_node
        self.num_nodes = self.world_size // ranks_per_node
        self.node_rank, self.local_rank = divmod(self.rank, ranks_per_node)

    def _connect(self) -> None:
        self._register()
        self._groups: list[dist.ProcessGroup] = []
        self._is_local = self.world_size > 1 and dist.get_world_size() > self.world_size
        if self._is_local:
            groups.level_group_names(self._parent)
        self._make_hops()
        self._watch: DeadlockWatch | None = None
        if self.world_size > 1:
            groups.wait_until_made(self._parent)
            self._watch = watch_of(self)

    @property
    def watch(self) -> DeadlockWatch:
        """Finds out ranks that wait for one another over this and all topologies of its ranks; not of one rank."""
        assert self._watch is not None, "a rank alone waits for nobody"
        return self._watch

    def _register(self) -> None:
        self.queue = WorkQueue()
        self.turn = threading.RLock()
        """For threads whose calls over this must not mix."""
        self._communicators = Communicators(self.global_ranks if self.world_size > 1 else ())
        self._free_communicators = weakref.finalize(self, self._communicators.clear)
        self.auto_table: object | None = None
        """What ``format="auto"`` means here, once :mod:`zcomm._collectives.auto_format` has agreed on it."""
        self.uses_world = False
        """Whether collectives may run over all ranks at once although there are nodes."""
        self.key = f"topology-{next(_NUMBERS)}"
        """Names it in this process; compiled code carries names instead of objects."""
        _BY_KEY[self.key] = self

    @staticmethod
    def of_key(key: str) -> Topology:
        """The topology of this process whose ``key`` that is; StateError if it is gone."""
        topology = _BY_KEY.get(key)
        if topology is None:
            raise StateError(f"the Topology {key!r} of a compiled function is gone: keep it as long as the function")
        return topology

    def _make_hops(self) -> None:
        per_node, nodes = self.ranks_per_node, range(self.num_nodes)
        everyone = list(range(self.world_size))
        self._alone = replace(ALONE, communicators=self._communicators)
        self.world = self._hop([everyone], per_node - 1, self.world_size - per_node)
        """All ranks."""
        if self.num_nodes == 1 or per_node == 1:
            self.intra, self.inter = (self.world, self._alone) if self.num_nodes == 1 else (self._alone, self.world)
            return
        self.intra = self._hop([everyone[n * per_node : (n + 1) * per_node] for n in nodes], per_node - 1, 0)
        """The ranks of this node."""
        self.inter = self._hop([everyone[local::per_node] for local in range(per_node)], 0, self.num_nodes - 1)
        """The ranks of equal local rank, one a node."""

    def _hop(self, parts: list[list[int]], num_intra_peers: int, num_inter_peers: int) -> Hop:
        """The part that holds this rank. Every rank of the job makes every group, in the same order."""
        hop = self._alone
        if len(parts[0]) == 1:
            return hop
        for ranks in parts:
            if self._is_local and self.rank not in ranks:
                continue
            global_ranks = [_global_rank(self._parent, rank) for rank in ranks]
            group = groups.new_group(global_ranks, self._parent, is_local=self._is_local)
            if group is not None:
                self._groups.append(group)
                name = backend_of(group)
                place = len(ranks), ranks.index(self.rank), num_intra_peers, num_inter_peers
                hop = Hop(group, *place, name, communicators=self._communicators)
        return hop

    @classmethod
    def from_env(
        cls, group: dist.ProcessGroup | None = None, *, backend: BackendWish = "auto", kernels: KernelsName = "auto"
    ) -> Topology:
        """Nodes as torchrun made them (``LOCAL_WORLD_SIZE`` ranks each); without torchrun, one node.

        Raises:
            TopologyError: torch.distributed is not initialised although ``WORLD_SIZE`` is more than 1; or, on every
                rank, nodes with different numbers of ranks.
            ConfigError: On every rank: ``LOCAL_WORLD_SIZE`` or ``GROUP_RANK`` of one is not what torchrun sets.
        """
        check_process_group(group)
        _, rank = _size_and_rank(group)
        if not dist.is_initialized():
            return cls.single(backend=backend, kernels=kernels)
        wrong: ConfigError | None = None
        try:
            per_node = env.of_torchrun("LOCAL_WORLD_SIZE", dist.get_world_size(), at_least=1)
            node = env.of_torchrun("GROUP_RANK", _global_rank(group, rank) // per_node)
        except ConfigError as error:
            wrong, node = error, -1
        nodes = gather_ints(node, group)
        if -1 in nodes:
            ranks = [rank for rank, node in enumerate(nodes) if node == -1]
            raise ConfigError(
                f"LOCAL_WORLD_SIZE and GROUP_RANK must be integers, as torchrun sets them: wrong on ranks {ranks}"
            ) from wrong
        return cls(ranks_per_node=_equal_runs(nodes), group=group, backend=backend, kernels=kernels)

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh, *, backend: BackendWish = "auto", kernels: KernelsName = "auto") -> Topology:
        """Nodes and ranks of a 2-D DeviceMesh [nodes, ranks per node] whose ranks ascend.

        Raises:
            TopologyError: The mesh is none, is not 2-D, or its ranks are not all ranks of torch.distributed in order.
        """
        if not isinstance(mesh, DeviceMesh):
            raise TopologyError(f"mesh must be a DeviceMesh [nodes, ranks per node]: got {type(mesh).__name__}")
        ranks = mesh.mesh
        if ranks.ndim != 2:
            raise TopologyError(f"the mesh must be 2-D [nodes, ranks per node]: shape={tuple(ranks.shape)}")
        if ranks.flatten().tolist() != list(range(dist.get_world_size())):
            raise TopologyError(
                f"the mesh must hold all ranks in ascending order: {ranks.tolist()}, world_size={dist.get_world_size()}"
            )
        return cls(ranks_per_node=ranks.shape[1], backend=backend, kernels=kernels)

    @classmethod
    def single(cls, *, backend: BackendWish = "auto", kernels: KernelsName = "auto") -> Topology:
        """A world of this process alone; it needs no torch.distributed."""
        topology = object.__new__(cls)
        topology._parent, topology._groups = None, []
        topology.world_size = topology.num_nodes = topology.ranks_per_node = 1
        topology.rank = topology.node_rank = topology.local_rank = 0
        topology._choose(backend, kernels)
        topology._register()
        topology._is_local, topology._watch = False, None
        topology._make_hops()
        return topology

    def clone(self) -> Topology:
        """The same nodes, backend and kernels; process groups, communicators, and so an order of collectives, of its
        own. Collective."""
        if self.world_size == 1:
            return Topology.single(backend=self.backend, kernels=self.kernels)
        self._meet()
        clone = object.__new__(Topology)  # its ranks have been compared
        clone.backend, clone.kernels = self.backend, self.kernels
        clone._place(self.ranks_per_node, self._parent)
        clone._connect()
        return clone

    @cached_property
    def companion(self) -> Topology:
        """A :meth:`clone`, made at the first use, which is collective, and closed with this one."""
        return self.clone()

    @cached_property
    def background(self) -> Background:
        """A thread with a gloo group of these ranks, made at the first use, which is collective; closed with this."""
        if self.world_size == 1:
            return Background(None)
        self._meet()
        return Background(self._new_gloo_group())

    @cached_property
    def on_host(self) -> Hop:
        """All ranks, for tensors in host memory: :attr:`world`, or gloo beside it where that takes none (NCCL).

        Over NCCL an exchange between hosts would wait for the devices. Made at the first use, which is collective.
        """
        if self.world.group is None or takes_host_tensors(self.world.backend):
            return self.world
        group = self._new_gloo_group()
        self._groups.append(group)
        hop = replace(self.world, group=group, backend="gloo", ledger=CollectiveLog())
        hop.ledger.lost = self.world.ledger.lost
        return hop

    def keep_order(self) -> None:
        """Let what is queued finish first if it runs over the same group: exchanges of a group start in program order.

        Raises:
            StateError: This is closed.
        """
        self.queue.check_open()
        if not self.has_two_hops or self.uses_world:
            self.queue.drain()

    def _meet(self) -> None:
        """Return once every rank is here, in the same public call.

        Comes before groups that are made late. torch.distributed makes them in its store, where the watch sees nobody:
        a rank that is there alone would wait until the timeout.

        Raises:
            DivergedError: The ranks are in different calls; on every rank.
        """
        self.keep_order()
        ints_over(0, self.on_host)

    def _new_gloo_group(self) -> dist.ProcessGroup:
        if self._is_local:
            groups.level_group_names(self._parent)
        group = groups.new_group(list(self.global_ranks), self._parent, is_local=self._is_local, backend="gloo")
        assert group is not None, "a rank outside its own topology"
        groups.wait_until_made(self._parent)
        return group

    def shard_index(self, numbering: Numbering) -> int:
        """The shard that this rank owns."""
        return self.rank if numbering == "rank" else self.local_rank * self.num_nodes + self.node_rank

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """The ranks of torch.distributed, in order."""
        return tuple(_global_rank(self._parent, rank) for rank in range(self.world_size))

    @property
    def meets_by_tag(self) -> bool:
        """Whether exchanges of different calls never meet: over gloo, by torch's groups."""
        return self.backend == "torch" and takes_host_tensors(self.world.backend)

    @property
    def has_two_hops(self) -> bool:
        """Whether there are several nodes of several ranks."""
        return self.num_nodes > 1 and self.ranks_per_node > 1

    def close(self) -> None:
        """Finish what is queued, and free the communicators over NCCL and the process groups.

        Raises:
            MessageError: On a GPU a message was of another layout than this rank expected.
        """
        if "companion" in self.__dict__:
            self.__dict__.pop("companion").close()
        if "background" in self.__dict__:
            background: Background = self.__dict__.pop("background")
            background.close()
            if background.group is not None:
                self._groups.append(background.group)
                background.group = None
        self.queue.close()
        if self._watch is not None:
            self._watch.remove(self)
            self._watch = None
        self._free_communicators()
        for hop in (self.world, self.intra, self.inter, self.__dict__.get("on_host", ALONE)):
            groups.close_hop(hop)
        while self._groups:
            group = self._groups.pop()
            groups.destroy_group(group, is_local=self._is_local)
        look_at_all(is_last=True)

    def __repr__(self) -> str:
        return f"Topology(nodes={self.num_nodes}, ranks_per_node={self.ranks_per_node}, rank={self.rank})"


def _size_and_rank(group: dist.ProcessGroup | None) -> tuple[int, int]:
    if not dist.is_initialized():
        if env.of_torchrun("WORLD_SIZE", 1) > 1:
            raise TopologyError(
                f"torch.distributed is not initialised: WORLD_SIZE={os.environ['WORLD_SIZE']}; call "
                "torch.distributed.init_process_group() first, or use Topology.single()"
            )
        return 1, 0
    rank = dist.get_rank(group)
    if rank < 0:
        raise TopologyError(f"this process, global rank {dist.get_rank()}, is not in the group")
    return dist.get_world_size(group), rank


def _global_rank(group: dist.ProcessGroup | None, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)


def _equal_runs(nodes: list[int]) -> int:
    """Ranks per node, from the node of each rank."""
    per_node = nodes.count(nodes[0])
    expected = [node for start in range(0, len(nodes), per_node) for node in [nodes[start]] * per_node]
    if nodes != expected or len(set(nodes)) * per_node != len(nodes):
        raise TopologyError(
            f"every node must have the same number of consecutive ranks: node of each rank {nodes}; start as many "
            "processes on every machine, or pass ranks_per_node= or a group"
        )
    return per_node


def hop_of_group(group: dist.ProcessGroup | None) -> Hop:
    """One hop over all ranks of ``group``; who shares this rank's node is taken from ``LOCAL_WORLD_SIZE``."""
    size, rank = _size_and_rank(group)
    if size == 1:
        return ALONE
    per_node = env.of_torchrun("LOCAL_WORLD_SIZE", dist.get_world_size(), at_least=1)
    node = dist.get_rank() // per_node
    of_node = range(node * per_node, min((node + 1) * per_node, dist.get_world_size()))
    intra = sum(groups.is_member(group, rank) for rank in of_node) - 1
    whole = group if group is not None else dist.group.WORLD
    assert whole is not None, "torch.distributed is initialised"
    return Hop(whole, size, rank, intra, size - 1 - intra, backend_of(group), ledger_of(whole))
