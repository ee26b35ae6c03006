"""Which optimizers ZeroOptimizer accepts, and whether it is right: every one of the libraries that are installed.

    python tools/optimizers.py [--ranks]     writes bench/results/optimizers.md and the table in docs/optimizer.md

Each is built with its defaults over a small model, asked for the verdict of ``zero._optim.elementwise_check``, and then
trained twice in float64: whole, and for three ranks, each with an optimizer of its own: over its pieces of the
parameters, laid flat and cut; or, if the verdict is that it updates whole tensors, over whole parameters, dealt out.
That needs no code of zero. ``--ranks`` trains what was
accepted with ZeroOptimizer itself, on two processes at stages 1 and 3. Each is tried in a process of its own, for a
limited time. Results are written after every optimizer; ``--resume`` goes on with the rows that are there, of the same
versions.

A library that is not installed is left out. ``pip install --no-deps timm pytorch_optimizer opt_einsum torchao
bitsandbytes`` is enough: nothing else of them is imported.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import re
import sys
import types
import typing
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.optim import Optimizer

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.ranks import close_pools, run_ranks  # noqa: E402  (tests is no installed package)
from zero import GatheredParameters, ZeroOptimizer  # noqa: E402
from zero._optim.elementwise_check import check_states, updates_tensors  # noqa: E402
from zero._optim.optimizer_clone import check_is_new  # noqa: E402

RESULTS, DOCUMENT = ROOT / "bench" / "results" / "optimizers.md", ROOT / "docs" / "optimizer.md"
MARKED = re.compile(r"(?<=<!-- optimizers -->\n).*?(?=<!-- end of optimizers -->)", re.DOTALL)
STEPS, RANKS, EQUAL = 24, 3, 1e-6
LIMIT_S = 100
"""The time for each of the two verdicts on an optimizer."""
WHOLE = "whole"
ACCEPTED, ACCEPTED_WHOLE, ALIKE = "accepted", "accepted: updates whole tensors", "as one process"
NEEDED: dict[str, dict[str, Any]] = {"Ranger21": {"num_iterations": 100}, "SGD": {"lr": 1e-2}}
"""Arguments without default that constructors need; used where ``cls(params)`` fails."""
COLUMNS = ("library", "optimizer", "verdict", "off", "two processes")
REASONS = {
    "draws random numbers": "draws random numbers, which differ per rank",
    "as a vector and as a matrix": "depends on shapes: factored states, orthogonalisation, means of rows, ...",
    "other elements of the tensor": "depends on the other elements of a tensor: norms, trust ratios, clipping, ...",
    "other tensors of the group": "depends on other tensors: global norms, estimates of the distance, ...",
    "other parameter groups": "depends on other parameter groups",
    "which tensors a rank has": "depends on which tensors a rank has",
    "steps another optimizer": "wraps another optimizer, whose state a checkpoint would lose",
    "a checkpoint would lose it": "keeps state outside optimizer.state, which a checkpoint would lose",
    "a checkpoint holds numbers": "keeps states that a checkpoint cannot hold",
    "can neither be sharded": "keeps states, of large parameters, that cannot be divided over ranks or saved",
    "has state": "has state from a constructor that needs more than parameter groups",
    "so it cannot be tried": "moved nothing in the trial",
    "without a closure": "needs a closure, second derivatives, full matrices, ...",
}
NOT_BUILT = "not tried: cannot be built on this model: needs matrices alone, one group, more arguments, a package"


class Case(NamedTuple):
    """An optimizer and its constructor."""

    library: str
    name: str
    build: Callable[[list[dict[str, Any]]], Optimizer]


class Row(NamedTuple):
    """The result of a case, as it is printed."""

    library: str
    name: str
    verdict: str
    off: str
    """Difference of sharded from full training, relative to the total change; or why it could not be computed."""
    on_ranks: str = ""
    """The result of ZeroOptimizer itself on two processes."""

    @property
    def is_measured(self) -> bool:
        """Whether it could be trained here in both ways."""
        return re.fullmatch(r"[0-9.e+-]+", self.off) is not None

    @property
    def is_equal(self) -> bool:
        """Whether sharding changes nothing."""
        return self.is_measured and float(self.off) < EQUAL

    @property
    def is_wrong(self) -> bool:
        """Whether it is accepted, but trains differently from one process."""
        is_other = (self.is_measured and not self.is_equal) or self.on_ranks not in ("", ALIKE)
        return self.verdict in (ACCEPTED, ACCEPTED_WHOLE) and is_other


class Model(nn.Module):
    """A model with all kinds of parameters, and a matrix large enough for factored or encoded states."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 136)
        self.linear = nn.Linear(136, 132)
        self.convolution = nn.Conv1d(132, 8, 3)
        self.norm = nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(8, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, length - 2, 50] of tokens [batch, length]."""
        x = nn.functional.gelu(self.linear(self.embedding(tokens))).transpose(1, 2)
        return self.head(self.norm(self.convolution(x).transpose(1, 2)) * self.scale)


def new_model() -> Model:
    """Build the same model on every call."""
    torch.manual_seed(0)
    return Model().double()


def loss_of(model: nn.Module, step: int) -> Tensor:
    """The loss of the step's batch."""
    tokens = torch.randint(50, (4, 9), generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens[:, 2:].flatten())


