"""Texts to and from the first rank: each rank gets its own, only those bytes are sent, and damage is detected."""

# covers zcomm/control.py

from __future__ import annotations

import pytest
import torch.distributed as dist

import zcomm
from tests.ranks import run_ranks
from tests.zcomm.test_checked import checking, flipped_bit
from zcomm import DamagedError, control


def _check(rank: int, world_size: int) -> None:
    group, others = dist.group.WORLD, world_size - 1
    for lengths in ([5, 3, 400], [2000, 1, 1]):
        of_ranks = [chr(97 + r) * length for r, length in enumerate(lengths[:world_size])]
        with zcomm.traffic() as sent:
            assert control.texts_to_first(of_ranks[rank], group) == (of_ranks if rank == 0 else [])
        longest = max(map(len, of_ranks))
        assert sent.bytes() == 8 * others + (longest if rank else 0)
        with zcomm.traffic() as sent:
            assert control.text_from_first(of_ranks if rank == 0 else [], group) == of_ranks[rank]
        assert sent.bytes() == (0 if rank else others * (8 * world_size + longest))
    alone = control.texts_to_first("alone", None)
    assert control.text_from_first(alone, None) == alone[0] == "alone"
    if world_size == 1:
        return
    with checking():
        for victim, call in (
            (0, lambda: control.texts_to_first("some text", group)),
            (1, lambda: control.text_from_first(["some text"] * world_size, group)),
        ):
            with (
                flipped_bit(2 if rank == victim else 0),
                pytest.raises(DamagedError, match=f"rank {victim} received other bytes"),
            ):
                call()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_texts_go_to_and_from_the_first_rank(world_size: int) -> None:
    run_ranks(world_size, _check, world_size)
