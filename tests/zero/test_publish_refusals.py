"""What cannot be published or followed is refused by name, and the same on every rank."""

# covers zero/_publish/publisher.py zero/_publish/subscriber.py zero/_publish/weights.py zero/_ranks/first_rank.py

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from zcomm import LayoutError


def _linears(*, is_tied: bool = False) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    if is_tied:
        model[1].weight = model[0].weight
    return model


def _overlapping() -> dict[str, Tensor]:
    memory = torch.zeros(31)
    return {"0.weight": memory[:16].view(4, 4), "1.weight": memory[15:].view(4, 4)}


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (_linears(is_tied=True), "'0.weight' and '1.weight' share memory"),
        (_overlapping(), "'0.weight' and '1.weight' share memory"),
        (_linears().to("meta"), "on meta"),
    ],
)
def test_targets_that_cannot_hold_the_published_values(tmp_path: Path, target: Any, words: str) -> None:
    with zero.Publisher(_linears(), tmp_path) as publisher:
        publisher.publish()
    with pytest.raises(LayoutError, match=words):
        zero.Subscriber(tmp_path, target).update()


def test_what_is_published_tied_may_be_tied(tmp_path: Path) -> None:
    model, ours = _linears(is_tied=True), _linears(is_tied=True)
    with zero.Publisher(model, tmp_path) as publisher:
        publisher.publish()
    assert zero.Subscriber(tmp_path, ours).update() == ["0.weight"]
    assert torch.equal(ours[1].weight, model[0].weight)
    halves = torch.zeros(32)
    apart = {"0.weight": halves[:16].view(4, 4), "1.weight": halves[16:].view(4, 4)}
    with zero.Publisher(_linears(), tmp_path) as publisher:
        publisher.publish()
    zero.Subscriber(tmp_path, apart).update()


@pytest.mark.parametrize("waits", [False, True])
def test_a_folder_that_was_emptied_and_filled_up_to_the_same_number(tmp_path: Path, waits: bool) -> None:
    ours = _linears()
    subscriber = zero.Subscriber(tmp_path, ours)
    for _ in range(2):
        shutil.rmtree(tmp_path)
        model = _linears()
        with zero.Publisher(model, tmp_path) as publisher:
            publisher.publish(5)
        assert subscriber.wait(0.0) if waits else subscriber.update()
        assert torch.equal(ours[1].weight, model[1].weight)
        assert subscriber.update() == []
