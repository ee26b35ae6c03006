"""Changes in ulps come back bit for bit, cost little more than their entropy, and damage is refused.

The oracle of the native kernels, at every level, is the reference; the reference's own is the arithmetic below, and the
golden vectors keep its bytes.
"""

# covers zcomm/_kernels/ulps.py zcomm/_formats/ulps_reference.py

from __future__ import annotations

import datetime
import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from zcomm import LayoutError, MessageError
from zcomm._formats import ulps_reference
from zcomm._kernels import ulps

SEED = int(datetime.datetime.now(datetime.UTC).strftime("%Y%m%d"))


def _bits(tensor: Tensor) -> np.ndarray:
    return tensor.view(torch.int16).numpy().view(np.uint16)


def _tensor(bits: np.ndarray, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.from_numpy(bits.astype(np.uint16).view(np.int16).copy()).view(dtype)


def _order(bits: np.ndarray) -> np.ndarray:
    """Integers in the order of the values; -0 is -1."""
    wide = bits.astype(np.int64)
    return np.where(wide < 0x8000, wide, 0x7FFF - wide)


def _changed(old: np.ndarray, ulps_of_change: np.ndarray) -> np.ndarray:
    order = (_order(old) + ulps_of_change + 0x8000) % 0x10000 - 0x8000
    return np.where(order >= 0, order, 0x7FFF - order).astype(np.uint16)


def _entropy_nbytes(new: np.ndarray, old: np.ndarray) -> float:
    difference = (_order(new) - _order(old)) % 0x10000
    share = np.unique(difference, return_counts=True)[1] / difference.size
    return float(-(share * np.log2(share)).sum()) * difference.size / 8


def _message(new: Tensor, old: Tensor) -> Tensor:
    least = ulps.max_message_nbytes(new.numel())
    message = torch.full((least + 64,), 0xA5, dtype=torch.uint8)
    used = ulps.encode(new, old, message[:least])
    assert used % 4 == 0
    assert used <= least
    assert (message[least:] == 0xA5).all()
    assert ulps.message_nbytes(message[: ulps.HEAD_NBYTES]) == used
    return message[:used].clone()


def _same(new: np.ndarray, old: np.ndarray) -> Tensor:
    """The message, which is the reference's."""
    message = _message(_tensor(new), _tensor(old))
    expected = torch.zeros(ulps.max_message_nbytes(new.size), dtype=torch.uint8)
    used = ulps_reference.encode(_tensor(new), _tensor(old), expected)
    assert message.numpy().tobytes() == expected[:used].numpy().tobytes()
    return message


def _round_trip(new: np.ndarray, old: np.ndarray) -> Tensor:
    message, values = _message(_tensor(new), _tensor(old)), _tensor(old)
    ulps.decode(message, values)
    np.testing.assert_array_equal(_bits(values), new)
    return message


def _steps(draw: np.random.Generator, numel: int) -> dict[str, np.ndarray]:
    """Changes in ulps."""
    signs = draw.choice([-1, 1], numel)
    return {
        "none": np.zeros(numel, np.int64),
        "one": (np.arange(numel) == numel // 2).astype(np.int64),
        "all one": np.ones(numel, np.int64),
        "rare": np.where(draw.random(numel) < 0.0055, signs, 0),
        "sparse": np.where(draw.random(numel) < 0.05, signs * draw.geometric(0.7, numel), 0),
        "few": np.where(draw.random(numel) < 0.07, signs * draw.geometric(0.7, numel), 0),
        "narrow": np.rint(draw.laplace(0, 0.4, numel)).astype(np.int64),
        "laplace": np.rint(draw.laplace(0, 5, numel)).astype(np.int64),
        "wide": np.rint(draw.laplace(0, 100, numel)).astype(np.int64),
        "heavy": np.clip(np.rint(draw.standard_cauchy(numel) * 3), -40000, 40000).astype(np.int64),
        "any": draw.integers(-32768, 32768, numel),
    }


def _signed(message: Tensor) -> Tensor:
    """``message`` with checksums that fit what stands in it."""
    data = message.numpy().tobytes()
    head = struct.unpack_from("<2sBBQ", data)
    body = data[ulps.HEAD_NBYTES :]
    fields = struct.pack("<2sBBQQI", *head, len(data), ulps_reference.checksum(body, ulps.HEAD_NBYTES // 4))
    whole = fields + struct.pack("<I", ulps_reference.checksum(fields, 0)) + body
    return torch.frombuffer(bytearray(whole), dtype=torch.uint8)


def _damaged(message: Tensor, draw: np.random.Generator) -> Tensor:
    """Bytes changed, moved or cut out anywhere, most often among the first, which decide most."""
    data = message.numpy().copy()
    for _ in range(int(draw.choice([1, 1, 2, 5]))):
        spread = int(draw.choice([8, 60, 200, data.size]))
        at = min(ulps.HEAD_NBYTES + int(draw.integers(max(spread, 1))), data.size - 1)
        kind = int(draw.integers(4))
        if kind == 0:
            data[at] ^= 1 << int(draw.integers(8))
        elif kind == 1:
            data[at] = draw.choice([0, 1, 127, 128, 255])
        elif kind == 2:
            other = int(draw.integers(ulps.HEAD_NBYTES, data.size))
            data[[at, other]] = data[[other, at]]
        elif data.size > ulps.HEAD_NBYTES + 8:
            data = np.delete(data, np.arange(at, min(at + 4, data.size)))
    return _signed(torch.from_numpy(data[: data.size // 4 * 4].copy()))


def _decoded(module: ModuleType, message: Tensor, old: np.ndarray) -> np.ndarray | None:
    """None if the message is refused."""
    room = torch.full((old.size + 64,), 7, dtype=torch.int16)
    room[32:-32] = _tensor(old).view(torch.int16)
    try:
        module.decode(message, room[32:-32].view(torch.bfloat16))
    except MessageError:
        return None
    finally:
        assert (room[:32] == 7).all()
        assert (room[-32:] == 7).all()
    return room[32:-32].numpy().view(np.uint16)


def compare_with_the_reference(seed: int, cases: int) -> None:
    """Random changes and hostile messages: the bytes, the values, and what is refused."""
    draw = np.random.default_rng(seed)
    for case in range(cases):
        numel = int(draw.choice([1, 5, 33, 100, 1000, 3000])) + int(draw.integers(40))
        old = draw.integers(0, 1 << 16, numel).astype(np.uint16)
        steps, cut = _steps(draw, numel), int(draw.integers(numel + 1))
        first, second = (steps[name] for name in draw.choice(NAMES, 2))
        new = _changed(old, np.concatenate([first[:cut], second[cut:]]))
        message = _same(new, old)
        context = f"seed={seed}, case={case}"
        np.testing.assert_array_equal(_decoded(ulps, message, old), new, context)
        for _ in range(4):
            hostile = _damaged(message, draw)
            got, expected = _decoded(ulps, hostile, old), _decoded(ulps_reference, hostile, old)
            assert (got is None) == (expected is None), context
            if got is not None and expected is not None:
                np.testing.assert_array_equal(got, expected, context)


GOLDEN = sorted((Path(__file__).parents[1] / "golden" / "ulps").glob("*.npz"))
NAMES = list(_steps(np.random.default_rng(0), 1))


@pytest.mark.parametrize("level", ["baseline", "avx2", "avx512"])
def test_all_levels_agree_with_the_reference(level: str) -> None:
    call = f"from tests.zcomm.test_ulps import compare_with_the_reference as compare; compare({SEED}, 150)"
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", call], check=True, cwd=root, env={**os.environ, "ZCOMM_ISA": level})


@pytest.mark.long
@pytest.mark.parametrize("level", ["baseline", "avx2", "avx512"])
def test_all_levels_agree_with_the_reference_in_thousands_of_cases(level: str) -> None:
    seed = time.time_ns()
    call = f"from tests.zcomm.test_ulps import compare_with_the_reference as compare; compare({seed}, 3500)"
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", call], check=True, cwd=root, env={**os.environ, "ZCOMM_ISA": level})


@pytest.mark.parametrize("name", ["rare", "sparse", "few", "heavy", "any"])
def test_chunks_are_the_references(name: str) -> None:
    draw = np.random.default_rng([SEED, 5])
    old = draw.integers(0, 1 << 16, (1 << (20 if name == "sparse" else 18)) + 1001).astype(np.uint16)
    steps = _steps(draw, old.size)[name]
    steps[-900:] = 0
    _same(_changed(old, steps), old)


@pytest.mark.parametrize("module", [ulps, ulps_reference], ids=["ulps", "reference"])
@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden_messages(module: ModuleType, path: Path) -> None:
    golden = np.load(path)
    new, old = _tensor(golden["new"]), _tensor(golden["old"])
    message = torch.zeros(module.max_message_nbytes(new.numel()), dtype=torch.uint8)
    used = module.encode(new, old, message)
    assert message[:used].numpy().tobytes() == golden["message"].tobytes()
    np.testing.assert_array_equal(_decoded(module, torch.from_numpy(golden["message"]), golden["old"]), golden["new"])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("numel", [0, 1, 2, 31, 32, 33, 1000, 5001])
def test_every_bit_comes_back(name: str, numel: int) -> None:
    draw = np.random.default_rng([SEED, numel])
    old = draw.integers(0, 1 << 16, numel).astype(np.uint16)
    message = _round_trip(_changed(old, _steps(draw, numel)[name]), old)
    assert message.numel() <= 1.01 * 2 * numel + 64, SEED


def test_every_pair_of_odd_bit_patterns_comes_back() -> None:
    odd = np.array([0, 1, 0x8000, 0x8001, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x7FFF, 0x3F80, 0x7C00, 0xFC00], np.uint16)
    old, new = (part.reshape(-1) for part in np.meshgrid(odd, odd))
    _round_trip(np.tile(new, 30), np.tile(old, 30))


@pytest.mark.parametrize("name", NAMES)
def test_a_message_costs_little_more_than_its_entropy(name: str) -> None:
    draw = np.random.default_rng([SEED, 3])
    old = (draw.standard_normal(1 << 19).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    new = _changed(old, _steps(draw, old.size)[name])
    message = _round_trip(new, old)
    assert message.numel() <= 1.02 * _entropy_nbytes(new, old) + 512, SEED


def test_damage_is_refused() -> None:
    draw = np.random.default_rng([SEED, 4])
    old = draw.integers(0, 1 << 16, 4000).astype(np.uint16)
    message = _message(_tensor(_changed(old, _steps(draw, old.size)["laplace"])), _tensor(old))
    for _ in range(200):
        damaged = message.clone()
        damaged[draw.integers(message.numel())] ^= 1 << int(draw.integers(8))
        values = _tensor(old)
        with pytest.raises(MessageError):
            ulps.decode(damaged, values)
        np.testing.assert_array_equal(_bits(values), old)
    for short in (0, 1, ulps.HEAD_NBYTES, message.numel() - 1):
        with pytest.raises(MessageError):
            ulps.decode(message[:short], _tensor(old))
    with pytest.raises(MessageError, match="as many elements"):
        ulps.decode(message, _tensor(old[1:]))
    ulps.decode(torch.cat([message, message]), _tensor(old))


def test_a_table_with_a_run_of_no_absent_symbols_is_refused() -> None:
    """Nothing would bound how many of them a decoder reads."""
    draw = np.random.default_rng([SEED, 5])
    old = draw.integers(0, 1 << 16, 4000).astype(np.uint16)
    data = _message(_tensor(_changed(old, _steps(draw, old.size)["laplace"])), _tensor(old)).numpy().tobytes()
    directory, table = ulps.HEAD_NBYTES, ulps.HEAD_NBYTES + 9  # behind the words' number and d
    nbytes = struct.pack("<I", struct.unpack_from("<I", data, directory)[0] + 4)
    forged = data[:directory] + nbytes + data[directory + 4 : table] + bytes(4) + data[table:]
    message = _signed(torch.frombuffer(bytearray(forged), dtype=torch.uint8))
    assert [_decoded(module, message, old) for module in (ulps, ulps_reference)] == [None, None]


def test_wrong_tensors_are_refused() -> None:
    values, message = torch.zeros(8, dtype=torch.bfloat16), torch.zeros(200, dtype=torch.uint8)
    for new, old in (
        (values, values.half()),
        (values[:4], values),
        (values[::2], values[:4]),
        (values.float(), values),
    ):
        with pytest.raises(LayoutError):
            ulps.encode(new, old, message)
    with pytest.raises(LayoutError, match="room"):
        ulps.encode(values, values, message[:30])
    assert ulps.encode(values, values, message) == ulps.HEAD_NBYTES + 4
