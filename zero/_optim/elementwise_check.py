"""Find by a trial what an optimizer updates, elements or whole tensors, and check that its states can be sharded.

An elementwise optimizer (Adam, SGD, Lion) updates flat runs of parameters that are cut anywhere. So the new value of an
element may depend only on that element, its gradients and its group's settings: on no other element, tensor or group,
and on no shape. An optimizer of whole tensors (Muon, LAMB, Adafactor) gets them whole, each on one rank: there a new
value may depend on the tensor, but on no other one. What couples tensors (Prodigy, a norm over all) is refused.

    full      one optimizer, as without ZeRO         tensors of several shapes in every parameter group
    sharded   one optimizer on each of three ranks   flat runs of the same elements, views of one buffer;
                                                     or the same tensors, dealt out

Both make the same steps on made-up tensors, and after each step every element must be equal in both. Gradients are
small and large, so that thresholds take effect; the last steps are those after a million, so that warm-ups have ended
and periods have passed.

:func:`check_states` tries whether the states of a parameter can be sharded and saved. Optimizers with 8-bit states keep
those of small tensors in full precision, so its trial is larger than their thresholds. They encode moments by blocks,
which shards would cut: so they are updated as whole tensors.
"""

from __future__ import annotations

import inspect
import random
import warnings
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from zcomm import ConfigError
from zero._optim.lamb import Lamb
from zero._optim.lion import Lion
from zero._optim.masters import is_nested
from zero._optim.muon import Muon
from zero._optim.optimizer_clone import copy_of, over_groups, start_training
from zero._optim.subclass_states import allow
from zero._storage.safetensors_file import is_storable


def attributes(optimizer: Optimizer) -> dict[str, str]:
    """The texts of what an optimizer keeps outside its state and its groups."""
    kinds = (Tensor, dict, list, tuple, deque)
    return {
        name: repr(value)
        for name, value in vars(optimizer).items()
        if name not in ("state", "param_groups") and (type(value) in (int, float) or isinstance(value, kinds))
    }


def unsaved_state(
    optimizer: Optimizer, leaves: list[Tensor], before: dict[str, str], *, takes_any: bool
) -> Iterator[str]:
    """What a checkpoint of ``optimizer`` would lose; ``before``: its attributes before any step.

    ``takes_any``: states may be tensors of any shape, and lists of them: those of whole tensors.
    """
    for name, text in attributes(optimizer).items():
        if text != before.get(name):
            yield f"keeps {name!r}, which steps change, outside of its state: a checkpoint would lose it"
    numel_of = {leaf: leaf.numel() for leaf in leaves}
    for leaf, state in optimizer.state.items():
        if leaf not in numel_of:
            yield f"keeps state for {leaf!r}, which is no parameter: a checkpoint would lose it"
            continue
        for name, value in state.items():
            is_tensor = type(value) in (Tensor, nn.Parameter)
            is_held = isinstance(value, (int, float))
            if is_tensor:
                is_held = takes_any or value.numel() == 1 or value.shape == leaf.shape
            is_held = is_held or (takes_any and is_nested(value))
            if value is not None and not is_held:
                kind = f"a {type(value).__name__}" + (f" of shape {tuple(value.shape)}" if is_tensor else "")
                yield (
                    f"keeps {name!r} of {leaf.numel()} elements as {kind}: a checkpoint holds numbers, and tensors "
                    "with one value for each element"
                )


