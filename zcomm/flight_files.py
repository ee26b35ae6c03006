"""Flight recorder files: with ZCOMM_FLIGHT=FOLDER every rank keeps its last exchanges where they outlive it.

    FOLDER/start<N>/rank<R>.<hop>.flight     N: torchrun's restarts so far
        512 bytes   JSON: the run, the rank, the ranks of the hop, how many hops of these ranks were before, the process
        512 bytes   the last error that ended an exchange, or a meeting of ranks; not what came of it within a minute
        64 x 256    an exchange each: number, state, when, operation, bytes, format, bucket; number n at n - 1 mod 64

The files are mapped into memory: what a rank did last is in them whatever ends it, SIGKILL and a crash included, and
without anything to be done in that moment. When an exchange or a meeting fails, a timeout above all, the rank compares
the files it can see and logs what it finds; ``zcomm flight FOLDER`` does the same later, on files of all machines.

The run is one name on all ranks, new with each store of torch.distributed: when the first of them asked for it, and a
random word. By it the files of other jobs in the same folder are told apart, and left out.

Cost: an exchange three lines of text into memory, about 3 us each; 17 KiB a hop.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import re
import secrets
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from zcomm import env
from zcomm.ledger import NUM_KEPT, ON_FAILURE, Entry, Ledger

__all__ = ["Recorded", "attach", "compare", "read_files", "read_newest"]

logger = logging.getLogger("zcomm")

HEAD_NBYTES, LINE_NBYTES = 512, 256
NBYTES = 2 * HEAD_NBYTES + NUM_KEPT * LINE_NBYTES
MAX_RANKS = 2**20
"""More are no file of ours."""
NUM_TOLD = 8
"""Lines about exchanges that one rank has made and another has not, or made otherwise."""


class Line(NamedTuple):
    """One exchange of a file."""

    number: int
    state: str
    at: float
    """When it came to be in that state: by time.time(), where the file was written."""
    what: str
    """Operation, bytes, format and bucket: the same on every rank of the hop."""


class Recorded(NamedTuple):
    """One rank's file of one hop."""

    run: str
    """The later it began, the greater; empty in files of older releases."""
    rank: int
    ranks: tuple[int, ...]
    copy: int
    """How many hops of the same ranks were before it."""
    error: str
    lines: dict[int, Line]
    """By number."""


class _File:
    """What one ledger is kept in."""

    def __init__(self, path: Path, head: dict[str, object]) -> None:
        text = json.dumps(head)
        if len(text) > HEAD_NBYTES:
            raise OSError(
                f"{len(text)} bytes to describe the hop, of {HEAD_NBYTES}: too many ranks in no regular order"
            )
        self.run = str(head["run"])
        path.unlink(missing_ok=True)  # another job may still have it mapped: it keeps the old file
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(number, 0, NBYTES)  # a full disk is an error here, not a signal in an exchange
            self._memory = mmap.mmap(number, NBYTES)
        finally:
            os.close(number)
        self._put(0, HEAD_NBYTES, text)

    def keep(self, entry: Entry) -> None:
        call, at = entry.call, 2 * HEAD_NBYTES + (entry.number - 1) % NUM_KEPT * LINE_NBYTES
        what = f"{call.operation} of {call.nbytes} bytes\t{entry.format}\t{entry.bucket}"
        self._put(at, LINE_NBYTES, f"{entry.number}\t{entry.state}\t{time.time():.6f}\t{what}")

    def fail(self, text: str) -> None:
        self._put(HEAD_NBYTES, HEAD_NBYTES, text)

    def _put(self, at: int, nbytes: int, text: str) -> None:
        self._memory[at : at + nbytes] = text.encode(errors="replace")[:nbytes].ljust(nbytes, b"\0")


_RANKS: WeakKeyDictionary[Ledger, tuple[int, ...]] = WeakKeyDictionary()
_FILES: list[_File] = []
_NUM_COPIES: dict[tuple[int, ...], int] = {}
_RUNS: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()
_LOCK = threading.Lock()
_QUIET_S = 60.0
"""After what a failure has logged: others, its consequences above all, are not."""
_LAST_TOLD = [-_QUIET_S]


