"""Random training programs: the model, the order of its blocks, how it is trained, and on which ranks.

A program is plain data, and ``draw(seed, number)`` gives the same one everywhere. The stage and the number of ranks
follow from the number, so that any twenty consecutive programs cover all of both; everything else is drawn.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

__all__ = ["Block", "Program", "draw", "features", "simpler"]

STAGES, WORLDS = (0, 1, 2, 3), (1, 2, 3, 5)
KINDS = ("linear", "mlp", "norm", "residual", "scalar", "empty", "lists", "half", "tied", "external", "deep")
"""Kinds of blocks; ``half`` never uses one of its two layers."""
EXTERNAL_KINDS = ("tied", "external")
"""The kinds that use the weight of an earlier block."""
HOOKS = ("forward", "forward pre", "backward", "backward pre", "tensor", "parameter")
CHECKPOINTS = ("", "reentrant", "not reentrant")
SETTINGS: dict[str, tuple[Any, ...]] = {
    "reduce_bucket_size": (1, 64),
    "allgather_bucket_size": (1, 64),
    "overlap_comm": (False,),
    "stage3_prefetch_bucket_size": (0,),
    "stage3_max_live_parameters": (1,),
    "stage3_max_reuse_distance": (0, 10**9),
    "stage3_param_persistence_threshold": (4, 30),
    "offload_optimizer": ({"device": "cpu"},),
    "offload_param": ({"device": "cpu"},),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    kind: str = "linear"
    has_bias: bool = True
    frozen: str = ""
    """"all", or "biases": parameters with at most one dimension."""
    like: int = 0
    """The number of the block whose weight this one uses, if its kind does that."""
    checkpoint: str = ""
    hooks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One training run. The defaults describe the simplest."""

    seed: int
    number: int
    world_size: int = 1
    stage: int = 0
    is_on_one_node: bool = True
    width: int = 4
    start: str = "features"
    """"features", "tokens" (an embedding), or "tied tokens": the head has the embedding's weight."""
    root: str = ""
    """A parameter of the root module itself: "vector", "scalar", "empty" or none."""
    blocks: tuple[Block, ...] = (Block(),)
    container: str = "list"
    """The model holds its blocks in a "list", each in a list of its own ("nested"), or as "attributes"."""
    paths: tuple[tuple[int, ...], ...] = ((0,),)
    """Orders in which blocks run. A block may occur twice in a path, or in no path at all."""
    changes_path: str = ""
    """When the next path is taken: at each "step" or "forward"."""
    absent: tuple[tuple[int, int], ...] = ()
    """(rank, block): that rank skips that block in every odd step. Below stage 3 only."""
    segment: str = ""
    """The kind of checkpoint around all blocks together."""
    steps: int = 2
    num_micro: tuple[int, ...] = (1, 1)
    """Micro-batches of each step."""
    num_forwards: int = 1
    """Of each micro-batch."""
    backward: str = "together"
    """"together": one backward of the summed losses of all forwards; "each" or "reversed": one backward per forward."""
    accumulation: str = ""
    """"counted", "no_sync" for all but the last backward, "no_sync everywhere"; by default each backward reduces."""
    clip: tuple[str, float, float] | None = None
    """How to clip ("call" or "configured"), the maximum norm, and the type of norm."""
    optimizer: str = "SGD"
    num_groups: int = 1
    lr_factors: tuple[float, ...] = (1.0, 1.0)
    zero_grad: str = "optimizer"
    """What clears gradients: "optimizer", "model", or nothing ("never")."""
    evaluates: bool = False
    """Each step is followed by a forward in eval mode without gradients."""
    penalty: bool = False
    """The loss includes the gradient of the outputs with respect to the inputs: a double backward."""
    has_late_hooks: bool = False
    """Users' hooks are registered after the optimizer is constructed."""
    declares_external: bool = True
    """Blocks that use another's weight declare that with ``zero.register_external_parameter``."""
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def num_backwards(self) -> tuple[int, ...]:
        """The number of backwards in each step."""
        each = 1 if self.backward == "together" else self.num_forwards
        return tuple(num * each for num in self.num_micro)

    @property
    def has_hidden_use(self) -> bool:
        """Whether a recomputation uses another block's weight without a declaration."""
        external = [block for block in self.blocks if block.kind == "external"]
        return not self.declares_external and any(self.segment or block.checkpoint for block in external)

    @property
    def needs_leaf(self) -> bool:
        """Whether the inputs must require gradients: otherwise torch warns, or computes no gradients."""
        hooks = {hook for block in self.blocks for hook in block.hooks}
        checkpoints = {self.segment, *(block.checkpoint for block in self.blocks)}
        return self.penalty or "reentrant" in checkpoints or any("backward" in hook for hook in hooks)

    def path(self, step: int, forward: int, rank: int) -> tuple[int, ...]:
        """The blocks that ``rank`` runs in one forward. ``forward`` counts from the start of training."""
        index = {"": 0, "step": step, "forward": forward}[self.changes_path]
        skipped = {block for other, block in self.absent if other == rank} if step % 2 else set()
        return tuple(block for block in self.paths[index % len(self.paths)] if block not in skipped)

    def __str__(self) -> str:
        lines = [f"python -m tests.differential --seed {self.seed} --number {self.number}"]
        lines += [f"  {name}: {value}" for name, value in _differences(self, Program(seed=0, number=0))]
        return "\n".join(lines)