Shapes = tuple[tuple[int, ...], ...]
SHAPES: Shapes = ((), (37,), (24, 20), (8, 5, 3, 3))
MATRICES: Shapes = ((24, 20), (20, 24), (9, 9), (40, 8))
WHOLE: Shapes = ((), (37,), *MATRICES, (8, 5, 3, 3))
"""The shapes of the trial of whole tensors."""
SIDE, MAX_SIDE, SIDE_STEP = 144, 512, 16
"""The side of the large matrix, its maximum, and what it is a multiple of. Optimizers factor the states of matrices
with sides from 128 on, or encode states of 4,096 elements and more in blocks of 256 that must fill the tensor; settings
that name another size raise the side up to the maximum."""
STEPS, LATE_STEPS = 13, 3
LATE = 1_260_000 - STEPS - 2
"""Added to counters before the late steps, which then pass a multiple of most periods that people choose."""
SCALES = {STEPS - 3: 1e-3, STEPS - 2: 1e3}
"""Factors of the gradients in some steps; 1 in the others."""
NOISE = 0.3
"""Gradient noise around a direction that all steps share: D-Adaptation's and Prodigy's estimates grow along one."""
ZEROS, SHIFT = 0.1, 331
"""The fraction of gradients that is exactly zero; and the shift: each step uses the previous step's noise, shifted by
so many elements, which takes a hundredth of the time of new random numbers."""
GROUPS = 16
"""Parameter groups that are tried together, 9 MB each."""
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Relative to the distance that an element has moved."""
REMEDY = (
    "ZeRO updates flat shards of tensors, so use an elementwise optimizer (Adam, AdamW, SGD, Adagrad, RMSprop, Lion, "
    "...), or one that updates each tensor by itself (Muon, Adafactor, LAMB); docs/optimizer.md has a list"
)

BY_PARAMETER = frozenset(
    {
        *(optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD, optim.NAdam, optim.RAdam),
        *(optim.RMSprop, optim.Rprop, optim.SGD),
    }
)
"""What a step of these does to a parameter depends on that parameter, its state and its group's settings alone."""
KNOWN = BY_PARAMETER | {Lion}
"""Elementwise by their formulas. They are not tried here, which would take hundreds of ms; the tests try them."""
OF_TENSORS = frozenset(
    {Lamb, Muon, *(cls for name in ("Adafactor", "Muon") if (cls := getattr(optim, name, None)) is not None)}
)
"""Those that update each tensor by itself; the tests try them."""


class _Subject(NamedTuple):
    """What is tried: an instance with some of its parameter groups, or a class with options."""

    optimizer: Optimizer | type[Optimizer]
    options: Mapping[str, Any]
    device: torch.device
    groups: list[dict[str, Any]]

    @property
    def name(self) -> str:
        return (self.optimizer if isinstance(self.optimizer, type) else type(self.optimizer)).__name__


class TrialSlice(NamedTuple):
    """Elements ``[start, stop)`` of the trial's values, as one parameter of a group."""

    group: int
    start: int
    stop: int
    shape: tuple[int, ...]

    def part(self, first: int, last: int) -> TrialSlice:
        """Its elements ``[first, last)``, flat."""
        return TrialSlice(self.group, self.start + first, self.start + last, (last - first,))

    @property
    def flat(self) -> TrialSlice:
        """All of it, flat."""
        return self.part(0, self.stop - self.start)


Ranks = list[list[TrialSlice]]
"""What each rank updates."""


def updates_tensors(optimizer: Optimizer | type[Optimizer], options: Mapping[str, Any], device: torch.device) -> bool:
    """Whether ``optimizer`` updates whole tensors; False: elements. Found by trials, unless its class is known.

    A class can declare it: ``zero_updates = "tensors"`` or ``"elements"``; the trial of that must pass.

    Args:
        optimizer: An instance, which is not changed, though its hooks are called; or a class.
        options: Options of the class.
        device: The device of the masters.

    Raises:
        ConfigError: It couples tensors, its states cannot be saved, or the trial shows that the declaration is wrong.

    Cost: see :func:`check_elementwise`; for optimizers of tensors another trial like it.
    """
    declared = getattr(optimizer, "zero_updates", None)
    if declared not in (None, "elements", "tensors"):
        raise ConfigError(f"zero_updates must be 'elements' or 'tensors': zero_updates={declared!r}")
    if declared is None and _is_one_of(OF_TENSORS, optimizer):
        return True
    failure: ConfigError | None = None
    if declared != "tensors":
        try:
            check_elementwise(optimizer, options, device)
        except ConfigError as error:
            failure = error
        if failure is None or declared == "elements":
            if failure is not None:
                raise failure
            return False
    groups = [] if isinstance(optimizer, type) else _distinct(optimizer.param_groups)[:GROUPS]
    subject = _Subject(optimizer, options, device, groups)
    with _isolated(device):
        problem = _problem_of_tensors(subject)
    if problem:
        before = f"{subject.name} " if failure is None else f"{failure}. As an optimizer of whole tensors it "
        raise ConfigError(before + problem)
    return True


