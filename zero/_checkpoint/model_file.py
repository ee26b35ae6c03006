"""Save the weights of a model in training as safetensors or with torch.save: ``engine.save_16bit_model``."""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

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
    """Write the parameters, in their dtypes, and the buffers of the model. Collective; the first rank writes.

    Args:
        optimizer: The optimizer of the model.
        path: ``*.safetensors`` is written bucket by bucket, tied weights once; any other name by ``torch.save`` of the
            full ``model.state_dict()``.
        exclude_frozen_parameters: Leave out frozen parameters.

    Raises:
        CheckpointError: The file cannot be written, or several model-parallel ranks, which hold different parts of the
            model, have the same ``path``. The same on every rank.
        DivergedError: As for :func:`zero.save_checkpoint`, on the ranks of one part of the model.

    Memory of the first rank: one bucket, or for ``torch.save`` the full model.
    """
    runtime, error = optimizer.parts.runtime, None
    _check_own_path(path, optimizer.parts.model_parallel)
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
            f"each of the {len(names)} model-parallel ranks must write its part of the model to a path of its own: "
            f"{path} is the path of several; put the rank into its name"
        )


def _write_safetensors(runtime: Runtime, path: Path, chosen: set[str]) -> None:
    buffers = named_buffers(runtime.model)
    slots = [(bucket.dtype, slot) for bucket in runtime.buckets for slot in bucket.layout.slots]
    layout: Layout = {
        **{slot.name: (dtype, slot.shape) for dtype, slot in slots if slot.name in chosen},
        **{name: (buffer.dtype, tuple(buffer.shape)) for name, buffer in buffers.items()},
    }
    writer, failures = None, list[CheckpointError]()
    with _collecting(failures):
        writer = WeightsWriter(path, layout) if runtime.topology.rank == 0 else None
    for name, value in _values(runtime, chosen):  # collective: must go on after an error, or deadlock
        if writer is not None and not failures:
            with _collecting(failures):
                writer.write(name, value)
        del value  # a view of a buffer that goes back to the pool
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
    except Exception as error:  # the other ranks are in the next gather: they get the error at the end
        failures.append(CheckpointError(f"the model could not be written: {error!r}"))


def _values(runtime: Runtime, chosen: set[str]) -> Iterator[tuple[str, Tensor]]:
    """The full parameters, one bucket at a time, then the buffers. Collective."""
    for bucket in runtime.buckets:
        with runtime.exact(bucket) as values:
            for index, slot in enumerate(bucket.layout.slots):
                if slot.name in chosen:
                    yield slot.name, values[index]
    yield from named_buffers(runtime.model).items()


def _write_pickle(runtime: Runtime, path: Path, chosen: set[str]) -> None:
    slots = [pair for b in runtime.buckets for pair in zip(b.params, b.layout.slots, strict=True)]
    with runtime.state_dicts.saving(param for param, slot in slots if slot.name not in chosen):
        kept = dict(runtime.model.state_dict())
    if runtime.topology.rank != 0:
        return
    try:
        make_folder(path.parent)
        with replacing(path, secrets.token_hex(4)) as file:
            torch.save(kept, file)
    except Exception as error:  # torch's writer wraps OSError, and pickle has errors of its own
        raise CheckpointError(f"{path} could not be written: {error}") from error
