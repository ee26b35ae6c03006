"""A path without ``latest`` is a fresh start, unless something else to load is there: then the path is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from zero._checkpoint.durability import is_shard_name
from zero.errors import CheckpointError

PICKLE = "load it with zero.load_pretrained(model, path)"
SAFETENSORS = "pass load_module_only=True to load weights alone"
DEEPSPEED = (
    "which DeepSpeed has saved as pickles: convert them to safetensors with the zero_to_fp32.py beside them "
    "(--safe_serialization), and pass that file or folder with load_module_only=True"
)
OF_TORCH = (
    "which torch.distributed.checkpoint has saved: load its weights with that, before the optimizer is constructed"
)
KINDS = (
    ("*zero_pp_rank_*", DEEPSPEED),
    ("*mp_rank_*", DEEPSPEED),
    (".metadata", OF_TORCH),
    ("*.distcp", OF_TORCH),
    ("*.safetensors", SAFETENSORS),
    ("pytorch_model*.bin", PICKLE),
)
"""What is recognized in a folder, the most specific first, and how it is loaded."""


def check_nothing_else(path: Path) -> None:
    """Raise if ``path``, which has no file ``latest``, is a file or holds files that other libraries load.

    Raises:
        CheckpointError: Names the first such file, and the remedy.

    Cost: a listing of the folder. Other files, such as logs, are no reason; neither are checkpoints in it.
    """
    found = next(_others(path), None)
    if found is not None:
        raise CheckpointError(f"{path} has no file 'latest', so it is not what checkpoints were saved to: {found}")


def _others(path: Path) -> Iterator[str]:
    if path.is_file():
        yield f"it is a file; {SAFETENSORS if path.suffix == '.safetensors' else PICKLE}, or pass the folder"
    if any(is_shard_name(file.name) for file in path.glob("shard_*")):
        yield f"it is one checkpoint of them; pass {path.absolute().parent} and tag={path.absolute().name!r}"
    for pattern, remedy in KINDS:
        for file in sorted(path.glob(pattern)):
            yield f"it holds {file.name}; {remedy}. If there are checkpoints beside it, pass tag="
