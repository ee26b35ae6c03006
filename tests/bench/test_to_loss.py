"""``bench/to_loss.py``: steps, seconds and bytes by hand; what is said of systems without them; what its peers send."""

# covers bench/to_loss.py bench/contenders/diloco.py bench/contenders/ddp.py

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from tests.end_to_end.job import ROOT
from tests.ranks import run_ranks, topology

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "bench"))
    import to_loss
    from comparison.records import Store
    from contenders import ddp, diloco
    from side_by_side.records import Key, Record


def _record(configuration: str, losses: list[tuple[int, float]], seed: int = 1, length: int = 500) -> Record:
    key = Key("main", configuration, seed, length)
    return Record(key, "c", "v", "2x2", numel=9, steps_done=length, held_out_losses=losses)


def test_steps_to_a_loss_lie_on_straight_lines() -> None:
    curve = [(0, 5.0), (100, 2.5), (200, 2.6), (300, 1.8), (400, 1.7)]
    for target, step in ((2.5, 100), (2.0, 275), (1.8, 300), (5.0, 0), (1.6, None), (3.75, 50)):
        assert to_loss.steps_to(_record("zeropp", curve), target) == (None if step is None else pytest.approx(step))


def _tables(tmp_path: Path, systems: dict[str, Any], records: list[Record]) -> list[list[str]]:
    run = {"running": "", "tokens": 1, "numel": 9, "systems": systems}
    runs = {"bfloat16 main 100mbit": run, "bfloat16 users 100mbit": run}
    path = tmp_path / "store.json"
    path.write_text(json.dumps({"context": {"machine": "M"}, "shape": {}, "runs": runs, "memory": {}}))
    text = to_loss.page(Store(path), records, 2.0)
    assert text.count("## 100mbit, bfloat16") == 1, "of the batch main alone"
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]
    assert rows[0] == to_loss.HEADER
    return rows[2:]


def test_seconds_and_bytes_by_hand_and_what_has_none(tmp_path: Path) -> None:
    def system(seconds: list[float], nbytes: float, **facts: Any) -> dict[str, Any]:
        return {"seconds": seconds, "wire_nbytes": [nbytes] * len(seconds), **facts}

    systems = {
        "zero++": system([1.0, 2.0, 6.0], 5e6),
        "diloco x10": system([10.0], 40e6, accumulation=10),
        "hsdp reshard=True": system([1.5], 1e6),
        "fsdp2 reshard=True": {"error": "RuntimeError: gone"},
        "ddp powersgd 4": system([0.1], 1e6),
        "ddp powersgd 16": {"seconds": [9.0, 0.2, 0.2], "wire_nbytes": [8e6, 2e6, 2e6]},  # the first is whole
        "ddp bf16 two hops": system([2.5, 3.0, 3.5], 8e6),
    }
    records = [
        _record("zeropp", [(0, 3.0), (100, 2.0)]), _record("zeropp", [(0, 3.0), (400, 1.0)], seed=2),
        _record("diloco-10", [(0, 3.0), (100, 2.5), (300, 1.5)]),
        _record("diloco-10", [(0, 3.0), (150, 2.0)], length=1000),
        _record("diloco-10-outer0.4", [(0, 3.0), (140, 2.0)]), _record("diloco-50-outer0.4", [(0, 3.0), (9, 2.0)]),
        _record("bf16-zero3", [(0, 3.0), (100, 1.0)]),
        _record("ddp-powersgd-4", [(0, 3.0), (500, 2.25)]), _record("ddp-powersgd-4", [(0, 3.0), (500, 1.75)], seed=2),
        _record("ddp-powersgd-16", [(0, 3.0), (100, 2.0)]), _record("ddp-powersgd-16", [(0, 3.0), (20, 2.0)], seed=2),
    ]  # fmt: skip
    assert _tables(tmp_path, systems, records) == [
        ["hsdp reshard=True", "bf16-zero3", "500", "1", "50", "1,500", "75", "50"],
        # 50 whole gradients and 50 factors, 20 whole gradients: 150 + 10 and 60 seconds, 400 + 100 and 160 MB
        ["ddp powersgd 16", "ddp-powersgd-16", "500", "2", "60 ± 40", "200", "110 ± 51", "330 ± 170"],
        ["diloco x10", "diloco-10-outer0.4", "500", "1", "140", "1,000", "140", "560"],
        # of the seeds 100 s, of the rounds 150 times 1.53 s: the root of the sum of the squares
        ["zero++", "zeropp", "500", "2", "150 ± 50", "2,000", "300 ± 250", "750 ± 250"],
        ["fsdp2 reshard=True", "bf16-zero3", "", "0", "RuntimeError: gone", "", "", ""],
        ["ddp powersgd 4", "ddp-powersgd-4", "500", "2", "never: 2.000", "100", "", ""],
        ["ddp bf16 two hops", "fp32-ddp", "", "0", "no losses", "", "", ""],
    ]


