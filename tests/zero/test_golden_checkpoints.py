"""Checkpoints written by earlier releases load bit for bit: tests/golden/checkpoints, which are never rewritten.

``python -m tests.golden.make_checkpoints`` adds those of a new release.
"""

# covers zero/_checkpoint/__init__.py zero/_checkpoint/load.py zero/_checkpoint/restore.py

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zero
from tests.ranks import run_ranks
from tests.zero.test_checkpoint import whole_state
from tests.zero.training import zero_optimizer
from zero._checkpoint import load

FOLDER = Path(__file__).parents[1] / "golden" / "checkpoints"
STAGES = (1, 2, 3)
CLIENT_STATE = {"step": 3, "rates": (0.5, float("inf")), "seen": torch.arange(5), 7: None}


class Small(nn.Module):
    """A few parameters of odd sizes, one frozen and one tied, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.inner = nn.Linear(5, 5)
        self.frozen = nn.Linear(5, 3)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        self.count += 1
        hidden = torch.tanh(self.inner(self.embedding(tokens)))
        return self.head(hidden).square().mean() + self.frozen(hidden).mean()


def new_small(seed: int) -> Small:
    torch.manual_seed(seed)
    return Small().to(torch.bfloat16)


def new_inner(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)


def is_equal(got: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return torch.equal(got, expected)
    return type(got) is type(expected) and bool(got == expected)


def _fail_to_read(rank: int, release: str) -> None:
    model = new_small(seed=1)
    with zero_optimizer(model, new_inner(model), stage=2) as optimizer:
        before = whole_state(optimizer, model)
        for name in ("LoadPartsPlanner", "make_request"):

            def full(*_: Any) -> None:
                raise RuntimeError("no memory")

            with pytest.MonkeyPatch.context() as patch:
                if rank == 1:
                    patch.setattr(load, name, full)
                with pytest.raises(zero.CheckpointError, match="cannot be read: RuntimeError"):
                    zero.load_checkpoint(optimizer, FOLDER / release, "stage2")
        after = whole_state(optimizer, model)
        assert all(is_equal(after[key], value) for key, value in before.items())


def test_whatever_goes_wrong_while_one_rank_reads_is_an_error_on_all() -> None:
    run_ranks(2, _fail_to_read, min(folder.name for folder in FOLDER.iterdir()))


def _load(rank: int, release: str) -> None:
    for stage in STAGES:
        model = new_small(seed=stage)
        with zero_optimizer(model, new_inner(model), stage=stage) as optimizer:
            for saved in STAGES:
                folder = FOLDER / release
                path, client = zero.load_checkpoint(optimizer, folder, f"stage{saved}")
                assert path == folder / f"stage{saved}"
                assert client.keys() == CLIENT_STATE.keys()
                assert all(is_equal(client[key], value) for key, value in CLIENT_STATE.items())
                expected = dict(np.load(folder / f"stage{saved}.npz"))
                got = whole_state(optimizer, model)
                got["count"] = model.count.clone()
                got["frozen.weight"] = zero_whole(model, "frozen.weight").float()
                assert got.keys() == expected.keys()
                wrong = [key for key in got if got[key].numpy().tobytes() != expected[key].tobytes()]
                assert not wrong, (stage, saved, wrong)


def zero_whole(model: nn.Module, name: str) -> Tensor:
    param = model.get_parameter(name)
    with zero.GatheredParameters([param]):
        return param.detach().clone()


@pytest.mark.parametrize("release", sorted(path.name for path in FOLDER.glob("*")))
def test_a_checkpoint_of_an_earlier_release_loads_bit_for_bit(release: str) -> None:
    run_ranks(2, _load, release)


def test_they_are_as_they_were_written() -> None:
    for metadata in FOLDER.glob("*/*/metadata.json"):
        document = json.loads(metadata.read_text())
        assert (document["format"], document["version"]) == ("zero-checkpoint", 1)
        assert len(list(metadata.parent.glob("shard_*"))) == len(document["content"]["files"]) == 2
