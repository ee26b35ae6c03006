"""``zero publish``: what a folder of published weights holds, whether all of it is whole, and one version as files."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from zero._checkpoint.durability import create_file, open_own
from zero._checkpoint.plain_weights import WeightsWriter
from zero._publish.manifest import Manifest, numbers_in, publication_path, read_layout, read_manifest, reading
from zero._publish.subscriber import ATTEMPTS, Subscriber, replayed
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
        return "".join(_lines(options.folder))
    if options.verify:
        read = _verified(options.folder)
        return f"{len(read)} publications are whole: versions {read[0].version} to {read[-1].version}\n"
    return _materialize(options.folder, options.materialize)


def _verified(folder: Path) -> list[Manifest]:
    """What is published in ``folder``, all of it read. It starts over if a training has pruned all that it looks at."""
    for attempt in range(ATTEMPTS):
        numbers = numbers_in(folder)
        try:
            return list(replayed(folder, {}, numbers))
        except PublicationError:
            if attempt == ATTEMPTS - 1 or not numbers or publication_path(folder, numbers[-1]).exists():
                raise
    raise AssertionError("the last attempt returns or raises")


def _lines(folder: Path) -> Iterator[str]:
    for number in numbers_in(folder):
        try:
            yield _line(folder, number)
        except PublicationError:
            if publication_path(folder, number).exists():  # else a training has pruned it
                raise


def _line(folder: Path, number: int) -> str:
    found = read_manifest(folder, number)
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(found.time))
    kinds = []
    if found.base is not None:
        kinds.append(f"patch of {found.base}: {len(found.changes)} chunks, {found.patch_nbytes} bytes")
    if found.digests is not None:
        kinds.append(f"snapshot: {read_layout(folder, found.layout).nbytes} bytes")
    return f"{number:>10}  version {found.version}  {written} UTC  run {found.run[:16]}  {'; '.join(kinds)}\n"


def _materialize(folder: Path, output: Path) -> str:
    weights: dict[str, Tensor] = {}
    Subscriber(folder, weights).update()
    writer = WeightsWriter(
        output / "model.safetensors", {name: (w.dtype, tuple(w.shape)) for name, w in weights.items()}
    )
    try:
        for name, values in weights.items():
            writer.write(name, values)
        paths = writer.finish()
    finally:
        writer.discard()
    for name in DOCUMENTS:
        # They are beside every snapshot.
        of_all = [publication_path(folder, number) / name for number in reversed(numbers_in(folder))]
        source = next((path for path in of_all if path.exists()), None)
        if source is not None and not (output / name).exists():
            with reading(source), open_own(source) as file, create_file(output / name) as copy:
                copy.write(file.read())
            paths.append(output / name)
    return "".join(f"{path}\n" for path in paths)