def _differences(program: Program, plainest: Program) -> Iterator[tuple[str, Any]]:
    for field in fields(program):
        value = getattr(program, field.name)
        if field.name == "blocks":
            shown = [f"{i}: {_describe(block)}" for i, block in enumerate(value)]
            yield "blocks", "; ".join(shown)
        elif field.name not in ("seed", "number") and value != getattr(plainest, field.name):
            yield field.name, value


def _describe(block: Block) -> str:
    plain = Block()
    others = [f"{f.name}={getattr(block, f.name)!r}" for f in fields(block) if f.name != "kind"]
    known = [f"{f.name}={getattr(plain, f.name)!r}" for f in fields(plain) if f.name != "kind"]
    return " ".join([block.kind, *(text for text in others if text not in known)])


def features(program: Program) -> set[str]:
    """Names of the features in ``program``, to count how often each was tried."""
    names = {f"stage {program.stage}", f"world {program.world_size}", program.start, program.container}
    names |= {f"block: {block.kind}" for block in program.blocks}
    names |= {f"hook: {hook}" for block in program.blocks for hook in block.hooks}
    names |= {f"frozen: {block.frozen}" for block in program.blocks if block.frozen}
    names |= {f"checkpoint: {c}" for c in (program.segment, *(b.checkpoint for b in program.blocks)) if c}
    names |= {f"root: {program.root}", f"path by {program.changes_path}", f"backward: {program.backward}"}
    names |= {f"accumulation: {program.accumulation}", f"optimizer: {program.optimizer}"}
    names |= {f"zero_grad: {program.zero_grad}", f"clip: {program.clip and program.clip[0]}"}
    names |= {f"setting: {name}" for name, _ in program.settings}
    used = {block for path in program.paths for block in path}
    flags = {
        "unused block": len(used) < len(program.blocks),
        "block used twice": any(len(path) > len(set(path)) for path in program.paths),
        "several forwards": program.num_forwards > 1,
        "groups": program.num_groups > 1,
        "absent": bool(program.absent),
        "evaluates": program.evaluates,
        "penalty": program.penalty,
        "late hooks": program.has_late_hooks,
        "external use that is not declared": not program.declares_external,
        "windows of different lengths": len(set(program.num_micro)) > 1,
    }
    return names | {name for name, is_there in flags.items() if is_there}


