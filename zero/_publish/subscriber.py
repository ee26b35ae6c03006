"""``zero.Subscriber``: in any process, keep a model or a state dict at the newest published version.

    newest > own?  patches in order, each: decode into memory of its own -> digests -> copy into the weights
                   the newest snapshot instead, if there is no way by patches, or it has fewer bytes; then patches

Weights are written only after all that a patch changes, or a snapshot holds, was verified, and then copied to the end:
an interrupt within the copy is raised after the copy was repeated, which gives the same values. What no patch changes
is not read again: ``verify()`` compares it, too. So between calls the weights are
those of one version, the last good one.

Reading takes no lock. Publications are complete when they are seen, and vanish as a whole when they are pruned: what a
subscriber cannot read any more it looks for again.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zcomm import LayoutError, MessageError, StateError
from zcomm._base.rank_context import clock
from zcomm._kernels import ulps
from zero._model.model_checks import has_memory
from zero._publish.manifest import (
    CODED,
    MAX_DOCUMENT_NBYTES,
    Manifest,
    PublishedChunk,
    PublishedLayout,
    max_document_nbytes,
    numbers_in,
    patch_name,
    patch_offsets,
    publication_path,
    read_layout,
    read_manifest,
    root_of,
)
from zero._publish.snapshot_files import SnapshotReader, read_into
from zero._sharding.bucket import is_managed
from zero._storage.safetensors_file import as_bytes
from zero.errors import PublicationError

ATTEMPTS = 3
"""How often an update starts over because the folder has changed meanwhile."""

IS_EXTRA_STATE = re.compile(r"(^|\.)_extra_state$")
"""What ``get_extra_state()`` of a module returns has such a name in a state dict. It is not published."""


class _NewVersion(NamedTuple):
    """Verified values, on their way into the weights."""

    manifest: Manifest
    layout: PublishedLayout
    digests: list[str]
    values: list[tuple[PublishedChunk, Tensor]]


class Subscriber:
    """Follows the weights that a :class:`zero.Publisher` writes to ``folder``. It needs no process group.

    Args:
        folder: The publisher's. It may not exist yet.
        target: A model, or tensors by the names of the model's state dict, contiguous, on any device, whose dtypes and
            shapes are the published ones. Tensors with the memory of another one (tied weights) may be extra. An empty
            dict is filled.
        lock: Held while weights are written, a part of :meth:`update` without file access; for example a
            ``threading.Lock`` that requests of a server hold while they compute. Entered again for every version that
            is copied, so not the one-time object that a ``@contextmanager`` function returns.

    Not for several threads at once. Memory: host memory for what an update changes, at most one copy of the weights.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        target: nn.Module | Mapping[str, Tensor],
        *,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self._folder, self._target = Path(folder).absolute(), target
        self._lock = nullcontext() if lock is None else lock
        self._now: Manifest | None = None
        self._layout: PublishedLayout | None = None
        self._digests: list[str] = []
        self._next: _NewVersion | None = None
        self._names: dict[str, None] = {}

    @property
    def version(self) -> int | None:
        """The version of the weights; None before the first update."""
        return None if self._now is None else self._now.version

    def update(self) -> list[str]:
        """Bring the weights to the newest version, if they are not there yet.

        Returns:
            The names of the tensors that were written since the names were returned last, those of calls that raised
            among them; none if nothing is published, or nothing new.

        Raises:
            PublicationError: The newest version cannot be reached: what it needs is missing, damaged, of another run,
                or of another version of the format. The weights are those of :attr:`version`, the best that can be
                reached. The next call tries again.
            LayoutError: The target has other tensors, dtypes or shapes than what is published, ties tensors that were
                published apart, is on the meta device, or is a model whose state dict has copies. It is unchanged.
            StateError: A ZeroOptimizer manages the target: its next step would write its own weights over these.

        Cost if nothing is new: the names in the folder, and one manifest.
        """
        self._write()  # what an interrupt has left
        for attempt in range(ATTEMPTS):
            numbers = numbers_in(self._folder)
            try:
                if numbers:
                    self._follow(numbers)
                break
            except PublicationError:
                if attempt == ATTEMPTS - 1 or numbers_in(self._folder) == numbers:
                    raise
        names, self._names = list(self._names), {}
        return names

    def wait(self, timeout: float, *, poll_s: float = 0.1) -> list[str]:
        """:meth:`update` as soon as there is something new; looks every ``poll_s`` seconds, ``timeout`` at most."""
        end, before = clock().monotonic() + timeout, self._now
        while True:
            names = self.update()
            if names or self._now is not before or clock().monotonic() >= end:
                return names
            clock().sleep(poll_s)

    def verify(self) -> None:
        """Compare all bits of the weights with those that were published.

        Raises:
            PublicationError: There is no version yet, or a tensor has been changed here. The next update takes the
                newest snapshot.
        """
        layout = self._layout
        if self._now is None or layout is None:
            raise PublicationError(f"no version of {self._folder} has been read: call update()")
        tensors = self._tensors(layout)
        for chunk, digest in zip(layout.chunks, self._digests, strict=True):
            if _digest_of(_copy_of(chunk, tensors)) != digest:
                name, self._now = chunk.pieces[0].name, None
                raise PublicationError(f"{name!r}, or a tensor beside it, was changed since it was read: call update()")

    def _follow(self, numbers: list[int]) -> None:
        """Reach the newest of ``numbers``, by patches or from a snapshot.

        Raises:
            PublicationError: See :meth:`update`.
        """
        reached = self._reached(numbers)
        manifests, trouble = self._manifests([number for number in numbers if number > reached])
        snapshots: list[Manifest | None] = [m for m in reversed(manifests) if m.digests is not None]
        # First the way with the fewest bytes; None: by patches from here.
        by_patches = 1 if snapshots and self._is_shorter(snapshots[0], manifests) else 0
        for start in [*snapshots[:by_patches], None, *snapshots[by_patches:]]:
            before = self._now
            try:
                if start is not None and start.number > reached:
                    self._load(start)
                for manifest in self._way(manifests):
                    self._apply(manifest)
            except PublicationError as error:
                trouble = trouble or error
            if self._now is not None and self._now is not before:
                reached = self._now.number
            if reached == numbers[-1]:
                return
        reason = trouble or "a patch is missing, and there is no later snapshot"
        raise PublicationError(
            f"{self._folder}: publication {numbers[-1]} cannot be reached, the weights stay at version {self.version}: "
            f"{reason}"
        ) from trouble

    def _reached(self, numbers: list[int]) -> int:
        """The number of the weights' publication; -1 if the folder was emptied since, and has others by now."""
        if self._now is None or self._now.number > numbers[-1]:
            return -1
        try:
            run = self._manifest(self._now.number).run
        except PublicationError:  # pruned
            return self._now.number
        return self._now.number if run == self._now.run else -1

    def _manifests(self, numbers: list[int]) -> tuple[list[Manifest], PublicationError | None]:
        """The manifests that can be read, and the error of the newest that cannot."""
        found, trouble = [], None
        for number in numbers:
            try:
                found.append(self._manifest(number))
            except PublicationError as error:
                trouble = error
        return found, trouble

    def _manifest(self, number: int) -> Manifest:
        return read_manifest(self._folder, number, self._max_document_nbytes())

    def _max_document_nbytes(self) -> int:
        given = self._given()
        return max_document_nbytes(given) if given else MAX_DOCUMENT_NBYTES

    def _way(self, manifests: list[Manifest]) -> list[Manifest]:
        """The patches that lead on from the version of the weights, as far as they do."""
        way, at = list[Manifest](), self._now
        for manifest in manifests:
            if at is not None and (manifest.base, manifest.run) == (at.number, at.run):
                way.append(manifest)
                at = manifest
        return way

    def _is_shorter(self, snapshot: Manifest | None, manifests: list[Manifest]) -> bool:
        """Whether ``snapshot`` has fewer bytes than the patches that lead to it, or there are none."""
        assert snapshot is not None, "a snapshot is asked for"
        way = [manifest for manifest in self._way(manifests) if manifest.number <= snapshot.number]
        leads_there = bool(way) and way[-1].number == snapshot.number
        is_known = self._layout is not None and self._layout.nbytes < sum(m.patch_nbytes for m in way)
        return is_known or not leads_there

    def _load(self, manifest: Manifest) -> None:
        """Take a snapshot."""
        layout, digests = (
            read_layout(self._folder, manifest.layout, self._max_document_nbytes()),
            list(manifest.digests or ()),
        )
        if len(digests) != len(layout.chunks) or root_of(digests) != manifest.root:
            raise PublicationError(f"the digests of publication {manifest.number} do not fit each other")
        self._check_fit(layout)
        path = publication_path(self._folder, manifest.number)
        reader, values = SnapshotReader(path, layout), []
        for chunk, digest in zip(layout.chunks, digests, strict=True):
            read = reader.read(chunk)
            if _digest_of(read) != digest:
                raise PublicationError(f"{path} is damaged: {chunk.pieces[0].name!r} does not have its digest")
            values.append((chunk, read))
        self._next = _NewVersion(manifest, layout, digests, values)
        self._write()

    def _apply(self, manifest: Manifest) -> None:
        """Take the patch whose base the weights are."""
        layout, digests, values = self._layout, list(self._digests), []
        if layout is None or layout.digest != manifest.layout:
            raise PublicationError(f"publication {manifest.number} has another layout than its base")
        self._check_fit(layout)
        path, tensors = publication_path(self._folder, manifest.number), self._tensors(layout)
        for change, chunk, at in patch_offsets(layout, manifest):
            file = path / patch_name(chunk.rank)
            message = torch.empty(change.nbytes, dtype=torch.uint8, device="cpu")
            read_into(as_bytes(message), file, at)
            new = _decoded(message, chunk, tensors, file)
            digests[change.number] = _digest_of(new)
            if digests[change.number] != change.digest:
                raise PublicationError(
                    f"{file} does not give {chunk.pieces[0].name!r} its digest: the patch is damaged, or the weights "
                    "were changed here"
                )
            values.append((chunk, new))
        if root_of(digests) != manifest.root:
            raise PublicationError(f"publication {manifest.number} does not give the weights their digest")
        self._next = _NewVersion(manifest, layout, digests, values)
        self._write()

    def _write(self) -> None:
        """Copy verified values into the weights. An interrupt is raised after the copy."""
        with self._lock if self._next is not None else nullcontext():
            try:
                self._copy()
            except BaseException:
                self._copy()
                raise

    @torch.inference_mode()  # tensors that were made in it can be written nowhere else
    def _copy(self) -> None:
        if self._next is None:
            return
        manifest, layout, digests, values = self._next
        tensors = self._tensors(layout)
        for chunk, new in values:
            at = 0
            for name, start, stop in chunk.pieces:
                tensors[name][start:stop].copy_(new[at : at + stop - start])
                at += stop - start
                self._names[name] = None
        self._now, self._layout, self._digests = manifest, layout, digests
        self._next = None

    def _given(self) -> Mapping[str, Tensor]:
        """The target's tensors.

        Raises:
            StateError: A ZeroOptimizer manages them.
        """
        target = self._target
        if any(map(is_managed, target.parameters() if isinstance(target, nn.Module) else target.values())):
            raise StateError(
                "a ZeroOptimizer manages the target: its masters would not follow, and its next step would write them "
                "over what is published; follow in a model of your own"
            )
        if not isinstance(target, nn.Module):
            return target
        return {name: value for name, value in target.state_dict().items() if isinstance(value, Tensor)}

    def _tensors(self, layout: PublishedLayout) -> dict[str, Tensor]:
        """The target's tensors, flat; those of an empty dict are created."""
        given = self._given()
        if not given and isinstance(self._target, MutableMapping):
            with torch.inference_mode(False):  # else they could take part in no backward, and be changed nowhere else
                self._target.update(
                    {n: torch.empty(shape, dtype=dtype, device="cpu") for n, (dtype, shape) in layout.tensors.items()}
                )
            given = self._target
        return {name: given[name].detach().view(-1) for name in layout.tensors}

    def _check_fit(self, layout: PublishedLayout) -> None:
        """Raise LayoutError unless the target has the tensors of ``layout``."""
        given = self._given()
        if not given and isinstance(self._target, MutableMapping):
            return
        for name, described in layout.tensors.items():
            own = given.get(name)
            if own is None or (own.dtype, tuple(own.shape)) != described or not own.is_contiguous() or own.is_meta:
                found = "no such tensor"
                if own is not None:
                    found = f"{own.dtype} {tuple(own.shape)}, strides {own.stride()}, on {own.device}"
                raise LayoutError(
                    f"the target must be the published model: {name!r} is {described[0]} {described[1]} in "
                    f"{self._folder}, here {found}; Publisher(dtype=...) publishes another dtype"
                )
        if isinstance(self._target, nn.Module):
            _check_own(self._target, {name: given[name] for name in layout.tensors})
        _check_apart({name: given[name] for name in layout.tensors})
        known = {(given[name].data_ptr(), given[name].shape) for name in layout.tensors}
        extra = [
            name
            for name, own in given.items()
            if own.numel() and (own.data_ptr(), own.shape) not in known and not IS_EXTRA_STATE.search(name)
        ]
        if extra:
            raise LayoutError(f"the target must be the published model: {self._folder} does not have {extra[:5]}")


