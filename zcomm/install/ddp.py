"""``zcomm.install_ddp``: quantized, two-hop gradient all-reduce as a communication hook of DistributedDataParallel.

    bucket ready --> pieces of one format --> reduce-scatter, mean in float32 --> all-gather --> bucket
                     (small parameters and overrides are pieces of their own)

The exchange overlaps backward: on a CPU in the thread of the Topology, on CUDA on a side stream. Each rank decodes its
own shard from its own message, too. So all ranks hold the same bits, as the copies of a model must.

DDP accepts one communication hook and has no call to remove it. So the hook stays, and its state says what it does:
with an installation the quantized exchange, without one what DDP does by itself, an all-reduce of bucket / world size.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from zcomm import volume
from zcomm._collectives.all_reduce import FIRST_GATHER_HOP, all_reduce_steps
from zcomm._collectives.encoder import Encoder
from zcomm._formats.formats import codec_for
from zcomm._formats.philox import RandomKey
from zcomm._formats.recipes import AUTO_RECIPE, DEFAULT_RECIPE, Recipe, Wires, get_recipe
from zcomm._residuals.grad_scaler import ScalerSetting, scaler_kind
from zcomm._transport.backend import sum_
from zcomm._transport.backend_choice import BackendWish, KernelsName
from zcomm._transport.route import check_backend, find_route
from zcomm._transport.topology import Topology
from zcomm._transport.work import SideStreams, Steps, run_then
from zcomm.errors import ConfigError, LayoutError, StateError, TopologyError
from zcomm.install.agreement import agree, settings_of
from zcomm.install.choices import (
    FormatChoice,
    NamedParameter,
    Overrides,
    choose_formats,
    clean_name,
    closed_on_error,
    for_all_reduce,
)
from zcomm.install.ddp_hook import exchange_gradients, new_future, value_or_raise
from zcomm.install.pieces import FormatPiece, PieceExchange, split_by_format
from zcomm.install.report import Installation, InstallationRecord, title_of, topology_text

OPERATION = "all_reduce"
Future = torch.futures.Future[Tensor]


def install_ddp(
    model: nn.Module,
    recipe: str | Recipe = DEFAULT_RECIPE,
    *,
    overrides: Overrides | None = None,
    topology: Topology | None = None,
    shadow: bool = False,
    backend: BackendWish = "auto",
    kernels: KernelsName = "auto",
    scaler: ScalerSetting = "auto",
) -> Installation:
    """Make a DistributedDataParallel model exchange its gradients in ``recipe``'s formats, over two hops.

    Buckets, ``no_sync()``, ``join()``, ``gradient_as_bucket_view``, ``static_graph`` and ``find_unused_parameters``
    work as before. All ranks hold the same gradients, bit for bit, and every run gives the same ones.

    Args:
        model: wrapped in DistributedDataParallel; gradients float32, bfloat16, float16 or float64.
        recipe: a name in :data:`zcomm.RECIPES`, or a :class:`zcomm.Recipe`: ``gradients`` is the format of the
            reduce-scatter (inside the node, between nodes), ``reduced`` that of the all-gather. ``"auto"``: the formats
            that ``zcomm probe`` found fastest for the largest bucket. The same on every rank.
        overrides: other formats (or recipes) for modules by name, such as ``{"lm_head": "bf16"}``; the longest prefix
            of a parameter's name wins, ``"none"`` sends it uncompressed.
        topology: nodes and ranks of DDP's process group; default: as torchrun started them.
        shadow: train as if nothing were installed, bit for bit, but also run the compressed exchange on a copy, and
            report its bytes and its error. Costs time.
        backend: as in :class:`zcomm.Topology`; "auto": that of ``topology``, if it is given.
        kernels: as ``backend``.
        scaler: what scales the loss; residuals are stored without the scale. "auto": the ``torch.amp.GradScaler`` in
            use, if there is one; None: losses are not scaled; any other scaler: an object with ``get_scale()``.

    Returns: An Installation, with ``report()`` and ``uninstall()``.

    Raises:
        ConfigError, FormatError: A recipe, format or module name does not exist (the nearest is given), or settings
            differ between ranks (all are named).
        LayoutError: A parameter is not supported; its name is given.
        BackendUnavailableError: The backend or the kernels are not available, or do not support the gradients' device.
        StateError: The model already has a communication hook.
        TopologyError: ``topology`` does not consist of DDP's ranks.

    Collective: the ranks compare their settings first. If one rank cannot install, all raise its error, with its rank,
    and nothing is installed. Cost of a step for each rank: that of :func:`zcomm.all_reduce` for each bucket. A bucket
    that holds small or overridden parameters takes one all-reduce more, and one copy each way.
    """
    owned = topology is None
    checked = partial(_checked, model, recipe, overrides or {}, topology, (backend, kernels))
    others = {"shadow": shadow, "backend": backend, "kernels": kernels, "scaler": scaler_kind(scaler)}
    given = settings_of(recipe, overrides, topology, **others)
    ddp, recipe, choices = agree("install_ddp", given, _groups(model, topology), checked)
    state, topology = _state_of(ddp), topology or _topology_of(ddp.process_group, backend, kernels)
    if recipe is AUTO_RECIPE:
        with closed_on_error(topology if owned else None):
            recipe = for_all_reduce(topology, *_largest_bucket(ddp))
            choices = _choices(ddp, recipe, overrides or {})
    record = InstallationRecord((choice.name for choice in choices.values()), recipe, scaler)
    state.compressed = _Compressed(topology, choices, record, is_shadow=shadow)
    title = title_of("install_ddp", recipe, topology_text(topology), shadow=shadow)
    return Installation(title, record, partial(_uninstall, state, topology if owned else None))


def _topology_of(group: dist.ProcessGroup, backend: BackendWish, kernels: KernelsName) -> Topology:
    """The topology of ``group`` as torchrun has started its ranks."""
    has_all_ranks = dist.get_world_size(group) == dist.get_world_size()
    return Topology.from_env(None if has_all_ranks else group, backend=backend, kernels=kernels)


def _groups(model: nn.Module, topology: Topology | None) -> list[dist.ProcessGroup]:
    """The groups whose ranks must agree: DDP's, or that of the topology if ``model`` is not a DDP model."""
    if isinstance(model, DistributedDataParallel):
        return [model.process_group]
    return [topology.process_group] if topology is not None and topology.process_group is not None else []