def attach(ledger: Ledger, ranks: Sequence[int]) -> None:
    """Keep ``ledger``, of a new hop over the global ``ranks``, in a file if ZCOMM_FLIGHT names a folder.

    Where no file can be made this rank logs a warning and goes on without: a record ends no job.
    """
    with _LOCK:
        _RANKS[ledger] = of = tuple(ranks)
        folder = env.value("ZCOMM_FLIGHT")
        if not folder:
            return
        copy = _NUM_COPIES[of] = _NUM_COPIES.get(of, -1) + 1
        place = _start_below(folder)
        head: dict[str, object] = {"rank": dist.get_rank(), "ranks": _packed(of), "copy": copy, "pid": os.getpid()}
        try:
            head |= {"run": _run(), "host": os.uname().nodename}
            place.mkdir(parents=True, exist_ok=True)
            file = _File(place / f"rank{dist.get_rank()}.{len(_FILES)}.flight", head)
        except (OSError, dist.DistError) as error:
            logger.warning("ZCOMM_FLIGHT=%s: this rank's exchanges are not recorded: %s", folder, error)
            return
        _FILES.append(file)
        ledger.keep = file.keep


def _run() -> str:
    """The name of this run: the first rank to ask gives it. Waits for nobody."""
    group = dist.group.WORLD
    assert group is not None, "no default process group"
    if group not in _RUNS:
        store = dist.distributed_c10d._get_default_store()
        client = store.clone() if hasattr(store, "clone") else store  # a request of another thread may block
        mine = f"{time.time_ns():020d}-{secrets.token_hex(4)}"
        _RUNS[group] = str(client.compare_set("zcomm/flight/run", "", mine).decode())
    return _RUNS[group]


def _packed(ranks: tuple[int, ...]) -> dict[str, int] | tuple[int, ...]:
    """Ranks at equal distances in a few bytes, however many they are."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if step > 0 and ranks == tuple(range(ranks[0], ranks[-1] + 1, step)):
        return {"first": ranks[0], "last": ranks[-1], "step": step}
    return ranks


def _unpacked(ranks: Any) -> tuple[int, ...]:
    if isinstance(ranks, dict):
        spread = range(ranks["first"], ranks["last"] + 1, ranks["step"])
        if len(spread) > MAX_RANKS:
            raise ValueError(f"{len(spread)} ranks")
        return tuple(spread)
    return tuple(map(int, ranks))


def read_newest(folder: Path) -> tuple[Path, list[Recorded], int]:
    """Where the files of the newest run's last start below ``folder`` are, these, and how many others there are.

    In a folder of one start, those of the newest run.
    """
    starts = [
        (int(found[1]), path) for path in folder.glob("start*") if (found := re.fullmatch(r"start(\d+)", path.name))
    ]
    files = [((one.run, start), path, one) for start, path in starts or [(0, folder)] for one in read_files(path)]
    if not files:
        return folder, [], 0
    newest, place, _ = max(files, key=lambda file: file[0])
    own = [one for start, _, one in files if start == newest]
    return place, own, len(files) - len(own)


def read_files(folder: Path) -> list[Recorded]:
    """Every whole file of one folder, by rank, of whatever run; what is no such file is left out."""
    found = []
    for path in folder.glob("rank*.flight"):
        with suppress(OSError, ValueError, KeyError, TypeError, ArithmeticError):
            data = path.read_bytes()
            parts = [data[:HEAD_NBYTES], data[HEAD_NBYTES : 2 * HEAD_NBYTES]]
            head, error = (part.rstrip(b"\0").decode(errors="replace") for part in parts)
            facts, lines = json.loads(head), [data[at : at + LINE_NBYTES] for at in range(1024, NBYTES, LINE_NBYTES)]
            made = {line.number: line for line in map(_line, lines) if line is not None}
            run, rank, copy = str(facts.get("run", "")), int(facts["rank"]), int(facts["copy"])
            found.append(Recorded(run, rank, _unpacked(facts["ranks"]), copy, error, made))
    return sorted(found, key=lambda one: (len(one.ranks), one.ranks, one.copy, one.rank))


def _line(data: bytes) -> Line | None:
    fields = data.rstrip(b"\0").decode(errors="replace").split("\t")
    if len(fields) != 6:
        return None
    number, state, at, operation, wire, bucket = fields
    with suppress(ValueError):
        return Line(int(number), state, float(at), f"{operation}, {wire}" + (f", bucket {bucket}" if bucket else ""))
    return None


def compare(files: Iterable[Recorded]) -> list[str]:
    """What the ranks' files say of one another, in lines: errors, ranks that lag, calls that differ, who waits."""
    by_hop: dict[tuple[tuple[int, ...], int], dict[int, Recorded]] = {}
    told: dict[str, None] = {}
    for one in files:
        by_hop.setdefault((one.ranks, one.copy), {})[one.rank] = one
        if one.error:
            told[f"rank {one.rank} ended with {one.error}"] = None
    for (ranks, copy), of_ranks in by_hop.items():
        hop = f"exchanges of ranks {', '.join(map(str, ranks))}" + (f" (group {copy} of them)" if copy else "")
        missing = [rank for rank in ranks if rank not in of_ranks]
        if missing:
            told[f"{hop}: no file of ranks {', '.join(map(str, missing))}"] = None
        for line in _of_hop(hop, of_ranks):
            told[line] = None
    return list(told) or ["the files hold no exchange"]