def _check_own(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raise LayoutError if one of ``tensors``, of the state dict of ``model``, is a copy: it would be written alone."""
    own = {
        tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers()) if has_memory(tensor)
    }
    for name, tensor in tensors.items():
        if tensor.numel() and tensor.untyped_storage().data_ptr() not in own:
            raise LayoutError(
                f"the target must hold its weights: state_dict() of the model returns a copy of {name!r}, which is no "
                "parameter or buffer; pass the tensors themselves, in a dict by the names of the published model"
            )


def _check_apart(tensors: Mapping[str, Tensor]) -> None:
    """Raise LayoutError if two of ``tensors``, which are contiguous, share memory: each has published values."""
    spans = sorted(
        (str(own.device), own.data_ptr(), own.data_ptr() + own.numel() * own.element_size(), name)
        for name, own in tensors.items()
        if own.numel()
    )
    for (device, _, stop, name), (other_device, start, _, other) in pairwise(spans):
        if device == other_device and start < stop:
            raise LayoutError(
                f"{name!r} and {other!r} share memory in the target, but were published apart: tie them where they are "
                "trained, as one parameter, or nowhere"
            )


def replayed(folder: Path, weights: dict[str, Tensor], numbers: list[int]) -> Iterator[Manifest]:
    """Read publications ``numbers``, all of ``folder``, from the first snapshot on into ``weights``, an empty dict.

    Yields each. Snapshots that a patch has led to are read, too; what a training prunes meanwhile is not.

    Raises:
        PublicationError: One is damaged, or neither a snapshot nor a patch of the one before; or no snapshot leads to
            the newest.
    """
    reader, began = Subscriber(folder, weights), False
    for number in numbers:
        try:
            manifest = read_manifest(folder, number)
            is_patch = bool(reader._way([manifest]))
            if not is_patch and manifest.digests is None:
                if began:
                    raise PublicationError(f"publication {number} has no snapshot, and its patch has another base")
                continue  # what it changed is pruned
            if is_patch:
                reader._apply(manifest)
            if manifest.digests is not None:
                reader._load(manifest)
        except PublicationError:
            if publication_path(folder, number).exists():
                raise
            began = False  # pruned, with all before it
            continue
        began = True
        yield manifest
    if not began:
        raise PublicationError(f"{folder} has no snapshot that leads to its newest publication")


def _decoded(message: Tensor, chunk: PublishedChunk, tensors: Mapping[str, Tensor], file: Path) -> Tensor:
    """The new values of ``chunk``."""
    if chunk.dtype not in CODED:
        if message.numel() != chunk.max_nbytes:
            raise PublicationError(f"{file} has {message.numel()} bytes for a chunk of {chunk.max_nbytes}")
        return message.view(chunk.dtype)
    values = _copy_of(chunk, tensors)
    try:
        ulps.decode(message, values)
    except MessageError as error:
        raise PublicationError(f"{file} is damaged: {error}") from error
    return values


def _copy_of(chunk: PublishedChunk, tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name][start:stop].cpu() for name, start, stop in chunk.pieces]).contiguous()


def _digest_of(values: Tensor) -> str:
    return hashlib.sha256(as_bytes(values)).hexdigest()