def _checked(
    model: nn.Module,
    recipe: str | Recipe,
    overrides: Overrides,
    topology: Topology | None,
    backend_and_kernels: tuple[BackendWish, KernelsName],
) -> tuple[DistributedDataParallel, Recipe, dict[int, FormatChoice]]:
    """Look the arguments up; raise if this rank cannot install. No communication: other ranks may not get here."""
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(f"model must be a DistributedDataParallel: got {type(model).__name__}; wrap it first")
    recipe = get_recipe(recipe)
    choices = _choices(model, recipe, overrides)
    _check_hooks(model)
    for device in dict.fromkeys(parameter.device for parameter in model.parameters()):
        check_backend("install_ddp", topology, *backend_and_kernels, device)
    group = model.process_group
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if topology is not None and (topology.world_size, topology.rank) != (size, rank):
        raise TopologyError(
            f"the topology must be over the ranks of DDP's process group: {topology}, group of {size}, rank {rank}"
        )
    return model, recipe, choices


def _largest_bucket(ddp: DistributedDataParallel) -> tuple[int, torch.device]:
    """The bytes of the largest bucket, and its device."""
    trained = [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
    return min(sum(parameter.nbytes for parameter in trained), int(ddp.bucket_bytes_cap)), trained[0].device


def _uninstall(state: _State, topology: Topology | None) -> None:
    state.compressed = None
    if topology is not None:
        topology.close()


def _choices(ddp: DistributedDataParallel, recipe: Recipe, overrides: Overrides) -> dict[int, FormatChoice]:
    """Each parameter's formats, by its id; LayoutError for parameters that are not supported."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in ddp.module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(clean_name(name))
    for module_name, module in ddp.module.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise LayoutError(f"module {clean_name(module_name)!r} has sparse gradients: use sparse=False")
    named = [NamedParameter(tuple(of_parameter), parameter.numel()) for parameter, of_parameter in names.items()]
    chosen = dict(zip(names, choose_formats(named, recipe, overrides), strict=True))
    for parameter, choice in chosen.items():
        if not parameter.requires_grad:  # never exchanged, so it may have any dtype, as quantized weights under LoRA
            continue
        if not parameter.is_floating_point():
            raise LayoutError(f"parameter {choice.name!r} must be real floating point: dtype={parameter.dtype}")
        for wire in (*choice.wires.gradients, choice.wires.reduced):
            codec_for(wire, parameter.dtype)
    return {id(parameter): choice for parameter, choice in chosen.items()}


def _check_hooks(ddp: DistributedDataParallel) -> None:
    """Raise StateError for a communication hook that is not ours, or is in use."""
    for hook, state in ddp._comm_hooks:
        if not isinstance(state, _State):
            raise StateError(
                f"the model already has a communication hook, {hook.__qualname__}: DDP takes only one; leave it out "
                "to use install_ddp"
            )
        if state.compressed is not None:
            raise StateError("the model already has an installation: uninstall() that first")
    if not ddp._comm_hooks and ddp.mixed_precision is not None:
        raise StateError("DDP's mixed_precision has a communication hook of its own: use torch.autocast instead")


def _state_of(ddp: DistributedDataParallel) -> _State:
    """The state of this library's hook, which is registered first if the model has none."""
    for _, state in ddp._comm_hooks:
        assert isinstance(state, _State), "_check_hooks() has refused other hooks"
        return state
    state = _State(ddp)
    ddp.register_comm_hook(state, exchange_gradients)
    keep_group(ddp)
    return state


def keep_group(ddp: DistributedDataParallel) -> None:
    """Let the process group of ``ddp`` live longer than its reducer.

    A reducer that is the group's last owner destroys it with the GIL held, and joins gloo's threads. One of them may
    wait for the GIL, to drop the last tensor that it has sent: a deadlock. If Python is the last owner, the GIL is
    released first (torch 2.13).
    """
    weakref.finalize(ddp.reducer, id, ddp.process_group).atexit = False


class _State:
    """The hook's state, which DDP keeps as long as the model lives."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        # Weak: the reducer holds this state in C++, where the garbage collector finds no cycles. A strong reference
        # would keep the model and its buckets in memory until the process ends.
        self._ddp = weakref.ref(ddp)
        self.compressed: _Compressed | None = None

    def start(self, bucket: GradBucket) -> Future:
        """Start to average ``bucket``."""
        ddp: Any = self._ddp()
        if ddp._join_config.enable and not getattr(ddp, "_divide_by_initial_world_size", True):
            raise StateError(
                "join() with divide_by_initial_world_size=False is not supported: DDP does not tell a hook how many "
                "ranks are left; use the default, which divides by the initial world size"
            )
        if self.compressed is None:
            return _plain_mean(ddp, bucket)
        if self.compressed.is_shadow:
            return self.compressed.shadow(bucket, partial(_plain_mean, ddp))
        return self.compressed.start(bucket)


def _plain_mean(ddp: Any, bucket: GradBucket) -> Future:
    """Average as DDP does without a hook: multiply by 1 / world_size while copying into the bucket, then all-reduce.

    DDP divides gradients that are already in the bucket (``gradient_as_bucket_view``, kept over steps). The bits are
    the same if the world size is a power of 2.
    """
    group = ddp.process_group
    return sum_(bucket.buffer().mul_(1.0 / dist.get_world_size(group)), group)


class _Compressed:
    """The compressed exchange of an installation: the pieces of each bucket, sent one after another."""

    def __init__(
        self, topology: Topology, choices: dict[int, FormatChoice], record: InstallationRecord, *, is_shadow: bool
    ) -> None:
        self._topology, self._choices, self._record, self.is_shadow = topology, choices, record, is_shadow
        self._exchanges: dict[tuple[int, ...], list[PieceExchange]] = {}
        """By a bucket's parameters, and not by its index: DDP rebuilds buckets after the first step."""
        self._side = SideStreams()

    def start(self, bucket: GradBucket) -> Future:
        """Start to average ``bucket`` in place."""
        buffer = bucket.buffer()
        # On CUDA on a side stream, so that encoding and sending overlap the rest of backward. It waits for the current
        # stream first, which is still writing the gradients, and the buffer is recorded on it, or the allocator could
        # hand its memory out before the exchange has read it.
        with self._side.after_current(buffer.device, [buffer]) if buffer.is_cuda else nullcontext():
            return self._start(buffer, self._exchanges_of(bucket))

    def _start(self, buffer: Tensor, exchanges: list[PieceExchange]) -> Future:
        ended = new_future(buffer.device)
        for one in exchanges:
            one.start(self._record.scaling)
        # Drawn here, in the order in which DDP hands out its buckets, which is equal on all ranks. The thread of the
        # Topology may take its exchanges up in between.
        keys = [self._record.carried.next_random_key(*one.wires.gradients, one.wires.reduced) for one in exchanges]

        def end(error: BaseException | None) -> None:
            # Called in the thread of the Topology. If its error did not become the future's result, backward would hang
            # in this future: test_an_error_of_an_exchange_is_raised_by_backward.
            ended.set_result(buffer if error is None else error)

        run_then(self._steps(buffer, exchanges, keys), end, device=buffer.device, queue=self._topology.queue)
        return ended.then(value_or_raise)

    def _steps(self, buffer: Tensor, exchanges: list[PieceExchange], keys: list[RandomKey | None]) -> Steps:
        rows = buffer.view(1, -1)
        for one, key in zip(exchanges, keys, strict=True):
            values, wires = one.piece.take(rows), one.wires
            reducing = find_route(OPERATION, self._topology, wires.gradients, first="intra")
            gathering = find_route(OPERATION, self._topology, wires.reduced, first="inter")
            shard_numel = -(-values.numel() // self._topology.world_size)
            reducer = Encoder(reducing, shard_numel, key, one.residual)
            gatherer = Encoder(gathering, shard_numel, key, first_hop=FIRST_GATHER_HOP)
            yield from all_reduce_steps(values.view(-1), reducer, gatherer, "local", self._topology.world_size)
            one.piece.put(values, rows)
            one.tally.calls += 1

    def shadow(self, bucket: GradBucket, plain_mean: Callable[[GradBucket], Future]) -> Future:
        """Return the plain mean, and compare the compressed one, of a copy, with it."""
        exchanges, copy = self._exchanges_of(bucket), bucket.buffer().clone()
        exact, compressed = plain_mean(bucket).wait(), self._start(copy, exchanges).wait()
        for one in exchanges:
            one.measure(exact.view(1, -1), compressed.view(1, -1))
        done = new_future(copy.device)
        done.set_result(exact)
        return done

    def _exchanges_of(self, bucket: GradBucket) -> list[PieceExchange]:
        parameters = bucket.parameters()
        key = tuple(map(id, parameters))
        if key not in self._exchanges:
            self._retire(key)
            choices, sizes = [self._choices[i] for i in key], [parameter.numel() for parameter in parameters]
            # Not by the reason: uncompressed parameters share one message; the report has a row for each reason.
            pieces = split_by_format(choices, sizes, lambda choice: (choice.wires.gradients, choice.wires.reduced))
            self._exchanges[key] = [self._plan(piece, bucket.buffer()) for piece in pieces]
        return self._exchanges[key]

    def _retire(self, parameters: tuple[int, ...]) -> None:
        """Drop the exchanges of buckets with any of ``parameters``, which DDP has rebuilt; save their residuals."""
        for key in [key for key in self._exchanges if set(key) & set(parameters)]:
            for one in self._exchanges.pop(key):
                if one.residual is not None:
                    self._record.carried.retire(one.residual, self._record.scaling)

    def _plan(self, piece: FormatPiece, buffer: Tensor) -> PieceExchange:
        topology, carried, wires, residual = self._topology, self._record.carried, piece.choices[0].wires, None
        shape = topology.num_nodes, topology.ranks_per_node
        plain = volume.all_reduce_sent(piece.numel, buffer.dtype, *shape, ("none", "none"))
        shard_numel = -(-piece.numel // topology.world_size)
        reduced = volume.reduce_scatter_sent(shard_numel, buffer.dtype, *shape, wires.gradients)
        gathered = volume.all_gather_sent(shard_numel, buffer.dtype, *shape, (wires.reduced, wires.reduced))
        sent = volume.Sent(reduced.intra + gathered.intra, reduced.inter + gathered.inter)
        tally = self._record.new_tally(piece.choices, _formats_text(wires), sent, plain)
        _, last_wire = find_route(OPERATION, topology, wires.gradients, first="intra").hops[-1]
        if carried.recipe.residual and last_wire.block:
            spans, device = piece.spans(), buffer.device
            residual = carried.residual_for(topology, spans, piece.numel, numbering="local", device=device)
        return PieceExchange(piece, tally, residual)


def _formats_text(wires: Wires) -> str:
    formats = (*wires.gradients, wires.reduced)
    return "uncompressed" if {wire.name for wire in formats} == {"none"} else "{},{} back {}".format(*formats)