def groups_of(pairs: list[tuple[Tensor, bool]]) -> list[dict[str, Any]]:
    """Parameter groups: weight decay for parameters that are, or were, matrices."""
    return [
        {"params": [p for p, is_matrix in pairs if is_matrix], "weight_decay": 0.05},
        {"params": [p for p, is_matrix in pairs if not is_matrix], "weight_decay": 0.0},
    ]


def over(model: nn.Module) -> list[dict[str, Any]]:
    """Return the parameter groups of ``model``."""
    return groups_of([(p, p.ndim > 1) for p in model.parameters()])


def train_whole(case: Case) -> Tensor:
    """Train on one process; return all parameters after the last step as one vector."""
    model = new_model()
    optimizer = case.build(over(model))
    for step in range(STEPS):
        loss_of(model, step).backward()
        torch.manual_seed(step)
        optimizer.step()
        model.zero_grad()
    return vector(model)


def train_cut(case: Case) -> Tensor:
    """Train as three ranks do, each with an optimizer over its pieces of the flat parameters."""
    model = new_model()
    params = list(model.parameters())
    flat, share = vector(model), -(-vector(model).numel() // RANKS)
    ranks = []
    for rank in range(RANKS):
        pieces, pairs, start = [], [], 0
        for param in params:
            first, last = max(start, rank * share), min(start + param.numel(), (rank + 1) * share)
            if first < last:
                pieces.append((first, last, flat[first:last].clone().requires_grad_()))
                pairs.append((pieces[-1][2], param.ndim > 1))
            start += param.numel()
        ranks.append((pieces, case.build(groups_of(pairs))))
    for step in range(STEPS):
        loss_of(model, step).backward()
        gradient = torch.cat([p.grad.flatten() for p in params if p.grad is not None])
        for rank, (pieces, optimizer) in enumerate(ranks):
            for first, last, piece in pieces:
                piece.grad = gradient[first:last].clone()
            torch.manual_seed(1000 * rank + step)
            optimizer.step()
            for first, last, piece in pieces:
                flat[first:last] = piece.detach()
        model.zero_grad()
        torch.nn.utils.vector_to_parameters(flat, params)
    return vector(model)


def train_dealt(case: Case) -> Tensor:
    """Train as three ranks do, each with an optimizer over some of the parameters."""
    model = new_model()
    params = list(model.parameters())
    ranks = [case.build(groups_of([(p, p.ndim > 1) for p in params[rank::RANKS]])) for rank in range(RANKS)]
    for step in range(STEPS):
        loss_of(model, step).backward()
        for rank, optimizer in enumerate(ranks):
            torch.manual_seed(1000 * rank + step)
            optimizer.step()
        model.zero_grad()
    return vector(model)


def vector(model: nn.Module) -> Tensor:
    """Return all parameters as one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def distance(got: Tensor, whole: Tensor) -> float | str:
    """The distance relative to the change from the initial values."""
    way = (whole - vector(new_model())).norm()
    if not way.isfinite():
        return "whole training is not finite"
    return "whole training moves nothing" if way == 0 else ((got - whole).norm() / way).item()


def off_of(case: Case, train: Callable[[Case], Tensor] = train_cut) -> str:
    """Compare cut, or dealt, with full training; return the difference, or the error."""
    try:
        off = distance(train(case), train_whole(case))
    except Exception as error:
        off = f"{type(error).__name__}: {error}"
    return f"{off:.1e}" if isinstance(off, float) else plain(off)


def plain(text: str) -> str:
    """Escape text for a table cell."""
    return " ".join(text.split())[:80].replace("|", "/")


def verdict_of(case: Case) -> str:
    """The library's verdict: empty, WHOLE, or why it is refused."""
    try:
        optimizer = case.build(over(new_model()))
    except Exception as error:
        return f"not built: {type(error).__name__}: {error}"
    try:
        check_is_new(optimizer)
        is_whole = updates_tensors(optimizer, {}, torch.device("cpu"))
        check_states(optimizer, torch.device("cpu"), is_whole=is_whole)
    except Exception as error:
        return str(error)
    return WHOLE if is_whole else ""


def asked(function: Callable[[Case], str], case: Case) -> tuple[BaseProcess, Connection]:
    """Start a process that sends the result of ``function``."""
    context = mp.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=lambda: there.send(function(case)))
    process.start()
    there.close()
    return process, here


