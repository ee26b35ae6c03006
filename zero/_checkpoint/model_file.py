"""The weights of a living model as one file, or as safetensors of limited size."""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from zero._access.auto_tiling import rows_by_key
from zero._checkpoint.durability import make_folder, replacing
from zero._checkpoint.flat_parts import named_buffers
from zero._checkpoint.plain_weights import Layout, WeightsWriter
from zero._ranks.collective_calls import collective
from zero._ranks.model_parallel import ModelParallel
from zero._ranks.rank_errors import raise_first
from zero._runtime.runtime import Runtime
from zero.errors import CheckpointError
from zero.optimizer import ZeroOptimizer


@collective("exclude_frozen_parameters", of=lambda optimizer: optimizer.topology, alone=True)
def save_model_file(optimizer: ZeroOptimizer, path: Path, *, exclude_frozen_parameters: bool = False) -> None:
    """Write the parameters, in their dtypes, and the buffers of the model; collective. The first rank writes.

    Args:
        optimizer: Of the model.
        path: ``*.safetensors`` is written bucket by bucket, tied weights once; any other name by ``torch.save`` of the
            whole ``model.state_dict()``.
        exclude_frozen_parameters: Leave frozen parameters out.

    Raises:
        CheckpointError: The file cannot be written, or two model-parallel ranks, which hold different parts of the
            model, are to write the same; the same on every rank.
        DivergedError: As for :func:`zero.save_checkpoint`, on the ranks of one part of the model.

    Memory of the first rank: one bucket, or for ``torch.save`` the whole model.
    """
    runtime, error = optimizer.inside.runtime, None
    _check_own_path(path, optimizer.inside.model_parallel)
    runtime.reducer.facts.check(runtime.topology)
    chosen = {
        s.name for b in runtime.buckets for s in b.layout.slots if b.is_trainable or not exclude_frozen_parameters
    }
    try:
        if path.suffix == ".safetensors":
            _write_safetensors(runtime, path, chosen)
        else:
            _write_pickle(runtime, path, chosen)
    except CheckpointError as caught:
        error = caught
    raise_first(error, CheckpointError, runtime.topology)


def _check_own_path(path: Path, model_parallel: ModelParallel) -> None:
    names = model_parallel.gather(float(zlib.crc32(os.fsencode(path.absolute()))))
    if len(set(names)) < len(names):
        raise CheckpointError(
            f"{path} would be written by several of {len(names)} model-parallel ranks, each of which holds a part of "
            "the model: give each a path of its own, for example with its rank in it"
        )


def _write_safetensors(runtime: Runtime, path: Path, chosen: set[str]) -> None:
    buffers = named_buffers(runtime.model)
    layout: Layout = {
        **_layout_of_parameters(runtime, chosen),
        **{name: (buffer.dtype, tuple(buffer.shape)) for name, buffer in buffers.items()},
    }
    writer, failures = None, list[CheckpointError]()
    with _collecting(failures):
        writer = WeightsWriter(path, layout) if runtime.topology.rank == 0 else None
    for name, value in _values(runtime, chosen):  # gathered on every rank, whatever happens to the file
        if writer is not None and not failures:
            with _collecting(failures):
                writer.write(name, value)
        del value  # of a buffer that goes back to the pool
    if writer is not None:
        with _collecting(failures):
            if not failures:
                writer.finish()
        writer.discard()
    if failures:
        raise failures[0]


@contextmanager
def _collecting(failures: list[CheckpointError]) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        failures.append(error)
    except Exception as error:  # the others wait for the first rank
        failures.append(CheckpointError(f"the model could not be written: {error!r}"))


def _layout_of_parameters(runtime: Runtime, chosen: set[str]) -> Layout:
    whole_of = {part.key: (key, rows[-1].stop) for key, rows in rows_by_key(runtime.model).items() for part in rows}
    layout = {}
    for bucket in runtime.buckets:
        for slot in bucket.layout.slots:
            if slot.name in chosen:
                name, num_rows = whole_of.get(slot.name, (slot.name, 0))
                layout[name] = bucket.dtype, (num_rows, *slot.shape[1:]) if num_rows else slot.shape
    return layout


def _values(runtime: Runtime, chosen: set[str]) -> Iterator[tuple[str, Tensor]]:
    """The whole parameters, one bucket at a time, then the buffers. Collective.

    Of a layer in tiles: its weight, tile after tile, then its bias, of which those of the tiles are kept till then.
    """
    tiles = {part.key: (key, part, rows[-1].stop) for key, rows in rows_by_key(runtime.model).items() for part in rows}
    waiting: dict[str, list[Tensor]] = {}
    for bucket in runtime.buckets:
        with runtime.exact(bucket) as values:
            for index, slot in enumerate(bucket.layout.slots):
                if slot.name not in chosen:
                    continue
                if slot.name not in tiles or len(slot.shape) > 1:
                    yield tiles[slot.name][0] if slot.name in tiles else slot.name, values[index]
                    continue
                key, part, num_rows = tiles[slot.name]
                waiting.setdefault(key, []).append(values[index].clone())
                if part.stop == num_rows:
                    yield key, torch.cat(waiting.pop(key))
    yield from named_buffers(runtime.model).items()


def _write_pickle(runtime: Runtime, path: Path, chosen: set[str]) -> None:
    slots = [pair for b in runtime.buckets for pair in zip(b.params, b.layout.slots, strict=True)]
    with runtime.saving_weights(param for param, slot in slots if slot.name not in chosen):
        kept = dict(runtime.model.state_dict())
    if runtime.topology.rank != 0:
        return
    try:
        make_folder(path.parent)
        with replacing(path, secrets.token_hex(4)) as file:
            torch.save(kept, file)
    except Exception as error:  # torch's writer hides the system's error, pickle has errors of its own
        raise CheckpointError(f"{path} could not be written: {error}") from error