def _problem_of_tensors(subject: _Subject) -> str:
    """Why the tensors of these groups cannot be dealt out to ranks; empty: they can."""
    failure: Exception | None = None
    for dtype in TOLERANCES:
        for shapes in (WHOLE, MATRICES):  # Muon takes matrices only
            try:
                trial = _Trial(subject, dtype, shapes, is_whole=True)
                trial.run()
            except Exception as error:
                failure = error
            else:
                return trial.problem()
    return f"cannot be tried: a step on whole tensors, without a closure, raised {type(failure).__name__}: {failure}"


def check_elementwise(optimizer: Optimizer | type[Optimizer], options: Mapping[str, Any], device: torch.device) -> None:
    """Refuse an optimizer that updates shards differently from full tensors, or loses state in a checkpoint.

    Args:
        optimizer: An instance, which is not changed, though its hooks are called; or a class.
        options: Options of the class.
        device: The device of the masters.

    Raises:
        ConfigError: Names what an update depends on, and the difference.

    The result depends on the arguments alone, so it is the same on every rank. Random generators are restored.
    Cost: nothing for those that are :data:`KNOWN`; else, for each parameter group with settings of its own, 16 steps of
    about 900 elements and 16 of 21,000, each twice; and memory for 16 groups.
    """
    if _is_one_of(KNOWN, optimizer):
        return
    groups = [] if isinstance(optimizer, type) else _distinct(optimizer.param_groups)
    subject = _Subject(optimizer, options, device, groups[:GROUPS])
    with _isolated(device):
        problem = _problem(subject)
        for start in range(GROUPS, len(groups), GROUPS - 1):  # any group may be coupled with the first
            together = [groups[0], *groups[start : start + GROUPS - 1]]
            problem = problem or _problem(subject._replace(groups=together))
    if problem:
        raise ConfigError(f"{subject.name} {problem}. {REMEDY}")


def _is_one_of(known: Collection[type[Optimizer]], optimizer: Optimizer | type[Optimizer]) -> bool:
    """Whether its class is in ``known``, with the step of that class and nothing hooked to it."""
    if isinstance(optimizer, type):
        return optimizer in known
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return type(optimizer) in known and "step" not in vars(optimizer) and not any(hooks)


def _problem(subject: _Subject) -> str:
    """Why shards of these groups cannot be updated; empty: they can."""
    for dtype in TOLERANCES:  # some have no kernels for float64
        try:
            # Shampoo keeps a matrix over all elements of a vector: it would need hours for the large tensors.
            small = _Trial(subject, dtype, SHAPES)
            small.run()
            if coupling := small.coupling():
                return coupling
            side = _side(subject.optimizer, subject.options)
            trial = _Trial(subject, dtype, (*SHAPES, (side, side)))
            trial.run()
        except Exception as error:
            failure = error
        else:
            return trial.problem()
    raise ConfigError(
        f"{subject.name} cannot update flat shards: a trial step, without a closure, raised "
        f"{type(failure).__name__}: {failure}. {REMEDY}"
    ) from failure


