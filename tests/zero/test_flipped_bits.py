"""A flipped bit anywhere in a checkpoint: the same named error on every rank, or a bit without meaning."""

# covers zero/plan/report.py

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

import zero
from tests.ranks import run_ranks
from tests.zero.models import new_model
from tests.zero.test_checkpoint import assert_equal_bits, whole_state
from tests.zero.training import train, zero_optimizer
from zero import CheckpointError

NUM_BITS = int(os.environ.get("ZERO_TEST_BITS", "24"))


def _flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def _check(rank: int, path: str) -> None:
    folder, draw = Path(path), random.Random(os.environ.get("ZERO_TEST_SEED", "0"))
    texts: list[Any] = [None, None]
    model = new_model()
    with zero_optimizer(model, stage=3) as optimizer:
        train(model, optimizer, rank, steps=1)
        zero.save_checkpoint(optimizer, folder, "good")
        saved = whole_state(optimizer, model)
        names = sorted(file.name for file in (folder / "good").iterdir())
        for i in range(NUM_BITS):
            name = names[i % len(names)]
            bit = draw.randrange(8 * (folder / "good" / name).stat().st_size)
            if rank == 0:
                shutil.rmtree(folder / "bad", ignore_errors=True)
                shutil.copytree(folder / "good", folder / "bad")
                _flip(folder / "bad" / name, bit)
            dist.barrier()
            text = "nothing"
            try:
                zero.load_checkpoint(optimizer, folder, "bad")
            except CheckpointError as error:
                text = str(error)
            dist.all_gather_object(texts, text)
            assert texts[0] == texts[1], (name, bit, texts)
            assert_equal_bits(whole_state(optimizer, model), saved)
            assert text != "nothing", f"bit {bit} of {name} says nothing"


def test_a_flipped_bit_of_a_checkpoint_is_the_same_error_on_every_rank(tmp_path: Path) -> None:
    run_ranks(2, _check, str(tmp_path))
