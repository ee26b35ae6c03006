"""The bit ledger and ``zero bisect``: what two runs have in common, and the place where a bit was changed."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import run_ranks
from tests.zero.models import batch, loss_of, new_model
from tests.zero.training import zero_optimizer
from zcomm import ConfigError, StateError, Topology
from zero import GatheredParameters, ZeroOptimizer, bisect, utils
from zero.bit_ledger import GRADIENT, RECORD, BitLedger, file_of, hash_bits
from zero.cli import main

WIDTH = 8


def _by_hand(values: list[int], first: int) -> int:
    """The same sum in Python's integers."""
    mask, total = 2**64 - 1, 0
    for index, bits in enumerate(values, first):
        x = (bits * 0x9E3779B97F4A7C15 + (index + 1) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 31)) * 0x94D049BB133111EB) & mask
        x = ((x ^ (x >> 29)) * 0x9E3779B97F4A7C15) & mask
        total += x ^ (x >> 31)
    return total & mask


def test_the_hash_is_a_sum_over_elements() -> None:
    values = torch.randn(1000)
    bits = values.view(torch.int32).tolist()
    assert hash_bits(values, 7) == _by_hand(bits, 7)
    assert (hash_bits(values[:300]) + hash_bits(values[300:], 300)) % 2**64 == hash_bits(values)
    assert hash_bits(values) != hash_bits(values.flip(0))
    for dtype in (torch.bfloat16, torch.float64):
        assert hash_bits(values.to(dtype)) != hash_bits(-values.to(dtype))


class Whole(nn.Module):
    """Sums of whole numbers: no bit depends on how many ranks there are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.arange(700.0) % 5) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.first * x).sum() + (self.second * x).sum()


def _train_whole(rank: int, folder: str, world_size: int, stage: int, changes_at: int | None) -> None:
    model = Whole()
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    with zero_optimizer(model, sgd, stage=stage, bit_ledger=folder) as optimizer:
        for update in range(4):
            model(torch.full((700,), 2.0)).backward()
            if update == changes_at:
                gradient = utils.safe_get_full_grad(model.second)
                gradient[-1] += 1
                utils.safe_set_full_grad(model.second, gradient)
            optimizer.step()
            optimizer.zero_grad()


def test_runs_of_other_world_sizes_and_stages_are_compared(tmp_path: Path) -> None:
    for world_size, stage in ((1, 1), (2, 3), (2, 0), (2, 2)):
        run_ranks(world_size, _train_whole, str(tmp_path / f"{world_size}{stage}"), world_size, stage, None)
    for other in ("23", "20", "22"):
        assert bisect.find(tmp_path / "11", tmp_path / other) == (None, 4)
    run_ranks(2, _train_whole, str(tmp_path / "changed"), 2, 3, 2)
    found, _ = bisect.find(tmp_path / "11", tmp_path / "changed")
    assert found == (3, "gradient", "second", None, False)
    found, _ = bisect.find(tmp_path / "23", tmp_path / "changed")
    assert found == (3, "gradient", "second", (1,), False)


def _train_on_a_full_disk(rank: int, folder: str) -> None:
    """Rank 1 cannot write gradients, whose step is tried again; later not the parameters, which nobody goes on from."""
    model, path = Whole(), file_of(folder, 1)
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)

    def step(nbytes: int | None) -> None:
        if rank == 1 and nbytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + nbytes, usual[1]))
        try:
            optimizer.step()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, usual)

    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.5), stage=2, bit_ledger=folder) as optimizer:
        for update in range(4):
            before = path.stat().st_size if rank == 1 else 0
            model(torch.full((700,), 2.0)).backward()
            if update == 1:
                with pytest.raises(OSError, match="too large"):
                    step(8)
            if update < 3:
                step(None)
                optimizer.zero_grad()
                grown = (path.stat().st_size if rank == 1 else 0) - before
        with pytest.raises(OSError, match="too large"):
            step(grown // 2)
        with pytest.raises(StateError, match=r"after some parameters were updated.*too large"):
            step(None)


def test_a_disk_that_is_full_ends_no_run_half_way(tmp_path: Path) -> None:
    run_ranks(2, _train_whole, str(tmp_path / "usual"), 2, 2, None)
    run_ranks(2, _train_on_a_full_disk, str(tmp_path / "full"))
    assert bisect.find(tmp_path / "usual", tmp_path / "full") == (None, 3)


def test_a_shorter_attempt_leaves_nothing_of_a_longer_one(tmp_path: Path) -> None:
    ledger: Any = object.__new__(BitLedger)
    ledger._path, ledger._num_updates = tmp_path / "ledger", 0
    ledger._runtime = SimpleNamespace(topology=Topology(ranks_per_node=1))
    ledger._path.write_bytes(b"header")
    rows = [(number, 0, torch.ones(2)) for number in range(3)]
    assert ledger._write(GRADIENT, iter(rows), 6) == 6 + 3 * RECORD.itemsize
    assert ledger._write(GRADIENT, iter(rows[:1]), 6) == 6 + RECORD.itemsize == ledger._path.stat().st_size
    assert ledger._path.read_bytes()[:6] == b"header"


def _train(rank: int, folder: str, edit: int | None, options: dict[str, Any]) -> None:
    model = new_model()
    with zero_optimizer(model, stage=3, bit_ledger=folder, **options) as optimizer:
        for update in range(4):
            loss_of(model, *batch(update, 0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if update == edit:
                weight = model.blocks[1].mlp[0].weight
                with GatheredParameters(weight, modifier_rank=0), torch.no_grad():
                    weight[0, 0] += 1e-3


def test_the_command_names_the_update_the_parameter_and_the_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plus = {"quantized_weights": True, "quantized_gradients": True, "gradient_clipping": 0.5}
    for name, edit in (("a", None), ("b", None), ("c", 1)):
        run_ranks(2, _train, str(tmp_path / name), edit, plus)
    assert main(["bisect", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out == "no bit differs in the 4 updates that both runs have\n"
    assert main(["bisect", str(tmp_path / "a"), str(tmp_path / "c")]) == 0
    assert capsys.readouterr().out.startswith("update 3: gradient of 'blocks.")
    assert main(["bisect", str(tmp_path / "a"), str(tmp_path / "nothing")]) == 1
    assert "give the folder that bit_ledger named" in capsys.readouterr().err
    file_of(tmp_path / "c", 1).write_bytes(b"[1]\n")
    with pytest.raises(ConfigError, match="write it anew with bit_ledger"):
        bisect.find(tmp_path / "a", tmp_path / "c")


def test_other_models_and_delayed_updates_are_refused(tmp_path: Path) -> None:
    for name, model in (("a", nn.Linear(3, 2)), ("b", nn.Linear(3, 2, bias=False))):
        ZeroOptimizer(model, torch.optim.SGD, lr=0.1, bit_ledger=str(tmp_path / name)).close()
    with pytest.raises(ConfigError, match=r"they differ, first \['bias'\]"):
        bisect.find(tmp_path / "a", tmp_path / "b")
    late = {"offload_optimizer": {"device": "cpu"}, "delayed_update": True, "bit_ledger": str(tmp_path)}
    with pytest.raises(ConfigError, match="not combined with delayed_update"):
        ZeroOptimizer(nn.Linear(3, 2), torch.optim.SGD, lr=0.1, **late)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        ZeroOptimizer(nn.Linear(3, 2), torch.optim.SGD, lr=0.1, bit_ledger=str(tmp_path / "file"))