class _Trial:
    """One optimizer, tried in one dtype."""

    def __init__(self, subject: _Subject, dtype: torch.dtype, shapes: Shapes, *, is_whole: bool = False) -> None:
        self._optimizer, self._options, device, self._groups = subject
        self._is_whole = is_whole
        self._dtype, self._shapes = dtype, shapes
        self._tensors = list(_tensors(max(len(self._groups), 1), shapes))
        numel, generator = self._tensors[-1].stop, torch.Generator().manual_seed(0)
        self._values = torch.randn(numel, generator=generator, dtype=torch.float64).to(device, dtype)
        noise = torch.randn(numel + (STEPS + LATE_STEPS) * SHIFT, generator=generator, dtype=torch.float64)
        noise[torch.rand(noise.shape, generator=generator) < ZEROS] = 0
        self._gradients = noise.to(device, dtype).unfold(0, numel, SHIFT)
        self._num_steps = STEPS + LATE_STEPS
        self._unsaved: list[str] = []

    def run(self) -> None:
        """Make all steps, full and sharded; without late steps if the optimizer fails in them."""
        full: Ranks = [self._tensors]
        try:
            self._full = self._path(full)
        except Exception:
            self._num_steps = STEPS
            self._full = self._path(full)
        self._sharded = self._path(self._dealt() if self._is_whole else self._three_ranks())

    def problem(self) -> str:
        """Why shards cannot be updated; empty: they can."""
        moved = (self._full[-1] - self._values).nan_to_num(0, 0, 0).abs()
        for index in range(self._tensors[-1].group + 1):
            if not any(moved[run.start : run.stop].any() for run in self._tensors if run.group == index):
                return (
                    f"moved no parameter of group {self._number(index)} in {self._num_steps} trial steps, so it cannot "
                    "be tried"
                )
        return self.coupling() or (self._unsaved[0] if self._unsaved else "")

    def coupling(self) -> str:
        """What an update depends on beside its element; empty: nothing."""
        found = self._difference(self._sharded)
        if self._is_whole:
            return f"couples tensors: {self._reason()}. Dealt out to ranks {found}" if found else ""
        return f"is not elementwise: {self._reason()}. On shards {found}" if found else ""

    def _reason(self) -> str:
        """The first way of cutting that changes the result."""
        full, last = [self._tensors], max(run.group for run in self._tensors)
        ways: dict[str, tuple[Ranks, int]] = {
            "it draws random numbers, which differ between ranks": (full, 1),
            **({} if self._is_whole else self._ways_to_cut()),
            "an update depends on other tensors of the group": (
                [self._tensors[i :: len(self._shapes)] for i in range(len(self._shapes))], 0,
            ),
            "an update depends on other parameter groups": (
                [[run for run in self._tensors if run.group == group] for group in range(last + 1)], 0,
            ),
        }  # fmt: skip
        for reason, (ranks, seed) in ways.items():
            try:
                if self._difference(self._path(ranks, seed)):
                    return reason
            except Exception as error:
                return f"{reason} ({error!r})"
        return "an update depends on which tensors a rank has"

    def _ways_to_cut(self) -> dict[str, tuple[Ranks, int]]:
        halves = [part for run in self._tensors for part in _halves(run)]
        return {
            "it updates the same elements as a vector and as a matrix differently": (
                [[run.flat for run in self._tensors]], 0,
            ),
            "an update depends on other elements of the tensor": ([halves], 0),
        }  # fmt: skip

    def _dealt(self) -> Ranks:
        """Whole tensors; a rank has none of some groups."""
        return [self._tensors[rank::3] for rank in range(3)]

    def _three_ranks(self) -> Ranks:
        """A part of every tensor, the remainder, and a little: most groups of the last rank are empty."""
        *others, vector, kernel = sorted(self._tensors, key=lambda run: (run.group, run.shape in ((37,), (8, 5, 3, 3))))
        numel = vector.stop - vector.start
        parts = [_halves(run) for run in others]
        first, second = [part[0] for part in parts if part[1:]], [part[-1] for part in parts]
        return [first, [*second, vector.part(0, numel - 1)], [vector.part(numel - 1, numel), kernel.flat]]

    def _path(self, ranks: Ranks, seed: int = 0) -> Tensor:
        """The values after every step."""
        path = self._values.expand(self._num_steps, -1).clone()
        for rank, runs in enumerate(ranks):
            _seed(self._values.device, seed + rank)
            flat = self._values.clone()  # an optimizer that replaces a parameter's memory has no effect on it
            leaves = [flat[run.start : run.stop].view(run.shape) for run in runs]
            is_full = runs is self._tensors
            if is_full:
                leaves = [nn.Parameter(leaf) for leaf in leaves]
            optimizer = self._build(leaves, runs, has_flag=not is_full)
            before = attributes(optimizer)
            for step in range(self._num_steps):
                if step == STEPS:
                    _make_late(optimizer)
                noise = self._gradients[step]
                gradients = (self._gradients[0] + NOISE * noise) * (noise != 0) * SCALES.get(step, 1.0)
                for leaf, run in zip(leaves, runs, strict=True):
                    leaf.grad = gradients[run.start : run.stop].view(run.shape)
                optimizer.step()
                for run in runs:
                    path[step, run.start : run.stop] = flat[run.start : run.stop]
            if not is_full and not self._unsaved:
                self._unsaved = list(unsaved_state(optimizer, leaves, before, takes_any=self._is_whole))
        return path

    def _build(self, leaves: list[Tensor], runs: list[TrialSlice], *, has_flag: bool) -> Optimizer:
        """An optimizer over ``leaves``; ``has_flag``: plus one without a gradient, like the overflow flag."""
        params: list[list[Tensor]] = [[] for _ in range(self._tensors[-1].group + 1)]
        for leaf, run in zip(leaves, runs, strict=True):
            params[run.group].append(leaf)
        if isinstance(self._optimizer, type):
            built = self._optimizer([{"params": own} for own in params], **self._options)
        else:
            built = copy_of(self._optimizer, self._groups, params)
        start_training(built)
        if has_flag:
            built.param_groups[0]["params"].append(torch.zeros(1, dtype=self._dtype, device=self._values.device))
        for group in built.param_groups:
            lr = group.get("lr")
            if lr is not None and not lr:  # a schedule may start at 0, where every optimizer looks elementwise
                group["lr"] = torch.full_like(lr, 0.1) if isinstance(lr, Tensor) else 0.1
        return built

    def _difference(self, path: Tensor) -> str:
        """Where ``path`` first differs from that of the full tensors; empty: nowhere."""
        before, gone, largest = self._values, torch.zeros_like(self._values), self._values.abs()
        if torch.equal(path, self._full):
            return ""
        rounding = 64 * torch.finfo(self._dtype).eps
        for step, (full, other) in enumerate(zip(self._full, path, strict=True)):
            gone += (full - before).nan_to_num(0, 0, 0).abs()
            largest = torch.fmax(largest, full.nan_to_num(0, 0, 0).abs())
            off = (other - full).abs()
            is_same = (off <= TOLERANCES[self._dtype] * gone + rounding * largest) | (other == full)
            is_off = ~(is_same | (other.isnan() & full.isnan()))
            if is_off.any():
                off = off.nan_to_num(torch.inf) * is_off
                where = int(off.nan_to_num(0).argmax())
                run = next(run for run in self._tensors if run.start <= where < run.stop)
                by = off[where] / gone[where].clamp_min(torch.finfo(self._dtype).tiny)
                return (
                    f"an element of a tensor of shape {run.shape} in parameter group {self._number(run.group)} is "
                    f"{off[where]:.3g} off in step {step + 1}, {by:.3g} of the distance it moved"
                )
            before = full
        return ""

    def _number(self, index: int) -> int:
        """The optimizer's own index of the group that is tried as ``index``."""
        if isinstance(self._optimizer, type):
            return index
        return next(i for i, group in enumerate(self._optimizer.param_groups) if group is self._groups[index])