def test_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="main-500-zeropp-seed1 has 8 parameters, bfloat16 main 100mbit 9"):
        _tables(tmp_path, {}, [_record("zeropp", [(0, 3.0)]), replace(_record("zeropp", [(0, 3.0)]), numel=8)])


def _check_exchanges(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "ranks"))
    manager = diloco._Manager(mesh.get_group("nodes"), mesh.get_group("ranks"))
    for numel in (1, 5, 8):
        change = torch.arange(float(numel)) + 4.0 * (rank // 2)  # the same on the ranks of a node
        manager.allreduce(change, should_quantize=False).wait()
        assert change.tolist() == [index + 2.0 for index in range(numel)]

    torch.manual_seed(1)
    layer, inputs, factors = nn.Linear(12, 8), torch.randn(1, 12), torch.randn(4, 8)
    model = DistributedDataParallel(layer, bucket_cap_mb=ddp.ONE_BUCKET)
    state = ddp.send_by_powersgd(model, 1, first_step=2)
    for _ in range(4):
        model.zero_grad()
        (model(inputs) * factors[rank]).sum().backward()
        torch.testing.assert_close(layer.weight.grad, torch.outer(factors.mean(0), inputs[0]))  # of rank 1: exact
        torch.testing.assert_close(layer.bias.grad, factors.mean(0))
    assert state.compression_stats()[1:] == (2 * (8 * 12 + 8), 2 * (8 + 12 + 8)), "of two steps: the bias is sent whole"


def test_nodes_average_changes_and_powersgd_sends_what_has_its_rank() -> None:
    run_ranks(4, _check_exchanges)


def _check_local_steps(rank: int) -> None:
    node, start = rank // 2, torch.tensor([1.0, 2.0])

    def new(weights: torch.Tensor) -> tuple[nn.Parameter, torch.optim.SGD, diloco.LocalSteps]:
        layer = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(layer.weight).data += weights
        inner = torch.optim.SGD(layer.parameters(), lr=0.5)
        return layer.weight, inner, diloco.LocalSteps(layer, inner, topology(2), every=2)

    def train(weight: nn.Parameter, inner: torch.optim.SGD, local: diloco.LocalSteps) -> list[float]:
        """A step on an input of ones: the gradient is (rank + 1), averaged in the node 1.5 or 3.5."""
        (local.wrapped(torch.ones(1, 2)).sum() * (rank + 1)).backward()
        inner.step()
        inner.zero_grad()
        return weight.detach().flatten().tolist()

    parts = new(start)
    assert train(*parts) == (start - 0.5 * (1.5, 3.5)[node]).tolist(), "nodes are apart"
    # Two steps change a node's weights by 1.5 and 3.5, in the mean by 2.5; of that, and of its momentum of 0.9, 0.7.
    assert train(*parts) == pytest.approx((start - 0.7 * (2.5 + 0.9 * 2.5)).tolist())
    saved, outer = parts[0].detach().clone(), deepcopy(parts[2].outer.state_dict())
    third = [train(*parts) for _ in range(4)]
    assert third[0] == pytest.approx((saved[0] - 0.5 * (1.5, 3.5)[node]).tolist())
    momentum = 0.9 * 2.5 + 2.5
    assert third[1] == pytest.approx((saved[0] - 0.7 * (2.5 + 0.9 * momentum)).tolist())
    parts[2].close()
    parts = new(torch.zeros(2))
    parts[0].data.copy_(saved)
    parts[2].outer.load_state_dict(outer)
    parts[2].note_loaded()
    assert [train(*parts) for _ in range(4)] == third, "it goes on as if it had not stopped"
    parts[2].close()


def test_diloco_is_its_paper_and_goes_on_where_it_was_saved() -> None:
    pytest.importorskip("torchft", reason="torchft is not installed: it is in the peers extra")
    run_ranks(4, _check_local_steps)
