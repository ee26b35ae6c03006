"""``zero publish``: what a folder of published weights holds, whether all of it is whole, and one version as files."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from torch import Tensor

from zero._checkpoint.durability import create_file, open_own
from zero._checkpoint.plain_weights import WeightsWriter
from zero._publish.manifest import Manifest, numbers_in, publication_path, read_layout, read_manifest, reading
from zero._publish.subscriber import replayed
from zero.errors import PublicationError

DOCUMENTS = ("config.json", "generation_config.json")


def add_publish(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="the folder of a zero.Publisher")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--inspect", action="store_true", help="list its publications")
    what.add_argument("--verify", action="store_true", help="read all of them, and check every bit")
    what.add_argument("--materialize", metavar="OUT", type=Path, help="write the newest as safetensors to folder OUT")


def run(options: argparse.Namespace) -> str:
    """What the command prints.

    Raises:
        PublicationError: The folder has no publication, or one that cannot be read.
        CheckpointError: The files of ``--materialize`` cannot be written.
    """
    if not numbers_in(options.folder):
        raise PublicationError(f"nothing is published in {options.folder}")
    if options.inspect:
        return "".join(_line(options.folder, number) for number in numbers_in(options.folder))
    weights: dict[str, Tensor] = {}
    read = list(replayed(options.folder, weights))
    if not read or read[-1].number != numbers_in(options.folder)[-1]:
        raise PublicationError(f"{options.folder} has no snapshot that leads to its newest publication")
    if options.verify:
        return f"{len(read)} publications are whole: versions {read[0].version} to {read[-1].version}\n"
    return _materialize(options.folder, options.materialize, read, weights)


def _line(folder: Path, number: int) -> str:
    found = read_manifest(folder, number)
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(found.time))
    kinds = []
    if found.base is not None:
        kinds.append(f"patch of {found.base}: {len(found.changes)} chunks, {found.patch_nbytes} bytes")
    if found.digests is not None:
        kinds.append(f"snapshot: {read_layout(folder, found.layout).nbytes} bytes")
    return f"{number:>10}  version {found.version}  {written} UTC  run {found.run[:16]}  {'; '.join(kinds)}\n"


def _materialize(folder: Path, output: Path, read: list[Manifest], weights: dict[str, Tensor]) -> str:
    writer = WeightsWriter(
        output / "model.safetensors", {name: (w.dtype, tuple(w.shape)) for name, w in weights.items()}
    )
    try:
        for name, values in weights.items():
            writer.write(name, values)
        paths = writer.finish()
    finally:
        writer.discard()
    snapshot = next(manifest for manifest in reversed(read) if manifest.digests is not None)
    for name in DOCUMENTS:
        source = publication_path(folder, snapshot.number) / name
        if source.exists() and not (output / name).exists():
            with reading(source), open_own(source) as file, create_file(output / name) as copy:
                copy.write(file.read())
            paths.append(output / name)
    return "".join(f"{path}\n" for path in paths)
