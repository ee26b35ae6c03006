"""bench/change_entropy.py: its changes are those of bf16(master), its figures those of a NumPy count."""

# covers zcomm/_kernels/ulps.py

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.end_to_end.job import ROOT

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "bench"))
    import change_entropy
    import ulps as bench_ulps
    from text_data import load_text


@pytest.fixture(scope="module")
def trainee() -> change_entropy.Trainee:
    config = change_entropy.MODELS["tiny"]
    text = load_text(None, max_bytes=200_000, seq_length=config.seq_length)
    return change_entropy.Trainee(config, text, 4)


def _places(values: Tensor) -> list[int]:
    """Each value's number in the order of bf16 values, +0 and -0 apart."""
    signed = values.view(torch.int16).tolist()
    return [bits if bits >= 0 else -(bits & 0x7FFF) - 1 for bits in signed]


def _entropy(changes: list[int]) -> float:
    return -sum(n / len(changes) * float(np.log2(n / len(changes))) for n in Counter(changes).values())


def test_a_change_is_that_of_the_rounded_masters(trainee: change_entropy.Trainee) -> None:
    before = {name: master.bfloat16().flatten() for name, master in trainee.masters.items()}
    changes = trainee.step(1e-3)
    for name, (new, old) in changes.items():
        assert torch.equal(old.view(torch.int16), before[name].view(torch.int16)), name
        rounded = trainee.masters[name].bfloat16().flatten()
        assert torch.equal(new.view(torch.int16), rounded.view(torch.int16)), name
    assert sum(new.numel() for new, _ in changes.values()) == 11760


def test_the_rows_are_what_a_count_says(trainee: change_entropy.Trainee) -> None:
    changes = trainee.step(1e-3)
    rows = {row["role"]: row for row in change_entropy.rows_of(trainee, changes)}
    assert rows["all"]["numel"] == sum(rows[role]["numel"] for role in change_entropy.ROLES[1:])
    for role, row in rows.items():
        chosen = [name for name in changes if role in ("all", change_entropy.role_of(name))]
        new, old = ([place for name in chosen for place in _places(changes[name][i])] for i in (0, 1))
        differences = [x - y for x, y in zip(new, old, strict=True)]
        assert row["entropy"] == pytest.approx(_entropy(differences))
        assert row["unchanged"] == pytest.approx(differences.count(0) / len(differences))
        assert row["bits"] <= 1.02 * row["entropy"] + 8 * 512 / row["numel"]
        assert 0 < row["int4"] < 4
        assert 0 < row["nf4"] <= 4
        assert 0 < row["int4_residual"] < 4
        assert 0 < row["int4_changes"] < 4


def test_codes_are_counted() -> None:
    values = torch.tensor([7.0, -7.0, 0.0, 1.0]).repeat(64)
    codes, decoded = change_entropy.coded(values, "int4")
    assert change_entropy.code_entropy(codes) == pytest.approx(2.0)
    assert torch.equal(decoded, values)


def test_what_a_message_rounds_off_is_in_the_next(trainee: change_entropy.Trainee) -> None:
    start = {name: master.clone() for name, master in trainee.masters.items()}
    total = {name: torch.zeros(master.numel()) for name, master in start.items()}
    for _ in range(4):
        trainee.step(1e-3)
        for name, gradient in trainee.gradients.items():
            total[name] += gradient
    for name, master in trainee.masters.items():  # what is missing is less than half a step of the last message
        lacks, moved = (master.flatten() - trainee.held[name]).abs().max(), (master - start[name]).abs().max()
        assert 0 < lacks < moved / 10, name
        assert trainee.residuals[name].abs().max() < total[name].abs().max() / 5, name


def test_a_smaller_rate_changes_less(trainee: change_entropy.Trainee) -> None:
    entropies = []
    for rate in (1e-3, 1e-5, 1e-7):
        other = trainee.clone()
        changes = [other.step(rate) for _ in range(2)][-1]
        entropies.append(next(change_entropy.rows_of(other, changes))["entropy"])
    assert entropies[0] > 2 * entropies[1] > 4 * entropies[2]


def test_a_clone_trains_as_the_original(trainee: change_entropy.Trainee) -> None:
    other = trainee.clone()
    mine, its = trainee.step(1e-3), other.step(1e-3)
    assert all(torch.equal(mine[name][0], its[name][0]) for name in mine)


def test_moved_values_are_ulps_apart() -> None:
    values = torch.tensor([1.0, -1.0, 0.0, -0.0]).bfloat16()
    steps = torch.tensor([1, 1, -1, 1])
    assert bench_ulps.moved(values, steps).view(torch.int16).tolist() == [0x3F81, 0xBF7F - 65536, -32768, 0]
    assert (bench_ulps.order(bench_ulps.moved(values, steps)) - bench_ulps.order(values)).tolist() == steps.tolist()
