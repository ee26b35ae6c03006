"""Parse machine code: find instructions, basic blocks, and the fast path of a tile.

The fast path is the cheapest path from the kernel's entry to its end (from the head of its loop over tiles to that
loop's end, if it has one) on which a thread loads and stores exactly the bytes of its part of a tile, in accesses of
four bytes and more. That excludes the division of unusual numbers, accesses of single elements, and the ends of
messages. A loop over messages is on the path once for each further message.
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
    """An instruction with its predicate and its target label; either may be an empty string."""

    predicate: str
    opcode: str
    target: str

    @property
    def name(self) -> str:
        """The opcode without modifiers. ptxas leaves some loops by CALL to a label of the same function: a branch."""
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
        """Return this path followed by ``times`` times ``other``."""
        return Path(self.instructions + times * other.instructions, self.weight + times * other.weight)


@dataclass
class Block:
    """A basic block, with the numbers of the blocks that may follow."""

    instructions: list[Instruction]
    after: list[int] = field(default_factory=list)

    @property
    def is_end(self) -> bool:
        """Whether a thread may end here."""
        return any(i.name == "EXIT" for i in self.instructions)

    @property
    def access(self) -> Access:
        """Bytes in accesses of at least four bytes."""
        sizes = [(i.name, access_nbytes(i)) for i in self.instructions]
        kept = [(name, nbytes) for name, nbytes in sizes if nbytes >= SMALLEST_ACCESS_NBYTES]
        return Access(sum(n for name, n in kept if name.startswith("LDG")), sum(n for name, n in kept if name == "STG"))

    def count(self, name: str) -> int:
        """Count the instructions with this name."""
        return sum(i.name == name for i in self.instructions)


def access_nbytes(instruction: Instruction) -> int:
    """Return the bytes that a thread accesses in memory; 0 for other instructions."""
    if instruction.name not in ("LDG", "LDGSTS", "STG", "LDL", "STL"):
        return 0
    parts = instruction.opcode.split(".")[1:]
    return next((WIDTHS[part] for part in parts if part in WIDTHS), 4)


def parse_code(text: str) -> dict[str, Code]:
    """Parse the output of ``nvdisasm -c`` to functions by name."""
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
    # a uniform branch (.U) has its predicate among its operands, not in front, and may fall through
    is_always = last.name in ("BRA", "EXIT", "RET") and not last.predicate and ".U" not in last.opcode
    if not is_always and number + 1 < num_blocks:
        yield number + 1


@dataclass
class Code:
    """The code of one kernel."""

    blocks: list[Block]

    @property
    def instructions(self) -> list[Instruction]:
        """All instructions, in order."""
        return [i for block in self.blocks for i in block.instructions]

    @property
    def spilled_nbytes(self) -> int:
        """Bytes of a thread's registers that are stored to local memory."""
        return sum(access_nbytes(i) for i in self.instructions if i.name == "STL")

    def fast_path(
        self, wanted: Access, weigh: Callable[[Instruction], float], *, num_messages: int = 1, message_nbytes: int = 0
    ) -> Path | None:  # fmt: skip
        """Return what a thread executes for its part of a tile, or None if no path accesses exactly ``wanted``.

        ``wanted`` holds one message of ``num_messages``; each further one takes loads of ``message_nbytes`` in a loop.
        """
        search = _Search(self.blocks, weigh)
        loops = search.loops()
        found = [search.best(loop.head, loop.last, wanted) for loop in loops]
        path = min((path for path in found if path is not None), default=search.best(0, None, wanted))
        if path is None:
            return None
        further = search.further(loops, message_nbytes, num_messages - 1)
        return None if further is None else path.plus(further)


class _Loop(NamedTuple):
    """The first block of a loop, and the block that branches back to it."""

    head: int
    last: int


@dataclass
class _Search:
    blocks: list[Block]
    weigh: Callable[[Instruction], float]

    def loops(self) -> list[_Loop]:
        """Find the loops by their backward branches."""
        return [
            _Loop(after, number)
            for number, block in enumerate(self.blocks)
            for after in block.after
            if after <= number and block.instructions[-1].target
            and block.instructions[-1].name == "BRA" and not self._is_trap(block, number, after)
        ]  # fmt: skip

    @staticmethod
    def _is_trap(block: Block, number: int, after: int) -> bool:
        """Whether it is the endless loop that pads a function."""
        return number == after and len(block.instructions) == 1

    def best(self, first: int, last: int | None, wanted: Access) -> Path | None:
        """Find the cheapest path from ``first`` to the end of ``last`` or the kernel, with accesses ``wanted``."""
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
        """Return the path of ``num_messages`` more, in loops over 4, 2 or 1 messages; None without such loops."""
        total = Path(0, 0)
        for at_once in (4, 2, 1):
            wanted = Access(at_once * message_nbytes, 0)
            paths = [self.best(loop.head, loop.last, wanted) for loop in loops if num_messages >= at_once]
            if found := [path for path in paths if path is not None]:
                total = total.plus(min(found), num_messages // at_once)
                num_messages %= at_once
        return None if num_messages else total