def _of_hop(hop: str, of_ranks: dict[int, Recorded]) -> Iterable[str]:
    last = {rank: max(one.lines, default=0) for rank, one in of_ranks.items()}
    most, num_told = max(last.values()), 0
    furthest = of_ranks[max(last, key=lambda rank: last[rank])].lines
    for rank, number in last.items():
        if number < most:
            after = furthest.get(number + 1)
            what = f", and not number {number + 1}, {after.what}" if after else ""
            yield f"{hop}: rank {rank} lags: it has started {number} of {most}{what}"
    for number in sorted({number for one in of_ranks.values() for number in one.lines}):
        made = {rank: one.lines[number] for rank, one in of_ranks.items() if number in one.lines}
        is_open = any(line.state != "ended" for line in made.values())
        if (len({line.what for line in made.values()}) > 1 or is_open) and num_told < NUM_TOLD:
            num_told += 1
            states = "; ".join(f"rank {rank}: {line.what}, {line.state}" for rank, line in sorted(made.items()))
            yield f"{hop}: number {number}: {states}"
    if num_told == 0 and len(set(last.values())) == 1:
        yield f"{hop}: {most} started, all ended, the same on every rank that has a file"


def _on_failure(error: BaseException) -> None:
    """Note the error in the files, compare them, and log what is found."""
    with suppress(Exception):  # the error itself must come through
        if time.monotonic() < _LAST_TOLD[0] + _QUIET_S:
            return
        _LAST_TOLD[0] = time.monotonic()
        text = f"{type(error).__name__}: {error}".split("\n", 1)[0]
        for file in _FILES:
            file.fail(text)
        folder = env.value("ZCOMM_FLIGHT")
        if folder:
            start = _start_below(folder)
            found = "\n  ".join(compare(one for one in read_files(start) if not _FILES or one.run == _FILES[-1].run))
            logger.error("an exchange failed; the ranks' flight recorders in %s:\n  %s", start, found)
            return
        left = "; ".join(_open_exchanges()) or "none"
        logger.error(
            "an exchange failed (%s); exchanges of this rank that have not ended: %s. ZCOMM_FLIGHT=FOLDER keeps those "
            "of every rank, for `zcomm flight FOLDER`", text, left,
        )  # fmt: skip


def _start_below(folder: str) -> Path:
    return Path(folder) / f"start{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _open_exchanges() -> Iterable[str]:
    for ledger, ranks in list(_RANKS.items()):
        for entry in ledger.entries():
            if entry.state != "ended":
                of, name = ", ".join(map(str, ranks)), f", bucket {entry.bucket}" if entry.bucket else ""
                what = f"{entry.call.operation} of {entry.call.nbytes} bytes, {entry.format}{name}"
                yield f"number {entry.number} of ranks {of}, {what}, {entry.state}"


ON_FAILURE.append(_on_failure)
