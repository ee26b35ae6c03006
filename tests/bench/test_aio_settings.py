"""Direct file I/O from Python: reads return what was written, errors are OSErrors, and the benchmark leaves no file."""

# covers zero/_storage/transfer_buffers.py

from __future__ import annotations

import errno
import json
import re
from pathlib import Path

import pytest
import torch

from tests.end_to_end.job import ROOT
from zcomm import ConfigError
from zcomm._kernels import kernels
from zero._storage.transfer_buffers import aligned_bytes

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "bench"))
    import aio_settings

KIB = 1024


def test_what_is_written_is_read(tmp_path: Path) -> None:
    queue = kernels.native().FileQueue(4, 8 * KIB)
    data, back = aligned_bytes(100 * KIB).random_(), aligned_bytes(100 * KIB)
    assert data.data_ptr() % 4096 == 0
    file = queue.create(str(tmp_path / "x"), 100 * KIB)
    queue.wait(queue.write(file, 0, data.data_ptr(), 100 * KIB))
    assert torch.equal(torch.tensor(list((tmp_path / "x").read_bytes()), dtype=torch.uint8), data)
    tickets = [queue.read(file, at * KIB, back[at * KIB :].data_ptr(), 20 * KIB) for at in range(0, 100, 20)]
    for ticket in reversed(tickets):
        queue.wait(ticket)
    assert torch.equal(back, data)
    assert (tmp_path / "x").stat().st_mode & 0o077 == 0, "readable by others"
    queue.close(file)


def test_errors_have_errno_and_path(tmp_path: Path) -> None:
    queue = kernels.native().FileQueue(1, 4 * KIB)
    with pytest.raises(FileNotFoundError) as error:
        queue.open(str(tmp_path / "none"))
    assert error.value.errno == errno.ENOENT
    assert error.value.filename == str(tmp_path / "none")
    file = queue.create(str(tmp_path / "x"), 4 * KIB)
    with pytest.raises(FileExistsError):
        queue.create(str(tmp_path / "x"), 4 * KIB)
    buffer = aligned_bytes(8 * KIB)
    with pytest.raises(OSError, match="read 0 of 4096 bytes at offset 4096") as short:
        queue.wait(queue.read(file, 0, buffer.data_ptr(), 8 * KIB))
    assert short.value.filename == str(tmp_path / "x")
    with pytest.raises(ValueError, match="offset=5"):
        queue.read(file, 5, buffer.data_ptr(), 4 * KIB)


def test_the_command_prints_rates_and_a_valid_suggestion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert aio_settings.main([str(tmp_path), "--size-mib", "64", "--seconds", "0.05"]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if "KiB" in line]
    assert [(row[0], row[2]) for row in rows] == [(str(s // KIB), str(n)) for s, n in aio_settings.PATTERNS]
    assert re.search("O_DIRECT by (io_uring|threads)$", out.splitlines()[0])
    assert all(float(rate) > 0 for row in rows for rate in row[3:])
    suggested = re.search(r'"aio": (\{.*\})', out)
    assert suggested is not None
    chosen = json.loads(suggested[1])
    assert (chosen["block_size"], chosen["queue_depth"]) in aio_settings.PATTERNS
    assert not list(tmp_path.iterdir())


def test_the_smallest_pattern_of_those_as_fast_is_suggested() -> None:
    rows = [
        aio_settings.Rates(2**20, 1, 1, 1, 1.0),
        aio_settings.Rates(2**20, 4, 2, 2, 1.97),
        aio_settings.Rates(2**20, 16, 2, 2, 2.0),
    ]
    assert aio_settings._suggested(rows) == rows[1]


def test_what_cannot_be_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert aio_settings.main([str(tmp_path / "missing")]) == 1
    assert "missing" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--size-mib must be at least"):
        aio_settings.measure(tmp_path, nbytes=2**20, seconds=0.1)
    with pytest.raises(OSError, match="cannot reserve"):
        aio_settings.measure(tmp_path, nbytes=2**60, seconds=0.1)
    assert not list(tmp_path.iterdir())
