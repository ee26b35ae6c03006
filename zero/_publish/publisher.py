"""``zero.Publisher``: in the training loop, publish the weights to a folder.

    main thread   publish(): this rank's weights are copied; of each chunk that differs from the last publication
    background    every rank: code the changes, hash the results, write the patch and its part of the snapshot, fsync
                  first rank: manifest, fsync; the folder gets its name: the publication is complete and durable

A publication is complete from the moment its folder has its name; everything in it is durable before. What a rank keeps
of the last publication changes only then. So one that fails costs nothing but itself: the next patch changes the last
complete publication. Pruning deletes nothing that leads from the last snapshot to the newest publication.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import operator
import os
import secrets
import shutil
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zcomm import ConfigError, StateError, Topology
from zcomm._base.rank_context import clock
from zcomm._kernels import ulps
from zcomm._transport.call_context import public_call
from zcomm._transport.groups import Background
from zero._checkpoint.durability import create_file, make_folder, remove_file, replace_file, sync_folder
from zero._publish.manifest import (
    CODED,
    MANIFEST,
    MAX_NUMBER,
    ChangedChunk,
    Manifest,
    PublishedLayout,
    TensorPiece,
    chunks_of,
    layout_path,
    numbers_in,
    patch_name,
    publication_path,
    read_manifest,
    root_of,
)
from zero._publish.snapshot_files import SnapshotWriter, create_files, model_documents, plan_files
from zero._publish.weights import PublishedWeights, topology_of, weights_of
from zero._ranks.collective_calls import calling_over, collective
from zero._ranks.first_rank import on_first_rank
from zero._ranks.rank_errors import is_agreed, on_every_rank, share_text
from zero._storage.process_folder import ProcessIdentity, try_lock
from zero._storage.safetensors_file import as_bytes
from zero.errors import PublicationError
from zero.optimizer import ZeroOptimizer

OWNER = "publisher"
TEMPORARY = ".publishing-"
PRUNED = ".pruned-"


class _Publication(NamedTuple):
    """What a call of publish() hands to the background thread."""

    version: int | None
    snapshot: bool
    changed: dict[int, Tensor]
    """New values of the chunks that have changed, by their number on this rank."""
    error: Exception | None


class Publisher:
    """Publishes the weights of a training to a folder, from which any number of processes follow them.

    What is published are the bits of the model's state dict: parameters in their own dtype (bf16, where the masters
    are float32), tied ones once, and persistent buffers. A publication is a patch, which codes the changes since the
    one before without loss, and now and then a snapshot, which ``from_pretrained`` of transformers, vLLM and
    safetensors read as it is.

    Args:
        source: A :class:`zero.ZeroOptimizer` or :class:`zero.Engine`, on every rank; nothing is gathered. Or a model
            that no ZeroOptimizer manages, in one process (with DDP: the module inside it, on one rank).
        folder: Where to, on a file system that all ranks see; created if it is missing. For one publisher at a time.
        snapshot_every: Write a snapshot with every so many publications. The first has one in any case.
        keep: How many publications stay at least. Those since the last snapshot always do.
        dtype: Publish floating-point parameters in this floating-point dtype, for example a float32 model in bfloat16.
            Values beyond its range become infinite: those from 65520 on in float16.

    Raises:
        PublicationError: Another publisher has the folder, or it cannot be made.
        LayoutError: A tensor cannot be published, or the ranks' arguments differ.
        ConfigError: ``dtype`` is no floating-point dtype, or a number is not a whole one of at least 1.
        StateError: A model was passed that a ZeroOptimizer manages.

    With several ranks, an error of one is raised on all.

    Cost for each rank, S the bytes of its shard in the published dtype: S of host memory for the weights last
    published, and S more from a call of ``publish`` until it is written; the call itself copies and compares S bytes.
    """

    def __init__(
        self,
        source: ZeroOptimizer | nn.Module | Any,
        folder: str | os.PathLike[str],
        *,
        snapshot_every: int = 32,
        keep: int = 32,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.topology: Topology | None = topology_of(source)
        self._rank = 0 if self.topology is None else self.topology.rank
        self._values: dict[int, Tensor] = {}
        """The last published values of this rank's chunks."""
        self._has_published = False
        self._pending: Future[None] | None = None
        self._is_closed = False
        self._first: _FirstRank | None = None

        def prepare() -> tuple[PublishedWeights, str]:
            _check_counts(snapshot_every=snapshot_every, keep=keep)
            return weights_of(source, dtype), os.fsdecode(Path(folder).absolute())

        def claim() -> _FirstRank | None:
            return _FirstRank(Path(path), self._weights, snapshot_every, keep) if self._rank == 0 else None

        with calling_over(self.topology, "zero.Publisher()"):
            if self.topology is None:
                self._weights, path = prepare()
                self._first = claim()
                self._background = Background(None)
            else:
                fact = f"zero.Publisher(snapshot_every={snapshot_every}, keep={keep}, dtype={dtype})"
                self._weights, path = on_every_rank(prepare, self.topology, fact=fact)
                path = share_text(path, 0, self.topology)
                self._first = on_every_rank(claim, self.topology)
                self._background = self.topology.background
        self._chunks = chunks_of(self._weights.pieces, self._weights.tensors, self._rank)
        self._files = plan_files(self._weights.tensors)
        self.folder = Path(path)
        """The folder, absolute."""

    @collective(of=lambda publisher: publisher.topology, alone=True)
    def publish(self, version: int | None = None, *, snapshot: bool = False) -> None:
        """Copy the weights and return; a thread writes them. Collective. First waits for the last publication.

        Args:
            version: What subscribers will call them, at least 0, the same on every rank; it need not ascend. Default:
                the number of the publication, which counts from 1 in a folder.
            snapshot: Write a snapshot with it.

        Raises:
            PublicationError: The last publication could not be written; the same on every rank. Subscribers stay at
                the one before, and the next call publishes all changes since that. With several ranks, it is also how
                the next call, ``wait`` or ``close`` tells all ranks that one has passed a bad version, or that a
                tensor has another dtype or shape than when the publisher was made.
            StateError: The publisher or the ZeroOptimizer is closed; in one process, also a version that is no whole
                number of at least 0.
            LayoutError: In one process: a tensor has another dtype or shape than when the publisher was made.
        """
        if self._is_closed:
            raise StateError("the publisher must be open: this one is closed, make another")
        if self._weights.is_closed():
            raise StateError("the ZeroOptimizer is closed: publish before, and close the publisher first")
        self.wait()
        job = _Publication(None, False, {}, None)
        try:
            changed = self._changed()  # first, whatever the arguments are: it may be collective
            job = _Publication(_version_of(version), bool(snapshot), changed, None)
        except Exception as caught:
            if is_agreed(caught) or self.topology is None:
                raise
            # Raised by the thread, where all ranks learn of it: the others wait there for this one.
            job = job._replace(error=caught)
        self._pending = self._background.submit(partial(self._run, job))

    def wait(self) -> None:
        """Wait until what was published last is durable on every rank. Raises its error, once."""
        if (pending := self._pending) is None:
            return
        pending.exception()  # an interrupt is raised here: the thread writes on, and the next call waits for it
        self._pending = None
        pending.result()

    @collective(of=lambda publisher: publisher.topology, alone=True)
    def close(self) -> None:
        """Wait, raise the error of the last publication, and leave the folder to another publisher. Collective."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.wait()
        finally:
            self._leave()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        # Nothing collective, and no waiting: other ranks may have no error, and be elsewhere.
        self._is_closed = True
        self._leave()

    def _leave(self) -> None:
        """Free the values, and leave the folder: at once, or when the thread has written what an error cut short."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.add_done_callback(lambda _: self._free())
        else:
            self._free()
        if self.topology is None:
            self._background.close(waits=pending is None)

    def _free(self) -> None:
        self._values.clear()
        if self._first is not None:
            self._first.close()

    def _changed(self) -> dict[int, Tensor]:
        """Copies of the chunks of this rank that differ from the last publication, by number. May be collective."""
        values = self._weights.values()
        try:
            return self._compared(values)
        except Exception:
            for _ in values:  # the other ranks wait for this one in what is collective of the rest
                pass
            raise

    def _compared(self, values: Iterator[Tensor]) -> dict[int, Tensor]:
        changed, sizes = {}, iter(enumerate(self._chunks))
        number, chunk, buffer, at = -1, None, torch.empty(0, device="cpu"), 0
        for piece in values:
            start, numel = 0, piece.numel()
            while start < numel:
                if chunk is None:
                    number, chunk = next(sizes)
                    buffer, at = torch.empty(chunk.numel, dtype=chunk.dtype, device="cpu"), 0
                count = min(numel - start, buffer.numel() - at)
                buffer[at : at + count].copy_(piece[start : start + count])
                start, at = start + count, at + count
                if at == buffer.numel():
                    last = self._values.get(number)
                    if last is None or not torch.equal(last.view(torch.uint8), buffer.view(torch.uint8)):
                        changed[number] = buffer
                    chunk = None
        assert next(sizes, None) is None, "the pieces of a rank stay the same"
        return changed

    @public_call("Publisher.publish")  # what errors name: a thread has no call of its own
    def _run(self, job: _Publication) -> None:
        """Write one publication. In the background thread of every rank."""
        first, group = self._first, self._background.group
        try:
            plan = on_first_rank(partial(self._propose, job), _of(first, "plan"), group, PublicationError)
            on_first_rank(partial(self._write, job, plan), _of(first, "commit"), group, PublicationError)
        except BaseException:
            if first is not None:
                first.give_up()
            raise
        self._values |= job.changed  # not before: the next patch must change what subscribers have
        self._has_published = True

    def _propose(self, job: _Publication) -> dict[str, Any]:
        if job.error is not None:
            raise PublicationError(f"rank {self._rank} could not copy the weights: {job.error!r}") from job.error
        pieces = None if self._has_published else [list(chunk.pieces) for chunk in self._chunks]
        return {"version": job.version, "snapshot": job.snapshot, "pieces": pieces}

    def _write(self, job: _Publication, plan: dict[str, Any]) -> dict[str, Any]:
        """Write this rank's files; returns the lengths of its changes and the digests of its changed chunks."""
        folder, changed = Path(plan["folder"]), job.changed
        with _writing(folder):
            digests = [(number, hashlib.sha256(as_bytes(values)).hexdigest()) for number, values in changed.items()]
            lengths = self._write_patch(changed, folder) if plan["patch"] else []
            if plan["snapshot"]:
                self._write_snapshot(changed, folder)
        return {"lengths": lengths, "digests": digests}

    def _write_patch(self, changed: dict[int, Tensor], folder: Path) -> list[int]:
        if not changed:
            return []
        lengths = []
        largest = max((self._chunks[number].max_nbytes for number in changed), default=0)
        message = torch.empty(largest, dtype=torch.uint8, device="cpu")
        with create_file(folder / patch_name(self._rank)) as file:
            for number, values in changed.items():
                data = as_bytes(values)
                if values.dtype in CODED:
                    nbytes = ulps.encode(values, self._values[number], message)
                    data = as_bytes(message)[:nbytes]
                file.write(data)
                lengths.append(len(data))
        return lengths

    def _write_snapshot(self, changed: dict[int, Tensor], folder: Path) -> None:
        writer = SnapshotWriter(folder, self._files)
        try:
            for number, chunk in enumerate(self._chunks):
                writer.write(chunk, changed[number] if number in changed else self._values[number])
            writer.sync()
        finally:
            writer.close()


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if isinstance(count, bool) or not hasattr(count, "__index__") or operator.index(count) < 1:
            raise ConfigError(f"{name} must be a whole number of at least 1: got {count!r}")


