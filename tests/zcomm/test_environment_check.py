"""A rank with another version or setting of the library is one named error on every rank, before any exchange."""

# covers zcomm/_transport/environment_check.py

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import run_ranks
from zcomm import ConfigError, Topology
from zcomm._base import env
from zcomm._transport import environment_check
from zero import ZeroOptimizer, initialize

DIFFERENT = {"torch": "2.12.0", "zcomm-zero": "0.0.9", "ZCOMM_CHECK": "1"}


def _check(rank: int) -> None:
    usual = environment_check.facts
    for name, value in DIFFERENT.items():
        environment_check.facts = lambda name=name, value=value: usual() | ({name: value} if rank == 1 else {})
        environment_check._COMPARED.clear()
        mine = rf"same libraries with the same switches: {name} is \S+ on rank 0 and {value} on rank 1$"
        try:
            with pytest.raises(ConfigError, match=mine):
                Topology(ranks_per_node=2)
            with pytest.raises(ConfigError, match=mine):
                ZeroOptimizer(nn.Linear(2, 2), torch.optim.SGD, lr=0.1)
            with pytest.raises(ConfigError, match=mine):
                initialize(model=nn.Linear(2, 2), config={"train_micro_batch_size_per_gpu": 1})
        finally:
            environment_check.facts = usual
    with pytest.MonkeyPatch.context() as patch:
        for wrong_on, match in [
            ((1,), "ZCOMM_CHECK is 0 on rank 0 and yes on rank 1$"),
            ((0, 1), "must be one of 0, 1: "),
        ]:
            if rank in wrong_on:
                patch.setenv("ZCOMM_CHECK", "yes")
            env.forget()
            with pytest.raises(ConfigError, match=match):
                Topology(ranks_per_node=2)
    env.forget()
    Topology(ranks_per_node=2).close()
    dist.barrier()


def test_another_library_or_switch_on_one_rank() -> None:
    run_ranks(2, _check)


def _check_clones(rank: int) -> None:
    compared = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment_check, "compare", lambda group, **_: compared.append(group))
        topology = Topology(ranks_per_node=2)
        assert topology.companion.companion.world_size == 2
        assert compared == [None]
        topology.close()


def test_clones_do_not_compare_again() -> None:
    run_ranks(2, _check_clones)
