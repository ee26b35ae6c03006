"""``bench/to_loss.py``: steps, seconds and bytes by hand; what is said of systems without them; what its peers send."""

# covers bench/to_loss.py bench/contenders/diloco.py bench/contenders/ddp.py

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from tests.end_to_end.job import ROOT
from tests.ranks import run_ranks

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "bench"))
    import to_loss
    from comparison.records import Store
    from contenders import ddp, diloco
    from side_by_side.records import Key, Record


def _record(configuration: str, losses: list[tuple[int, float]], seed: int = 1) -> Record:
    key = Key("main", configuration, seed, 500)
    return Record(key, "c", "v", "2x2", steps_done=500, held_out_losses=losses)


def test_steps_to_a_loss_lie_on_straight_lines() -> None:
    curve = [(0, 5.0), (100, 2.5), (200, 2.6), (300, 1.8), (400, 1.7)]
    for target, step in ((2.5, 100), (2.0, 275), (1.8, 300), (5.0, 0), (1.6, None), (3.75, 50)):
        assert to_loss.steps_to(_record("zeropp", curve), target) == (None if step is None else pytest.approx(step))


def _tables(tmp_path: Path, systems: dict[str, Any], records: list[Record]) -> list[list[str]]:
    run = {"running": "", "tokens": 1, "numel": 1, "systems": systems}
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
        "zero++": system([3.0, 1.0, 2.0], 5e6),
        "diloco x10": system([10.0], 40e6, accumulation=10),
        "hsdp reshard=True": system([1.5], 1e6),
        "fsdp2 reshard=True": {"error": "RuntimeError: gone"},
        "ddp powersgd 4": system([0.1], 1e6),
        "ddp": system([0.1], 1e6),
    }
    records = [
        _record("zeropp", [(0, 3.0), (100, 2.0)]), _record("zeropp", [(0, 3.0), (400, 1.0)], seed=2),
        _record("diloco-10", [(0, 3.0), (100, 2.5), (300, 1.5)]),
        _record("bf16-zero3", [(0, 3.0), (100, 1.0)]),
        _record("ddp-powersgd-4", [(0, 3.0), (500, 2.25)]), _record("ddp-powersgd-4", [(0, 3.0), (500, 1.75)], seed=2),
    ]  # fmt: skip
    assert _tables(tmp_path, systems, records) == [
        ["hsdp reshard=True", "bf16-zero3", "1", "50", "1,500", "75", "50"],
        ["diloco x10", "diloco-10", "1", "200", "1,000", "200", "800"],
        ["zero++", "zeropp", "2", "150 ± 50", "2,000", "300 ± 100", "750 ± 250"],
        ["fsdp2 reshard=True", "bf16-zero3", "1", "RuntimeError: gone", "", "", ""],
        ["ddp powersgd 4", "ddp-powersgd-4", "2", "not in 500: 2.000", "100", "", ""],
        ["ddp", "fp32-ddp", "0", "no losses", "", "", ""],
    ]


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
    ddp.send_by_powersgd(model, 1, first_step=2)
    for _ in range(4):
        model.zero_grad()
        (model(inputs) * factors[rank]).sum().backward()
        torch.testing.assert_close(layer.weight.grad, torch.outer(factors.mean(0), inputs[0]))  # of rank 1: exact
        torch.testing.assert_close(layer.bias.grad, factors.mean(0))


def test_nodes_average_changes_and_powersgd_sends_what_has_its_rank() -> None:
    run_ranks(4, _check_exchanges)