def answer(process: BaseProcess, here: Connection) -> str | None:
    """The result; None: nothing arrived within the limit, or the process died."""
    try:
        return typing.cast("str", here.recv()) if here.poll(LIMIT_S) else None
    except EOFError:
        return None
    finally:
        process.kill()
        process.join()


def tried(case: Case, *, on_ranks: bool) -> Row:
    """Compare the verdict with the measured result."""
    late = f"no answer within {LIMIT_S} s"
    off, refusal = (answer(*each) for each in [asked(off_of, case), asked(verdict_of, case)])
    if refusal == WHOLE:
        off = answer(*asked(lambda one: off_of(one, train_dealt), case))
    print(case.library, case.name, off, refusal, flush=True)
    if refusal is None:
        verdict = f"not tried: {late}"
    elif refusal == WHOLE:
        verdict = ACCEPTED_WHOLE
    elif refusal.startswith("not built"):
        verdict = NOT_BUILT
    elif refusal:
        reason = next((text for key, text in REASONS.items() if key in refusal), "another reason")
        verdict = f"refused: {reason}"
    else:
        verdict = ACCEPTED
    row = Row(case.library, case.name, verdict, late if off is None else off)
    if verdict not in (ACCEPTED, ACCEPTED_WHOLE) or not on_ranks:
        return row
    try:
        for stage in (1, 3):
            run_ranks(2, train_on_ranks, case.library, case.name, stage)
    except AssertionError as error:
        return row._replace(on_ranks=plain(str(error).splitlines()[-1]))
    return row._replace(on_ranks=ALIKE)


def train_on_ranks(_: int, library: str, name: str, stage: int) -> None:
    """Compare ZeroOptimizer itself with the oracle, on one of the processes."""
    warnings.simplefilter("ignore")
    torch.compiler.set_stance("force_eager")
    case = next(case for case in cases() if (case.library, case.name) == (library, name))
    model = new_model()
    optimizer = ZeroOptimizer(model, case.build(over(model)), stage=stage)
    for step in range(STEPS):
        loss_of(model, step).backward()
        torch.manual_seed(step)
        optimizer.step()
        optimizer.zero_grad()
    with GatheredParameters(model.parameters()):
        got = vector(model)
        optimizer.close()
    off = distance(got, train_whole(case))
    assert isinstance(off, float), off
    assert off < EQUAL, f"{off:.3g} off at stage {stage}"


