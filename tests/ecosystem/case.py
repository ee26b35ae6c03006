"""What a script of others is for :mod:`tests.ecosystem.run`: where it comes from, how it starts, which lines differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import ndiff
from pathlib import Path
from typing import Any

SOURCES = {
    "DeepSpeedExamples": "https://github.com/deepspeedai/DeepSpeedExamples",
    "accelerate": "https://github.com/huggingface/accelerate",
    "transformers": "https://github.com/huggingface/transformers",
    "nanoGPT": "https://github.com/karpathy/nanoGPT",
    "minGPT": "https://github.com/karpathy/minGPT",
    "examples": "https://github.com/pytorch/examples",
    "denoising-diffusion-pytorch": "https://github.com/lucidrains/denoising-diffusion-pytorch",
    "pytorch-image-models": "https://github.com/huggingface/pytorch-image-models",
    "pytorch-lightning": "https://github.com/Lightning-AI/pytorch-lightning",
}
INSTALLED = ("trl",)
"""Packages whose scripts are installed with them."""


@dataclass(frozen=True)
class Change:
    """Lines of a script that differ: ``old`` occurs once in the file, and becomes ``new``, with {stage} filled in."""

    file: str
    old: str
    new: str

    @property
    def num_lines(self) -> int:
        """Lines that are new or gone, whichever are more."""
        marks = [one[0] for one in ndiff(self.old.splitlines(), self.new.splitlines())]
        return max(marks.count("+"), marks.count("-"))


@dataclass(frozen=True)
class Case:
    """One script. In ``arguments`` and ``environment`` {stage}, {config}, {out}, {folder} and {root} are filled in."""

    name: str
    source: str
    folder: str
    script: str
    loss: str
    """A regular expression with one group, searched in each line of rank 0's output."""
    arguments: str = ""
    stages: tuple[int | str, ...] = (2, 3)
    """Of ZeRO, or "DDP" or "FSDP2" where a line installs formats in these."""
    config: dict[str, Any] | None = None
    """The JSON at {config}; its stage is filled in."""
    material: tuple[Callable[[Path], None], ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    beside: str = ""
    """"plain": the script under plain_ddp.py; "own": the script's own DDP or FSDP2; "": nothing."""
    own_arguments: str | None = None
    own_environment: dict[str, str] | None = None
    """None: as of the other runs."""
    own_uses_door: bool = False
    """The script imports names of DeepSpeed even where it does not train with it."""
    formats: dict[str, Any] | None = None
    """Keys of ``zero_optimization`` with which bytes are compared, at the last stage."""
    everywhere: tuple[Change, ...] = ()
    """Lines that every run needs, the plain one as well: sizes, a CPU in place of CUDA, a loss that is printed."""
    changes: tuple[Change, ...] = ()
    """Our lines. Without any the script runs through the door."""
    own_changes: tuple[Change, ...] = ()
    """Those of the run over the script's own DDP."""
    uncompressed: tuple[Change, ...] = ()
    """On top of ``changes``: our transport without formats, for the ratio of bytes."""
    compressed: tuple[Change, ...] = ()
    """On top of ``changes``: our transport with formats, for the ratio of bytes."""
    ranks: int = 2
    local_rank: bool = False
    """Pass --local_rank=N, as DeepSpeed's launcher does."""
    needs: tuple[str, ...] = ()
    old_transformers: bool = False
    """Uses names that transformers 5 does not have: needs --transformers4."""
    falls: bool = True
    """Whether the loss is expected to fall in these few steps."""
    note: str = ""

    @property
    def is_compared(self) -> bool:
        """Whether bytes with formats are compared with those without."""
        return bool(self.formats is not None or self.uncompressed or self.compressed)

    def sends(self, stage: int | str) -> bool:
        """Whether the library must have sent something: else a front end has left it aside."""
        return self.ranks > 1 and stage != 0 and self.falls

    @property
    def num_lines(self) -> str:
        """Our lines, and in parentheses those that differ in the plain run, too."""
        ours, both = (sum(one.num_lines for one in those) for those in (self.changes, self.everywhere))
        return f"{ours} (+{both})" if both else str(ours)