def _tensors(num_groups: int, shapes: Shapes) -> Iterator[TrialSlice]:
    """Consecutive slices, with the same shapes in every group."""
    start = 0
    for group in range(num_groups):
        for shape in shapes:
            stop = start + torch.Size(shape).numel()
            yield TrialSlice(group, start, stop, shape)
            start = stop


def _halves(run: TrialSlice) -> list[TrialSlice]:
    """Cut where no block or row ends."""
    numel = run.stop - run.start
    return [run.part(0, numel * 3 // 7), run.part(numel * 3 // 7, numel)] if numel > 1 else [run.flat]


def _distinct(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups that differ in more than learning rates; two of each, if there are: groups may be coupled."""
    count: Counter[str] = Counter()
    chosen = []
    for group in groups:
        settings = {name: value for name, value in group.items() if "param" not in name and "lr" not in name}
        count[repr(settings)] += 1
        if count[repr(settings)] <= 2:
            chosen.append(group)
    return chosen


def _side(optimizer: Optimizer | type[Optimizer], options: Mapping[str, Any]) -> int:
    """The side of the large matrix: above the sizes that the settings name."""
    if isinstance(optimizer, type):
        defaults = {name: one.default for name, one in inspect.signature(optimizer).parameters.items()}
        settings: list[Mapping[str, Any]] = [{**defaults, **options}]
    else:
        settings = [vars(optimizer), *optimizer.param_groups]
    named = [
        value
        for one in settings
        for name, value in one.items()
        if type(value) is int and value < MAX_SIDE and ("dim" in name or "size" in name or "factor" in name)
    ]
    return -(-max(SIDE, *(value + 1 for value in named), 0) // SIDE_STEP) * SIDE_STEP


def _make_late(optimizer: Optimizer) -> None:
    """Add more than a million to everything that has counted the steps."""
    for where in (*optimizer.param_groups, *optimizer.state.values(), vars(optimizer)):
        for name, value in list(where.items()) if isinstance(where, dict) else ():
            is_number = type(value) in (int, float) or (isinstance(value, Tensor) and value.ndim == 0)
            if is_number and value in (STEPS, STEPS + 1):
                where[name] = value + LATE


@contextmanager
def _isolated(device: torch.device) -> Iterator[None]:
    """Inside: random generators are restored afterwards, no warnings, no compilation."""
    python = random.getstate()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(python)


def _seed(device: torch.device, seed: int) -> None:
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)


NUMEL, SQUARE = 2**16, (2**8, 2**8)


def check_states(optimizer: Optimizer, device: torch.device, *, is_whole: bool = False) -> None:
    """Raise ConfigError if ``optimizer`` keeps anything but numbers, and tensors with one value for each element.

    ``is_whole``: it updates whole tensors; then states are tensors of any shape, may be nested in lists, and may be
    tensor subclasses, which are allowed from here on.

    Cost: a step on 65,536 elements for each kind of parameter group.
    """
    kinds = {
        repr([(k, v) for k, v in group.items() if k not in ("params", "lr")]): group for group in optimizer.param_groups
    }
    for group in kinds.values():
        param = torch.linspace(-1, 1, NUMEL, device=device)
        if is_whole:
            param = param.view(SQUARE)
        param.grad = param.clone()
        trial = over_groups(optimizer, [{**group, "params": [param]}])
        start_training(trial)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            trial.step()
        for name, value in trial.state[param].items():
            if is_whole:
                allow(value)
            if not _is_shardable(value, is_whole=is_whole):
                of = f" of shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else ""
                raise ConfigError(
                    f"{type(optimizer).__name__} keeps {name!r} of a parameter of {NUMEL} elements as a "
                    f"{type(value).__name__}{of}, which can neither be sharded nor saved: states must be "
                    "numbers, or plain tensors with one value for each element. For narrower moments use zero.CPUAdam "
                    "with offload_optimizer and fp32_optimizer_states=False"
                )


def _is_shardable(value: Any, *, is_whole: bool) -> bool:
    if is_whole and is_nested(value):
        return True
    if isinstance(value, Tensor):
        return is_storable(value) and (is_whole or value.numel() == 1 or value.shape == (NUMEL,))
    return value is None or isinstance(value, (int, float))