def draw(seed: int, number: int) -> Program:
    """Draw program ``number`` of the sequence that ``seed`` defines."""
    random_ = random.Random(f"{seed}:{number}")
    stage, world_size = STAGES[number % 4], WORLDS[number // 4 % 4]
    steps = random_.randint(2, 4)
    blocks = _draw_blocks(random_)
    drawn = Program(
        seed=seed,
        number=number,
        world_size=world_size,
        stage=stage,
        is_on_one_node=random_.random() < 0.5,
        width=random_.randint(3, 8),
        start=random_.choice(("features", "features", "tokens", "tied tokens")),
        root=random_.choice(("", "", "vector", "scalar", "empty")),
        blocks=blocks,
        container=random_.choice(("list", "nested", "attributes")),
        steps=steps,
        num_forwards=random_.choice((1, 1, 1, 2, 3)),
        backward=random_.choice(("together", "each", "reversed")),
        accumulation=random_.choice(("", "counted", "no_sync", "no_sync everywhere")),
        optimizer=random_.choice(("SGD", "momentum", "Adam", "AdamW", "RMSprop")),
        num_groups=random_.randint(1, 3),
        lr_factors=tuple(random_.choice((1.0, 1.0, 0.5)) for _ in range(steps)),
        zero_grad=random_.choice(("optimizer", "optimizer", "optimizer", "model", "never")),
        evaluates=random_.random() < 0.3,
        penalty=random_.random() < 0.15,
        has_late_hooks=random_.random() < 0.3,
        declares_external=random_.random() < 0.7,
        settings=tuple((name, random_.choice(SETTINGS[name])) for name in SETTINGS if random_.random() < 0.2),
    )
    return _fitted(_with_training(_with_paths(drawn, random_), random_))


def _draw_blocks(random_: random.Random) -> tuple[Block, ...]:
    blocks: list[Block] = []
    for _ in range(random_.randint(1, 6)):
        owners = [i for i, block in enumerate(blocks) if block.kind == "linear"]
        kind = random_.choice([kind for kind in KINDS if owners or kind not in EXTERNAL_KINDS])
        block = Block(
            kind=kind,
            has_bias=random_.random() < 0.7,
            frozen=random_.choice(("", "", "", "", "all", "biases")),
            like=random_.choice(owners) if kind in EXTERNAL_KINDS else 0,
            checkpoint=random_.choice(CHECKPOINTS),
            hooks=tuple(hook for hook in HOOKS if random_.random() < 0.1),
        )
        blocks.append(block)
    return tuple(blocks)


def _with_paths(program: Program, random_: random.Random) -> Program:
    """Draw orders of the blocks: some occur twice, some never, and the order may change."""
    numbers = list(range(len(program.blocks)))
    used = [block for block in numbers if random_.random() < 0.85]
    paths = []
    for _ in range(random_.choice((1, 2, 3))):
        path = [block for block in used if random_.random() < 0.9] or used[:1]
        path += [random_.choice(path)] if path and random_.random() < 0.3 else []
        if random_.random() < 0.5:
            random_.shuffle(path)
        paths.append(tuple(path))
    absent: list[tuple[int, int]] = []
    if program.stage < 3 and program.world_size > 1 and random_.random() < 0.2:
        absent = [(random_.randrange(program.world_size), random_.choice(numbers))]
    return replace(
        program,
        paths=tuple(paths),
        changes_path=random_.choice(("", "step", "forward")) if len(paths) > 1 else "",
        absent=tuple(absent),
        segment=random_.choice(CHECKPOINTS[1:]) if random_.random() < 0.1 else "",
    )


def _with_training(program: Program, random_: random.Random) -> Program:
    num_micro = [random_.randint(1, 3)] * program.steps
    if random_.random() < 0.2:
        num_micro[-1] = random_.randint(1, 3)
    clip = None
    if random_.random() < 0.4:
        norm_type = random_.choice((2.0, 2.0, float("inf")))
        how = random_.choice(("call", "configured")) if norm_type == 2 else "call"
        clip = (how, random_.choice((0.05, 0.5, 100.0)), norm_type)
    return replace(program, num_micro=tuple(num_micro), clip=clip)


def _fitted(program: Program) -> Program:
    """Remove combinations that torch does not support or in which it is not deterministic."""
    if program.segment:  # torch does not nest the two kinds of checkpoint
        program = replace(program, blocks=tuple(replace(block, checkpoint="") for block in program.blocks))
    checkpoints = {program.segment, *(block.checkpoint for block in program.blocks)}
    is_simple = not any("backward" in hook for block in program.blocks for hook in block.hooks)
    if "reentrant" in checkpoints or not is_simple:
        program = replace(program, penalty=False)
    if program.num_forwards == 1:
        program = replace(program, backward="together")
    if program.stage < 3:
        dropped = ("stage3_", "offload_param")
        program = replace(program, settings=tuple(s for s in program.settings if not s[0].startswith(dropped)))
    return program


def simpler(program: Program) -> Iterator[Program]:
    """Yield programs with one feature fewer, the largest features first."""
    for number in range(len(program.blocks)):
        yield from _without_block(program, number)
    plainest = Program(seed=0, number=0)
    for field in fields(program):
        if field.name in ("seed", "number", "blocks", "paths", "steps", "num_micro", "lr_factors", "width"):
            continue
        plain = getattr(plainest, field.name)
        if getattr(program, field.name) != plain:
            yield replace(program, **{field.name: plain})
    yield from _shorter(program)
    for setting in program.settings if len(program.settings) > 1 else ():
        yield replace(program, settings=tuple(other for other in program.settings if other != setting))
    for number, block in enumerate(program.blocks):
        for changed in _simpler_blocks(block):
            yield replace(program, blocks=(*program.blocks[:number], changed, *program.blocks[number + 1 :]))


def _shorter(program: Program) -> Iterator[Program]:
    if program.steps > 1:
        fewer = program.steps - 1
        yield replace(program, steps=fewer, num_micro=program.num_micro[:fewer], lr_factors=program.lr_factors[:fewer])
    if set(program.num_micro) != {1}:
        yield replace(program, num_micro=(1,) * program.steps)
    if set(program.lr_factors) != {1.0}:
        yield replace(program, lr_factors=(1.0,) * program.steps)
    if program.world_size > 2:
        yield replace(program, world_size=2, absent=tuple(pair for pair in program.absent if pair[0] < 2))
    for index, path in enumerate(program.paths):
        if len(program.paths) > 1:
            yield replace(program, paths=(*program.paths[:index], *program.paths[index + 1 :]))
        for at in range(len(path)):
            without = (*path[:at], *path[at + 1 :])
            yield replace(program, paths=(*program.paths[:index], without, *program.paths[index + 1 :]))


def _without_block(program: Program, number: int) -> Iterator[Program]:
    others = [block for i, block in enumerate(program.blocks) if i != number]
    if not others or any(block.kind in EXTERNAL_KINDS and block.like == number for block in others):
        return

    def renamed(i: int) -> int:
        return i - (i > number)

    yield replace(
        program,
        blocks=tuple(replace(block, like=renamed(block.like)) for block in others),
        paths=tuple(tuple(renamed(i) for i in path if i != number) for path in program.paths),
        absent=tuple((rank, renamed(i)) for rank, i in program.absent if i != number),
    )


def _simpler_blocks(block: Block) -> Iterator[Block]:
    for name, plain in (("hooks", ()), ("checkpoint", ""), ("frozen", ""), ("has_bias", True)):
        if getattr(block, name) != plain:
            yield replace(block, **{name: plain})
    if block.kind != "linear":
        yield replace(block, kind="linear", like=0)
    for hook in block.hooks:
        if len(block.hooks) > 1:
            yield replace(block, hooks=tuple(other for other in block.hooks if other != hook))