def built(cls: type[Optimizer]) -> Callable[[list[dict[str, Any]]], Optimizer]:
    """The constructor with defaults and the arguments it needs."""
    needed: dict[str, Any] = NEEDED.get(cls.__name__, {})
    if "Muon" in cls.__name__ or cls.__name__ == "AdaGO":  # theirs want to be told which are matrices
        return lambda groups: cls([{**g, "use_muon": g["weight_decay"] > 0} for g in groups], **needed)
    return lambda groups: cls(groups, **needed)


def wrapping(cls: type[Optimizer]) -> Callable[[list[dict[str, Any]]], Optimizer]:
    """The constructor of a wrapper, over SGD."""
    return lambda groups: cls(torch.optim.SGD(groups, lr=1e-2, momentum=0.9))


def of_torch() -> Iterator[Case]:
    """Every optimizer of torch.optim."""
    for name, cls in sorted(vars(torch.optim).items()):
        if inspect.isclass(cls) and issubclass(cls, Optimizer) and cls is not Optimizer:
            yield Case("torch", name, built(cls))


def of_timm() -> Iterator[Case]:
    """Every name of timm's factory except other libraries', and its wrapper; imported without timm's models."""
    spec = importlib.util.find_spec("timm")
    if spec is None:
        return
    if "timm" not in sys.modules:  # its models need torchvision
        package, models = types.ModuleType("timm"), types.ModuleType("timm.models")
        package.__path__ = list(spec.submodule_search_locations or [])
        package.__spec__ = spec
        models.group_parameters = None  # type: ignore[attr-defined]
        sys.modules.update({"timm": package, "timm.models": models})
    optim = importlib.import_module("timm.optim")
    for name in [*optim.list_optimizers(), "lookahead_adamw"]:
        if not name.startswith(("bnb", "fused")):
            yield Case("timm", name, lambda groups, name=name: optim.create_optimizer_v2(groups, opt=name, lr=1e-3))


def of_pytorch_optimizer() -> Iterator[Case]:
    """Every public optimizer of pytorch_optimizer that is not torch's; wrappers over SGD."""
    if importlib.util.find_spec("pytorch_optimizer") is None:
        return
    library = importlib.import_module("pytorch_optimizer")
    for name in sorted(vars(library)):
        cls = getattr(library, name)
        is_optimizer = inspect.isclass(cls) and issubclass(cls, Optimizer) and not inspect.isabstract(cls)
        if not is_optimizer or cls.__module__.startswith("torch."):
            continue
        first = list(inspect.signature(cls.__init__).parameters)[1:2]
        if first in (["params"], ["param_groups"]):
            yield Case("pytorch_optimizer", name, built(cls))
        else:
            yield Case("pytorch_optimizer", name, wrapping(cls))


def of_module(library: str) -> Iterator[Case]:
    """The optimizers of ``library.optim``; if that cannot be imported, one case whose construction says why."""
    if importlib.util.find_spec(library) is None:
        return
    try:
        optim = importlib.import_module(f"{library}.optim")
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        yield Case(library, "optim", lambda _: raised(ImportError(text)))
        return
    for name, cls in sorted(vars(optim).items()):
        if inspect.isclass(cls) and issubclass(cls, Optimizer) and cls is not Optimizer and not name.startswith("_"):
            yield Case(library, name, built(cls))


def raised(error: Exception) -> Optimizer:
    """Raise ``error`` when the case is constructed."""
    raise error


def cases() -> Iterator[Case]:
    """Yield the cases of all libraries."""
    yield from of_torch()
    yield from of_timm()
    yield from of_pytorch_optimizer()
    yield from of_module("torchao")
    yield from of_module("bitsandbytes")


def versions(libraries: Iterable[str]) -> dict[str, str]:
    """The versions of the libraries, by name."""
    found = {}
    for library in dict.fromkeys(libraries):
        try:
            found[library] = f"{library} {version(library).split('+')[0]}"
        except PackageNotFoundError:
            found[library] = library
    return found


