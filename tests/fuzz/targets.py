"""The Python targets of the fuzzer: each reader with its file, and the errors it may raise."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

import zero
from tests.zero.test_golden_checkpoints import FOLDER, new_inner, new_small
from zcomm import ConfigError, LayoutError, ZcommError
from zcomm._bench import options
from zcomm._collectives.auto_format import FormatTable
from zcomm._formats.formats import get_format
from zcomm._formats.recipes import get_recipe
from zero import CheckpointError
from zero._checkpoint.export import export_checkpoint
from zero._checkpoint.index import UNREADABLE, read_index
from zero._checkpoint.json_tree import decode
from zero._checkpoint.plain_weights import index_of_weights
from zero._config import explain, read_source
from zero._storage.pretrained_reader import open_tensors
from zero._storage.safetensors_file import read_header
from zero.cli import main
from zero.plan import command

RELEASE = FOLDER / "0.1.0" / "stage1"


class Target(NamedTuple):
    """One reader that is fuzzed."""

    run: Callable[[bytes], object]
    errors: tuple[type[BaseException], ...]


def _checksummed(text: bytes) -> bytes:
    """A file as an attacker would write it: its checksum is right."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return text
    plain = json.dumps(content, sort_keys=True, separators=(",", ":"))
    document = {"format": "zero-checkpoint", "version": 1, "crc32": zlib.crc32(plain.encode()), "content": content}
    return json.dumps(document).encode()


def make_targets(folder: Path) -> dict[str, Target]:  # noqa: C901 (a function for each target)
    """Return all targets, which keep their files below ``folder``."""
    tag = folder / "checkpoints" / "stage1"
    shutil.copytree(RELEASE, tag)
    logging.getLogger("zero").setLevel(logging.ERROR)
    known = [_optimizer()]

    def write(name: str, data: bytes) -> Path:
        path = folder / name
        path.write_bytes(data)
        return path

    def config(data: bytes) -> None:
        explain(read_source(write("ds.json", data)), world_size=4)

    def manifest(data: bytes) -> None:
        (tag / "metadata.json").write_bytes(_checksummed(data))
        read_index(tag)
        export_checkpoint(tag, folder / "out.safetensors")

    def checkpoint(data: bytes) -> None:
        (tag / "metadata.json").write_bytes(_checksummed(data))
        try:
            zero.load_checkpoint(known[0], folder / "checkpoints", "stage1")
        except CheckpointError as error:
            if "anew" in str(error):
                known[0].close()
                known[0] = _optimizer()
            raise

    def safetensors(data: bytes) -> None:
        path = write("a.safetensors", data)
        with contextlib.suppress(LayoutError):
            for read in open_tensors(path).values():
                read()
        read_header(path)

    def index(data: bytes) -> None:
        path = write("model.safetensors.index.json", data)
        with contextlib.suppress(LayoutError):
            open_tensors(path)
        index_of_weights(path, known[0].parts)

    def probe(data: bytes) -> None:
        path = write("probe.json", data)
        FormatTable.parse("probe.json", data.decode(errors="replace"), shape="2x2 on 1 host")
        with patch.object(command, "probe_path", lambda: path):
            command._probed_links()

    def tree(data: bytes) -> None:
        stored = {"tree.0": torch.zeros(6), "tree.1": torch.zeros(4, dtype=torch.uint8)}
        decode(json.loads(data), lambda key: stored[key])

    return {
        "config": Target(config, (ConfigError,)),
        "manifest": Target(manifest, (CheckpointError,)),
        "checkpoint": Target(checkpoint, (CheckpointError,)),
        "safetensors": Target(safetensors, (CheckpointError,)),
        "index": Target(index, (CheckpointError, FileNotFoundError)),
        "probe": Target(probe, (ConfigError,)),
        "format": Target(_format, (ZcommError, argparse.ArgumentTypeError)),
        "command": Target(_command, (SystemExit, ConfigError)),
        # what its caller turns into CheckpointError
        "tree": Target(tree, (CheckpointError, RuntimeError, *UNREADABLE)),
    }


def _optimizer() -> zero.ZeroOptimizer:
    model = new_small(seed=0)
    return zero.ZeroOptimizer(model, new_inner(model), stage=1)


def _format(data: bytes) -> None:
    text = data.decode(errors="replace")
    for parse in (get_format, get_recipe, options._parse_size, options._wires):
        with contextlib.suppress(ZcommError, argparse.ArgumentTypeError):
            parse(text)


def _command(data: bytes) -> None:
    words: list[Any] = data.decode(errors="replace").replace("\0", "").split()
    if not words or words[0] not in ("plan", "estimate", "export") or "--probe" in words or "--plot" in words:
        return
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        if words[0] != "plan":
            main(words)
            return
        parser = argparse.ArgumentParser()
        command.add_plan(parser)
        chosen = parser.parse_args(words[1:])
        command._model_of(chosen), command._cluster_of(chosen)
