"""Parse machine code: instructions, basic blocks, and what the fast path of a tile executes.

The fast path is the cheapest way from the kernel's entry to its end (from the head of its loop over tiles to that
loop's end, if it has one) on which a thread loads and stores exactly the bytes of its part of a tile, in accesses of
four bytes and more. That leaves out the routine that divides unusual numbers, accesses element by element, and the
ends of messages. A loop over messages is on the path once for each further one.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Access", "Block", "Code", "Instruction", "Path", "access_nbytes", "parse_code"]

LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:(@!?\S+)\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")
LABEL = re.compile(r"^\s*(\.L_x?_?\w+):")
TARGET = re.compile(r"`\(([^)]+)\)")
WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
SMALLEST_ACCESS_NBYTES = 4


class Instruction(NamedTuple):
    """One, with its predicate (or an empty string) and the label that it names (likewise)."""

    predicate: str
    opcode: str
    target: str

    @property
    def name(self) -> str:
        """Without modifiers. ptxas leaves some loops by CALL to a label of the same function: that is a branch."""
        name = self.opcode.split(".", 1)[0]
        return "BRA" if name == "CALL" and LABEL.match(self.target + ":") else name


class Access(NamedTuple):
    """Bytes of global memory that a thread loads and stores."""

    loaded: int
    stored: int


class Path(NamedTuple):
    """What one thread executes: instructions, and their weight (1 where 128 lanes a cycle execute it)."""

    instructions: float
    weight: float

    def plus(self, other: Path, times: int = 1) -> Path:
        """This one, then ``other`` ``times``."""
        return Path(self.instructions + times * other.instructions, self.weight + times * other.weight)


@dataclass
class Block:
    """Instructions that are executed one after another, and the numbers of the blocks that may follow."""

    instructions: list[Instruction]
    after: list[int] = field(default_factory=list)

    @property
    def is_end(self) -> bool:
        """Whether a thread may end here."""
        return any(i.name == "EXIT" for i in self.instructions)

    @property
    def access(self) -> Access:
        """In accesses of at least four bytes."""
        sizes = [(i.name, access_nbytes(i)) for i in self.instructions]
        kept = [(name, nbytes) for name, nbytes in sizes if nbytes >= SMALLEST_ACCESS_NBYTES]
        return Access(sum(n for name, n in kept if name.startswith("LDG")), sum(n for name, n in kept if name == "STG"))

    def count(self, name: str) -> int:
        """How many instructions have this name."""
        return sum(i.name == name for i in self.instructions)


def access_nbytes(instruction: Instruction) -> int:
    """Bytes of a thread, of instructions that access memory; else 0."""
    if instruction.name not in ("LDG", "LDGSTS", "STG", "LDL", "STL"):
        return 0
    parts = instruction.opcode.split(".")[1:]
    return next((WIDTHS[part] for part in parts if part in WIDTHS), 4)


def parse_code(text: str) -> dict[str, Code]:
    """The functions in the output of ``nvdisasm -c``, by their names."""
    codes: dict[str, Code] = {}
    for section in re.split(r"^//-+ \.text\.", text, flags=re.MULTILINE)[1:]:
        codes[section.split(maxsplit=1)[0]] = Code(_blocks(section))
    return codes


def _blocks(section: str) -> list[Block]:
    blocks, labels = [Block([])], {}
    for line in section.splitlines():
        if label := LABEL.match(line):
            if blocks[-1].instructions:
                blocks.append(Block([]))
            labels[label[1]] = len(blocks) - 1
        if not (found := LINE.search(line)):
            continue
        target = TARGET.search(found[3])
        instruction = Instruction(found[1] or "", found[2], target[1] if target else "")
        if instruction.name == "NOP":
            continue
        blocks[-1].instructions.append(instruction)
        if instruction.name in ("BRA", "EXIT", "RET", "CALL"):
            blocks.append(Block([]))
    for number, block in enumerate(blocks):
        block.after = list(_after(number, block, labels, len(blocks)))
    return blocks


def _after(number: int, block: Block, labels: dict[str, int], num_blocks: int) -> Iterator[int]:
    last = block.instructions[-1] if block.instructions else Instruction("", "NOP", "")
    if last.name == "BRA" and last.target in labels:
        yield labels[last.target]
    # a branch that is not taken by a predicate among its operands has no predicate of its own only if it is uniform
    is_always = last.name in ("BRA", "EXIT", "RET") and not last.predicate and ".U" not in last.opcode
    if not is_always and number + 1 < num_blocks:
        yield number + 1


@dataclass
class Code:
    """One kernel."""

    blocks: list[Block]

    @property
    def instructions(self) -> list[Instruction]:
        """All of them, in their order."""
        return [i for block in self.blocks for i in block.instructions]

    @property
    def spilled_nbytes(self) -> int:
        """Bytes of a thread's registers that are stored to local memory."""
        return sum(access_nbytes(i) for i in self.instructions if i.name == "STL")

    def fast_path(
        self, wanted: Access, weigh: Callable[[Instruction], float], *, num_messages: int = 1, message_nbytes: int = 0
    ) -> Path | None:  # fmt: skip
        """What a thread executes for its part of a tile, or None if no path accesses just ``wanted``.

        ``wanted`` holds one message of ``num_messages``; each further one takes loads of ``message_nbytes`` in a loop.
        """
        search = _Search(self.blocks, weigh)
        loops = search.loops()
        turns = [search.best(loop.head, loop.last, wanted) for loop in loops]
        path = min((turn for turn in turns if turn is not None), default=search.best(0, None, wanted))
        if path is None:
            return None
        further = search.further(loops, message_nbytes, num_messages - 1)
        return None if further is None else path.plus(further)