def _version_of(version: int | None) -> int | None:
    """``version`` as JSON stores it.

    Raises:
        StateError: It is not a whole number of at least 0.
    """
    if version is None:
        return None
    with suppress(TypeError):
        number = operator.index(version)
        if not isinstance(version, bool) and 0 <= number < 2**63:
            return number
    raise StateError(f"a version must be a whole number of at least 0: got {version!r}")


def _of(first: _FirstRank | None, name: str) -> Callable[[list[Any]], list[Any]]:
    """A method of ``first``; ranks that are not the first answer nothing."""
    found: Callable[[list[Any]], list[Any]] = getattr(first, name, list)
    return found


class _FirstRank:
    """What the first rank does for all: the lock, the numbers, layouts, manifests, and pruning.

    Raises:
        PublicationError: Another publisher has the folder, or it cannot be used.
    """

    def __init__(self, folder: Path, weights: PublishedWeights, snapshot_every: int, keep: int) -> None:
        self._folder, self._weights = folder, weights
        self._snapshot_every, self._keep = snapshot_every, keep
        self._files = plan_files(weights.tensors)
        self.run = secrets.token_hex(8)
        with _writing(folder):
            make_folder(folder)
            self._lock = _claim(folder, self.run)
        self._unlocking = weakref.finalize(self, _unlock, self._lock)  # a publisher that was dropped has no folder
        self._unlocking.atexit = False  # the thread may still be writing: the end of the process frees it, too
        _LOCKING.add(self)
        try:
            self._first_number = max([0, *numbers_in(folder)]) + 1
            """Of this run. Earlier publications are another run's."""
        except BaseException:
            self.close()
            raise
        self._last: Manifest | None = None
        self._since_snapshot = 0
        self._published_layout = PublishedLayout(weights.tensors, ())
        self._has_layout = False
        """Whether it was written."""
        self._digests: list[str] = []
        self._draft: tuple[Path, Manifest] | None = None
        """The publication that is being written, and where."""

    def plan(self, proposals: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Answer the proposals of the ranks: where to write, and what."""
        versions = [proposal["version"] for proposal in proposals]
        if len(set(versions)) > 1:
            raise PublicationError(f"every rank must publish the same version: by rank {versions}")
        with _writing(self._folder):
            self._clear()
            if proposals[0]["pieces"] is not None:
                self._set_layout([proposal["pieces"] for proposal in proposals])
            numbers = numbers_in(self._folder)
            last = self._first_number - 1 if self._last is None else self._last.number
            # Not a number that this run has used, even if the folder was emptied: subscribers may be at it.
            number, base = max([*numbers, last]) + 1, self._base(numbers)
            if number > MAX_NUMBER:
                raise PublicationError(f"{self._folder} has publication {MAX_NUMBER}, the last: use another folder")
            is_due = base is None or self._since_snapshot + 1 >= self._snapshot_every
            has_snapshot = is_due or any(proposal["snapshot"] for proposal in proposals)
            # With the run in it: a rank of a run that was killed may still be writing to the folder that it knows.
            path = self._folder / f"{TEMPORARY}{self.run}-{number:010d}"
            draft = Manifest(
                number=number,
                version=number if versions[0] is None else versions[0],
                run=self.run,
                layout=self._published_layout.digest,
                root="",
                time=int(clock().time()),
                base=base,
                digests=() if has_snapshot else None,
            )
            self._draft = path, draft
            path.mkdir()
            if has_snapshot:
                self._store_layout()
                create_files(path, self._files, model_documents(self._weights.model, self._weights.dtype))
        answer = {"folder": str(path), "snapshot": has_snapshot, "patch": base is not None}
        return [answer] * len(proposals)

    def commit(self, results: list[dict[str, Any]]) -> list[None]:
        """Make the publication complete, once all ranks have written."""
        assert self._draft is not None, "a publication is planned before it is committed"
        path, draft = self._draft
        digests, changes, start = list(self._digests), [], 0
        for rank, result in enumerate(results):
            for (number, digest), nbytes in zip(
                result["digests"], result["lengths"] or [0] * len(result["digests"]), strict=True
            ):
                digests[start + number] = digest
                changes.append(ChangedChunk(start + number, nbytes, digest))
            start += sum(chunk.rank == rank for chunk in self._published_layout.chunks)
        manifest = replace(
            draft,
            root=root_of(digests),
            changes=tuple(changes) if draft.base is not None else (),
            digests=None if draft.digests is None else tuple(digests),
        )
        with _writing(self._folder):
            _check_visible(path, results)
            with create_file(path / MANIFEST) as file:
                file.write(manifest.data)
            # The names in the folder are synced before it gets its own: else a crash could leave a publication that
            # lacks a file. The rename is durable before publish() counts as done, or the next patch could have a base
            # that a crash loses.
            sync_folder(path)
            path.rename(publication_path(self._folder, manifest.number))
            sync_folder(self._folder)
        self._draft, self._last, self._digests = None, manifest, digests
        self._since_snapshot = 0 if manifest.digests is not None else self._since_snapshot + 1
        with suppress(OSError, PublicationError):  # what is left is pruned the next time
            self._prune(manifest)
        return [None] * len(results)

    def give_up(self) -> None:
        """Delete what a failed publication has written."""
        if self._draft is not None:
            shutil.rmtree(self._draft[0], ignore_errors=True)
            self._draft = None

    def close(self, *, frees: bool = True) -> None:
        """Close the lock file. ``frees``: even while a child that was forked before has it open."""
        if self._unlocking.detach() is not None:  # once: the number may be another file's by the next time
            _unlock(self._lock, frees=frees)

    def _clear(self) -> None:
        """Delete what publishers that were killed have left behind. Only the holder of the lock is here."""
        for path in self._folder.iterdir():
            if path.name.startswith((TEMPORARY, PRUNED)):
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.startswith(".layout-"):
                remove_file(path)

    def _base(self, numbers: list[int]) -> int | None:
        """The publication that the next patch changes; None: there can be none, so that a snapshot is due.

        Raises:
            PublicationError: Another run has published in between: the file system has no locks.
        """
        if numbers and numbers[-1] >= self._first_number:
            run = read_manifest(self._folder, numbers[-1]).run
            if run != self.run:
                raise PublicationError(f"{self._folder} has another publisher, of run {run}: use one folder for each")
        # The number of the last one is not enough: a publication may be complete although its last fsync has failed.
        return self._last.number if self._last is not None and numbers[-1:] == [self._last.number] else None

    def _set_layout(self, pieces: list[list[Any]]) -> None:
        chunks = []
        for rank, of_rank in enumerate(pieces):
            every = [TensorPiece(*piece) for of_chunk in of_rank for piece in of_chunk]
            chunks += chunks_of(every, self._weights.tensors, rank)
        self._published_layout = PublishedLayout(self._weights.tensors, tuple(chunks))
        self._digests = [""] * len(chunks)
        self._has_layout = False

    def _store_layout(self) -> None:
        """Write the layout, once for a run, and again with a snapshot after the folder was emptied."""
        layout = self._published_layout
        path = layout_path(self._folder, layout.digest)
        if not (self._has_layout and path.exists()):
            replace_file(path, layout.data, self.run)
            self._has_layout = True

    def _prune(self, newest: Manifest) -> None:
        """Delete old publications, and layouts that none refers to."""
        numbers = numbers_in(self._folder)
        last_snapshot = newest.number - self._since_snapshot
        old = [number for number in numbers[: -self._keep] if number < last_snapshot]
        for number in old:
            path = publication_path(self._folder, number)
            # Renamed first: a subscriber sees all files of a publication, or none.
            renamed = path.rename(path.with_name(f"{PRUNED}{path.name}"))
            shutil.rmtree(renamed, ignore_errors=True)
        if not old:
            return
        used = {read_manifest(self._folder, number).layout for number in numbers if number not in old}
        for path in self._folder.glob("layout-*.json"):
            if path != layout_path(self._folder, newest.layout) and path.stem.removeprefix("layout-") not in used:
                path.unlink()


_LOCKING: weakref.WeakSet[_FirstRank] = weakref.WeakSet()


def _close_locks() -> None:
    """In a child: else it would keep the folders of its parent locked after that has died."""
    for first in _LOCKING:
        first.close(frees=False)


os.register_at_fork(after_in_child=_close_locks)


def _check_visible(folder: Path, results: list[dict[str, Any]]) -> None:
    """Raise unless the first rank sees what all have written."""
    for rank, result in enumerate(results):
        path, expected = folder / patch_name(rank), sum(result["lengths"])
        if expected and (not path.is_file() or path.stat().st_size != expected):
            raise PublicationError(
                f"the first rank does not see {path}, which rank {rank} has written: the folder must be on a file "
                "system that all ranks share"
            )


def _claim(folder: Path, run: str) -> int:
    """Lock ``folder`` for a publisher; returns the open file that holds the lock while the process lives."""
    path = folder / OWNER
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    try:
        if not try_lock(number):
            owner = os.read(number, 4096).decode(errors="replace")
            raise PublicationError(
                f"{folder} has a publisher that runs: {owner}; close it, or publish to another folder"
            )
        os.ftruncate(number, 0)
        os.pwrite(number, json.dumps({"run": run, **ProcessIdentity.current()._asdict()}).encode(), 0)
    except BaseException:
        os.close(number)
        raise
    return number


def _unlock(number: int, *, frees: bool = True) -> None:
    if frees:
        with suppress(OSError):  # no locks on this file system
            fcntl.flock(number, fcntl.LOCK_UN)
    os.close(number)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Within the block, an OSError becomes a PublicationError that says what to do."""
    try:
        yield
    except FileNotFoundError as error:
        what = f"{error.filename} is missing: all ranks must see one folder, and nobody else may change it"
        raise PublicationError(what) from error
    except OSError as error:
        what = f"{error.filename or folder} could not be written: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            free = shutil.disk_usage(folder).free if folder.is_dir() else 0
            what += f" ({free / 2**30:.2f} GiB are free there): make room, or lower keep"
        raise PublicationError(f"{what}; what was published before is unchanged") from error
