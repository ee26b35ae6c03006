"""The topology of a job: which ranks share a node, and the process groups of each hop.

world_size = num_nodes x ranks_per_node;  rank = node_rank * ranks_per_node + local_rank

shard numbering       "rank":   rank (n, l) owns shard n * L + l, as in torch
                      "local":  rank (n, l) owns shard l * N + n; a node's secondary shard is then contiguous
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zcomm._base import env
from zcomm._base.arguments import as_count, check_process_group
from zcomm._base.lazy import lazy
from zcomm._base.rank_context import PerRank, threads
from zcomm._kernels.message_flags import check_all_flags
from zcomm._transport import environment_check, groups
from zcomm._transport.backend import (
    ALONE,
    Hop,
    backend_of,
    gather_ints,
    ints_over,
    log_of,
    takes_host_tensors,
    timeout_of,
)
from zcomm._transport.backend_choice import (
    BackendName,
    BackendWish,
    KernelsName,
    agree_on_backend,
    check_names,
    resolved,
)
from zcomm._transport.collective_log import CollectiveLog
from zcomm._transport.deadlock_watch import DeadlockWatch, watch_of
from zcomm._transport.groups import Background, SharedGroup
from zcomm._transport.nccl_communicators import Communicators
from zcomm._transport.tagged_group import Group, TaggedGroup
from zcomm._transport.work import WorkQueue
from zcomm.errors import ConfigError, StateError, TopologyError

Numbering = Literal["rank", "local"]

_BY_KEY: PerRank[WeakValueDictionary[str, Topology]] = PerRank(WeakValueDictionary)
_NUMBERS = PerRank(itertools.count)
HOST = 2
"""The purpose of a shared group, besides a topology and its companion (0 and 1): host values of a job on NCCL."""
SHARES_GROUPS = True
"""False: each hop has a process group of its own also over gloo. For tests and measurements."""


class Topology:
    """Nodes x ranks per node, with the process groups of each hop.

    A Topology owns what its collectives use: process groups, communicators over NCCL, and the choice of kernels.

    Collective: every rank of ``group`` constructs it, in the same order relative to other topologies.

    Args:
        ranks_per_node: This many consecutive ranks of ``group`` form a node. One machine can stand in for several.
        group: The ranks; default: all of torch.distributed, or this process alone if that is not initialized.
        backend: "torch", torch's process groups; "nccl", this library's communicator over NCCL, for CUDA tensors (see
            docs/communication.md); "auto" is "torch" until "nccl" is measured to be faster. All give the same bits.
        kernels: What encodes and decodes messages: "native", "triton", "cuda", "reference", or "auto", which follows
            ``ZCOMM_KERNELS``. All give the same bits.

    Raises:
        TopologyError: ``ranks_per_node`` does not divide the number of ranks, or torch.distributed is not initialized
            although ``WORLD_SIZE`` is more than 1. Raised before any communication.
        ConfigError: On every rank: versions of zcomm-zero or torch, switches such as ZCOMM_CHECK, backends or kernels
            differ between ranks, or a name is unknown.
        BackendUnavailableError: On every rank: backend or kernels are unavailable on one. With reason and remedy.
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
            environment_check.compare(group, backend=str(backend), kernels=str(kernels))
        self._choose(backend, kernels)
        self._connect()

    def _choose(self, backend: BackendWish, kernels: KernelsName) -> None:
        check_names(backend, kernels)
        timeout = timeout_of(self._parent) if self.world_size > 1 else None
        agree_on_backend(backend, kernels, self.global_ranks, timeout)
        self.backend: BackendName = resolved(backend)
        """The backend of collectives over this, unless a call passes ``backend=``."""
        self.kernels: KernelsName = kernels
        """The kernels that encode and decode for them."""

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

    def _connect(self, purpose: int = 0) -> None:
        self._register()
        self._groups: list[dist.ProcessGroup] = []
        self._shared: list[SharedGroup] = []
        self._purpose = purpose
        self._is_local = self.world_size > 1 and dist.get_world_size() > self.world_size
        self._watch: DeadlockWatch | None = None
        if self.world_size == 1:
            self._make_hops()
            return
        if SHARES_GROUPS and groups.shortest(backend_of(self._parent)) == "gloo":
            self._make_hops(self._share(purpose))
        else:
            if self._is_local:
                groups.level_group_names(self._parent)
            self._make_hops()
            groups.wait_until_made(self._parent)
        self._watch = watch_of(self)

    def _share(self, purpose: int) -> Callable[[Sequence[int], str], TaggedGroup]:
        """Makes groups of some of these ranks, by name, over the shared group for ``purpose``. Collective."""
        shared, channel = groups.share_group(self, self._parent, purpose, is_local=self._is_local)
        self._shared.append(shared)
        return lambda ranks, name: TaggedGroup(shared.group, ranks, f"{channel}/{name}")

    @property
    def watch(self) -> DeadlockWatch:
        """The deadlock watch of this and all topologies of the same ranks. Only with several ranks."""
        assert self._watch is not None, "a rank alone waits for nobody"
        return self._watch

    def _register(self) -> None:
        self.queue = WorkQueue()
        self.turn = threads().RLock()
        """Lock for threads that call collectives over this: their order must be the same on every rank."""
        self._communicators = Communicators(self.global_ranks if self.world_size > 1 else ())
        self._free_communicators = weakref.finalize(self, self._communicators.clear)
        self.routes: dict[tuple[object, ...], object] = {}
        """Routes of earlier calls, by their arguments (:func:`zcomm._transport.route.find_route`)."""
        self.auto_table: object | None = None
        """The formats of ``format="auto"``, once :mod:`zcomm._collectives.auto_format` has agreed on them."""
        self.uses_world = False
        """Whether collectives may run in one hop over all ranks although there are several nodes."""
        self.key = f"topology-{next(_NUMBERS())}"
        """Its name in this process: compiled code cannot hold the object."""
        _BY_KEY()[self.key] = self

    @staticmethod
    def of_key(key: str) -> Topology:
        """The topology of this process with that ``key``.

        Raises:
            StateError: It has been collected.
        """
        topology = _BY_KEY().get(key)
        if topology is None:
            raise StateError(f"the Topology {key!r} of a compiled function is gone: keep it as long as the function")
        return topology

    def _make_hops(self, share: Callable[[Sequence[int], str], TaggedGroup] | None = None) -> None:
        per_node, nodes = self.ranks_per_node, range(self.num_nodes)
        everyone = list(range(self.world_size))
        self._alone = replace(ALONE, communicators=self._communicators)
        hop = partial(self._hop, share)
        self.world = hop("world", [everyone], per_node - 1, self.world_size - per_node)
        """All ranks in one hop."""
        if self.num_nodes == 1 or per_node == 1:
            self.intra, self.inter = (self.world, self._alone) if self.num_nodes == 1 else (self._alone, self.world)
            return
        self.intra = hop("intra", [everyone[n * per_node : (n + 1) * per_node] for n in nodes], per_node - 1, 0)
        """The ranks of this node."""
        self.inter = hop("inter", [everyone[local::per_node] for local in range(per_node)], 0, self.num_nodes - 1)
        """The ranks of equal local rank, one in each node."""

    def _hop(
        self,
        share: Callable[[Sequence[int], str], TaggedGroup] | None,
        kind: str,
        parts: list[list[int]],
        num_intra_peers: int,
        num_inter_peers: int,
    ) -> Hop:
        """The hop over the part that contains this rank."""
        if len(parts[0]) == 1:
            return self._alone
        index, ranks = next((index, ranks) for index, ranks in enumerate(parts) if self.rank in ranks)
        group: Group
        if share is not None:
            group, name = share(ranks, f"{kind}{index}"), "gloo"
        else:
            group = self._new_group(parts)
            name = backend_of(group)
        place = len(ranks), ranks.index(self.rank), num_intra_peers, num_inter_peers
        return Hop(group, *place, name, communicators=self._communicators)

    def _new_group(self, parts: list[list[int]]) -> dist.ProcessGroup:
        """A process group of the part that contains this rank.

        torch.distributed requires that every rank of the job makes every group, in the same order; otherwise ranks
        deadlock in the store. With ``_is_local`` only the members make it.
        """
        for ranks in parts:
            if self._is_local and self.rank not in ranks:
                continue
            global_ranks = [_global_rank(self._parent, rank) for rank in ranks]
            group = groups.new_group(global_ranks, self._parent, is_local=self._is_local)
            if group is not None:
                self._groups.append(group)
        return self._groups[-1]

    @classmethod
    def from_env(
        cls, group: dist.ProcessGroup | None = None, *, backend: BackendWish = "auto", kernels: KernelsName = "auto"
    ) -> Topology:
        """The nodes that torchrun started, with ``LOCAL_WORLD_SIZE`` ranks each; without torchrun one node.

        Raises:
            TopologyError: torch.distributed is not initialized although ``WORLD_SIZE`` is more than 1. Or, on every
                rank: nodes have different numbers of ranks.
            ConfigError: On every rank: ``LOCAL_WORLD_SIZE`` or ``GROUP_RANK`` is invalid on one.
        """
        check_process_group(group)
        _, rank = _size_and_rank(group)
        if not dist.is_initialized():
            return cls.single(backend=backend, kernels=kernels)
        wrong: ConfigError | None = None
        try:
            per_node = env.torchrun_variable("LOCAL_WORLD_SIZE", dist.get_world_size(), at_least=1)
            node = env.torchrun_variable("GROUP_RANK", _global_rank(group, rank) // per_node)
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
        """The nodes of a 2-D DeviceMesh [nodes, ranks per node] with all ranks in ascending order.

        Raises:
            TopologyError: ``mesh`` is not such a mesh.
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
        """A topology of this process alone, without torch.distributed."""
        topology = object.__new__(cls)
        topology._parent = None
        topology.world_size = topology.num_nodes = topology.ranks_per_node = 1
        topology.rank = topology.node_rank = topology.local_rank = 0
        topology._choose(backend, kernels)
        topology._connect()
        return topology

    def clone(self) -> Topology:
        """A topology of the same nodes, backend and kernels, whose collectives are ordered independently of this one's.

        Over gloo its exchanges have tags of their own, over NCCL process groups and communicators. Collective.
        """
        if self.world_size == 1:
            return Topology.single(backend=self.backend, kernels=self.kernels)
        self._barrier()
        clone = object.__new__(Topology)  # without __init__: the ranks have already been compared
        clone.backend, clone.kernels = self.backend, self.kernels
        clone._place(self.ranks_per_node, self._parent)
        clone._connect(1 - self._purpose)
        return clone

    @lazy
    def companion(self) -> Topology:
        """A :meth:`clone`: the same ranks, and exchanges that never match those of this one.

        Made at the first use, which is collective. Closed with this one.
        """
        return self.clone()

    @lazy
    def background(self) -> Background:
        """A background thread with a gloo group of these ranks, made at the first use, which is collective. Closed with
        this one."""
        if self.world_size == 1:
            return Background(None)
        self._barrier()
        background = Background(self._new_gloo_group())
        background.hop.log.departed = self.world.log.departed
        return background

    @lazy
    def on_host(self) -> Hop:
        """One hop over all ranks for tensors in host memory: :attr:`world`, or a gloo group if that is on NCCL.

        Over NCCL an exchange of host values would wait for the devices. Made at the first use, which is collective.
        """
        if not self.is_on_nccl:
            return self.world
        group = self._share(HOST)(range(self.world_size), "host")
        hop = replace(self.world, group=group, backend="gloo", log=CollectiveLog())
        hop.log.departed = self.world.log.departed
        return hop

    def keep_order(self) -> None:
        """Wait for queued collectives if they use the same group, so that its exchanges start in program order.

        Otherwise the thread and the caller would start exchanges in a different order on each rank: a deadlock.

        Raises:
            StateError: This topology is closed.
        """
        self.queue.check_open()
        if not self.has_two_hops or self.uses_world:
            self.queue.drain()

    def _barrier(self) -> None:
        """Wait until every rank is in the same public call. Precedes the creation of late groups.

        torch.distributed creates groups through its store, where the deadlock watch does not see a waiting rank: a rank
        that is there alone would wait until the timeout.

        Raises:
            DivergedError: On every rank: the ranks are in different calls.
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
        """The index of the shard that this rank owns."""
        return self.rank if numbering == "rank" else self.local_rank * self.num_nodes + self.node_rank

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The process group of the ranks that was given, or all of torch.distributed; None: a single process."""
        return None if self.world_size == 1 else self._parent or dist.group.WORLD

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """The global ranks of torch.distributed, in order."""
        return tuple(_global_rank(self._parent, rank) for rank in range(self.world_size))

    @property
    def meets_by_tag(self) -> bool:
        """Whether exchanges are matched by tag, so that different calls never mix: over gloo with backend "torch"."""
        return self.backend == "torch" and takes_host_tensors(self.world.backend)

    @property
    def is_on_nccl(self) -> bool:
        """Whether the process groups take no host tensors, so that host values have a group of their own."""
        return self.world.group is not None and not takes_host_tensors(self.world.backend)

    @property
    def has_two_hops(self) -> bool:
        """Whether there are several nodes with several ranks each."""
        return self.num_nodes > 1 and self.ranks_per_node > 1

    def close(self) -> None:
        """Finish queued collectives, and free the communicators over NCCL and the process groups.

        Raises:
            MessageError: On a GPU a message had another layout than this rank expected.
        """
        if "companion" in self.__dict__:
            self.__dict__.pop("companion").close()
        if "background" in self.__dict__:
            background: Background = self.__dict__.pop("background")
            background.close()
            if background.group is not None:
                self._groups.append(background.group)
                background.group, background.hop = None, ALONE
        # In this order: queued collectives still use the groups, and the watch publishes the departure under the name
        # of the group, which a closed hop no longer has.
        self.queue.close()
        self.routes.clear()  # they hold process groups
        if self._watch is not None:
            watch, self._watch = self._watch, None
            watch.remove(self, [shared.group for shared in self._shared if set(shared.users) == {self}])
        self._free_communicators()
        for hop in (self.world, self.intra, self.inter, self.__dict__.get("on_host", ALONE)):
            groups.close_hop(hop)
        while self._groups:
            group = self._groups.pop()
            groups.destroy_group(group, is_local=self._is_local)
        while self._shared:
            groups.release_group(self, self._shared.pop(), is_local=self._is_local)
        check_all_flags(is_last=True)

    def __repr__(self) -> str:
        return f"Topology(nodes={self.num_nodes}, ranks_per_node={self.ranks_per_node}, rank={self.rank})"


def _size_and_rank(group: dist.ProcessGroup | None) -> tuple[int, int]:
    if not dist.is_initialized():
        if env.torchrun_variable("WORLD_SIZE", 1) > 1:
            raise TopologyError(
                f"torch.distributed is not initialized: WORLD_SIZE={os.environ['WORLD_SIZE']}; call "
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
    """Ranks per node, given the node of each rank."""
    per_node = nodes.count(nodes[0])
    expected = [node for start in range(0, len(nodes), per_node) for node in [nodes[start]] * per_node]
    if nodes != expected or len(set(nodes)) * per_node != len(nodes):
        raise TopologyError(
            f"every node must have the same number of consecutive ranks: nodes of the ranks={nodes}; start the same "
            "number of processes on every machine, or pass ranks_per_node= or a group"
        )
    return per_node


_HOPS: dict[int, tuple[weakref.ref[Any], tuple[int, int, int, int, str, CollectiveLog]]] = {}
"""By id of a group: the group, and the other arguments of its Hop. Nothing here keeps it alive."""


def hop_of_group(group: dist.ProcessGroup | None) -> Hop:
    """One hop over all ranks of ``group``.

    ``LOCAL_WORLD_SIZE``, as it is at the group's first exchange, tells which of them share this rank's node.
    """
    world = dist.distributed_c10d._world
    process_group = world.default_pg if group is None else group
    if process_group in world.pg_map:  # not initialized, or destroyed: the checks below
        known = _HOPS.get(id(process_group))
        if known is not None and known[0]() is process_group:
            return Hop(process_group, *known[1])
    size, rank = _size_and_rank(group)
    if size == 1:
        return ALONE
    per_node = env.torchrun_variable("LOCAL_WORLD_SIZE", dist.get_world_size(), at_least=1)
    node = dist.get_rank() // per_node
    of_node = range(node * per_node, min((node + 1) * per_node, dist.get_world_size()))
    intra = sum(groups.is_member(group, rank) for rank in of_node) - 1
    assert process_group is not None, "torch.distributed is initialized"
    facts = size, rank, intra, size - 1 - intra, backend_of(group), log_of(process_group)
    key = id(process_group)
    _HOPS[key] = weakref.ref(process_group, lambda _: _HOPS.pop(key, None)), facts
    return Hop(process_group, *facts)