class _Loop(NamedTuple):
    """The block where it begins, and the one that branches back there."""

    head: int
    last: int


@dataclass
class _Search:
    blocks: list[Block]
    weigh: Callable[[Instruction], float]

    def loops(self) -> list[_Loop]:
        """By branches to what stands before."""
        return [
            _Loop(after, number)
            for number, block in enumerate(self.blocks)
            for after in block.after
            if after <= number and block.instructions[-1].target
            and block.instructions[-1].name == "BRA" and not self._is_trap(block, number, after)
        ]  # fmt: skip

    @staticmethod
    def _is_trap(block: Block, number: int, after: int) -> bool:
        """The endless loop that pads a function."""
        return number == after and len(block.instructions) == 1

    def best(self, first: int, last: int | None, wanted: Access) -> Path | None:
        """The cheapest path from block ``first`` to the end of ``last``, or of the kernel, with accesses ``wanted``."""
        queue: list[tuple[float, float, int, Access]] = [(0.0, 0.0, first, Access(0, 0))]
        seen: set[tuple[int, Access]] = set()
        while queue:
            weight, instructions, number, access = heapq.heappop(queue)
            if (number, access) in seen:
                continue
            seen.add((number, access))
            block = self.blocks[number]
            if block.count("CALL"):
                continue
            weight += sum(map(self.weigh, block.instructions))
            instructions += len(block.instructions)
            here = block.access
            access = Access(access.loaded + here.loaded, access.stored + here.stored)
            if access.loaded > wanted.loaded or access.stored > wanted.stored:
                continue
            is_last = block.is_end if last is None else number == last
            if is_last and access == wanted:
                return Path(instructions, weight)
            for after in block.after:
                if after > number and (last is None or after <= last):
                    heapq.heappush(queue, (weight, instructions, after, access))
        return None

    def further(self, loops: list[_Loop], message_nbytes: int, num_messages: int) -> Path | None:
        """``num_messages`` more, in the loops that take four, or one, in a turn; None if no loop loads them."""
        total = Path(0, 0)
        for in_turn in (4, 2, 1):
            wanted = Access(in_turn * message_nbytes, 0)
            turns = [self.best(loop.head, loop.last, wanted) for loop in loops if num_messages >= in_turn]
            if found := [turn for turn in turns if turn is not None]:
                total = total.plus(min(found), num_messages // in_turn)
                num_messages %= in_turn
        return None if num_messages else total