def summary(rows: list[Row]) -> str:
    """A row for each library and verdict."""
    names = versions(row.library for row in rows)
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        found[row.library, row.verdict].append(f"`{row.name}`")
    lines = ["| library | verdict | optimizers |", "|---|---|---|"]
    for library, verdict in sorted(found, key=lambda key: (list(names).index(key[0]), key[1])):
        lines.append(f"| {names[library]} | {verdict} | {', '.join(found[library, verdict])} |")
    return "\n".join(lines)


def page(rows: list[Row]) -> str:
    """The page: every optimizer, and the counts."""
    accepted = [row for row in rows if row.verdict in (ACCEPTED, ACCEPTED_WHOLE)]
    num_whole = sum(row.verdict == ACCEPTED_WHOLE for row in rows)
    refused = [row for row in rows if row.verdict.startswith("refused")]
    needless = ", ".join(f"{row.library} {row.name}" for row in refused if row.is_equal) or "none"
    text = (
        f"By `tools/optimizers.py`, with {', '.join(versions(row.library for row in rows).values())}. `off`: after "
        f"{STEPS} float64 steps, the distance of parameters that are flat and cut for {RANKS} ranks (or whole, and "
        "dealt out to them) from those of one process, divided by the way these have gone. `two processes`: how "
        "ZeroOptimizer trains what is accepted, at stages 1 and 3."
    )
    counts = (
        f"{len(rows)} optimizers: {len(accepted)} accepted, {num_whole} of them for whole tensors; "
        f"{sum(row.is_wrong for row in rows)} of the accepted train otherwise on ranks, "
        f"{sum(not row.is_measured for row in accepted)} could not be trained on this model; {len(refused)} refused, "
        f"of which {sum(row.is_equal for row in refused)} train alike on shards: {needless}; "
        f"{len(rows) - len(accepted) - len(refused)} not tried."
    )
    lines = ["# Optimizers", "", text, "", counts, "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for library, name, *others in rows:
        lines.append(f"| {' | '.join((library, f'`{name}`', *others))} |")
    return "\n".join(lines) + "\n"


def write(rows: list[Row]) -> None:
    """Write the page and the table in the documentation."""
    RESULTS.write_text(page(rows))
    text = f"{summary(rows)}\n"
    DOCUMENT.write_text(MARKED.sub(lambda _: text, DOCUMENT.read_text()))


def written(every: list[Case]) -> dict[tuple[str, str], Row]:
    """Read the page's rows of libraries whose installed version is unchanged."""
    text = RESULTS.read_text() if RESULTS.exists() else ""
    found = re.search(r"with (.*?)\. `off`", text)
    same = found.group(1).split(", ") if found else []
    names = versions(case.library for case in every)
    cells = [re.split(r" ?\| ?", line)[1:-1] for line in text.splitlines() if line.startswith("|")][2:]
    rows = [Row(library, name.strip("`"), *others) for library, name, *others in cells]
    return {(row.library, row.name): row for row in rows if names.get(row.library) in same}


def main() -> int:
    """Return 1 if an accepted optimizer is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", action="store_true", help="also train with ZeroOptimizer, on two processes")
    parser.add_argument("--show", action="store_true", help="print texts, write nothing")
    parser.add_argument("--resume", action="store_true", help="keep the rows that are written, of the same versions")
    parser.add_argument("--only", nargs="*", default=[], help="try these names; others keep their rows, if there are")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")  # some compile their steps, which takes longer than all others take
    every = list(cases())
    rows = written(every) if chosen.resume or chosen.only else {}
    for case in every:
        key = case.library, case.name
        if case.name not in chosen.only and (chosen.only or key in rows):
            continue
        rows[key] = tried(case, on_ranks=chosen.ranks)
        if not chosen.show:
            write([rows[case[:2]] for case in every if case[:2] in rows])
    close_pools()
    wrong = [row for row in rows.values() if row.is_wrong]
    print(f"{len(rows)} of {len(every)}; {len(wrong)} accepted and wrong: {wrong}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
