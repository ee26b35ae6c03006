"""Makes the golden checkpoints of a release: two ranks, stages 1 to 3, and their contents as NumPy arrays.

Run as ``python -m tests.golden.make_checkpoints NAME`` at a release. Existing ones are never overwritten: what a user
has saved must load.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

import zero
from tests.ranks import close_pools, run_ranks
from tests.zero.test_checkpoint import whole_state
from tests.zero.test_golden_checkpoints import CLIENT_STATE, FOLDER, STAGES, new_inner, new_small, zero_whole
from tests.zero.training import zero_optimizer


def _save(rank: int, folder: str) -> None:
    for stage in STAGES:
        model = new_small(seed=0)
        with zero_optimizer(model, new_inner(model), stage=stage) as optimizer:
            for step in range(3):
                model(torch.tensor([step, rank, 6])).backward()
                optimizer.step()
                optimizer.zero_grad()
            zero.save_checkpoint(optimizer, folder, f"stage{stage}", client_state=CLIENT_STATE, save_latest=False)
            state = whole_state(optimizer, model)
            state["count"] = model.count.clone()
            state["frozen.weight"] = zero_whole(model, "frozen.weight").float()
            if rank == 0:
                path = Path(folder) / f"stage{stage}.npz"
                np.savez_compressed(path, **{key: value.numpy() for key, value in state.items()})


def main() -> None:
    """Add the checkpoints of the release that the command line names."""
    folder = FOLDER / sys.argv[1]
    folder.mkdir(parents=True)  # a release that is there already is an error
    run_ranks(2, _save, str(folder))
    close_pools()


if __name__ == "__main__":
    main()
