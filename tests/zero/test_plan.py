"""``zero plan``: its bytes equal those that ranks send, its figures agree with published ones; and its command."""

# covers zero/_config/parse.py zero/_config/resolved.py zero/_sharding/prefetch_plan.py zero/plan/cluster.py

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zero
from tests.ranks import run_ranks
from zcomm import ConfigError, Topology
from zero._config import explain, parse, resolve_config
from zero._config.settings import ZeroSettings, numel_to_merge
from zero.cli import main
from zero.plan import CLUSTERS, Cluster, Job, Model, largest_model, plan
from zero.plan.estimate import with_shares
from zero.plan.exchanges import Exchanges, step_moved
from zero.plan.formulas import Counts, TrainingSetup, usage_of
from zero.plan.planner import KEPT_NUMEL

WIDTH, NUM_MICRO = 96, 2
SENT = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 3, small exchanges": {"stage": 3, "allgather_bucket_size": 10_000, "reduce_bucket_size": 10_000},
    "ZeRO++ at stage 1": {"stage": 1, "quantized_weights": True, "quantized_gradients": True},
    "ZeRO++": {"stage": 3, "quantized_weights": True, "quantized_gradients": True, "hpz_partition_size": 2},
    "delta-hpZ": {"stage": 3, "mode": "delta_hpz", "changes": "quantized"},
    "delta": {"stage": 2, "mode": "delta", "changes": "quantized"},
    "delta, small exchanges": {"stage": 1, "mode": "delta", "changes": "quantized", "reduce_bucket_size": 10_000},
}


def _layers() -> nn.Module:
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(3))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks).bfloat16()


def _check_sent(rank: int) -> None:
    _check_each(SENT, ("intra", "inter"))


def _check_chunks(rank: int) -> None:
    """Inside nodes, pieces of a chunk may be sent together, so they are counted separately."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zcomm._transport.chunks, "MIN_CHUNK_NUMEL", 4096)
        _check_each(("stage 1", "ZeRO++", "delta-hpZ", "delta"), ("inter",))


def _check_once(rank: int) -> None:
    """Parameters and gradients that stay full until the last micro-batch are gathered and reduced once."""
    _check_each(("stage 2", "stage 3", "ZeRO++ at stage 1", "ZeRO++", "delta-hpZ"), ("intra", "inter"), is_once=True)


def _check_each(names: Iterable[str], counted_links: tuple[str, ...], *, is_once: bool = False) -> None:
    ranks = Topology(ranks_per_node=2)
    for name in names:
        model, options = _layers(), SENT[name] | {"stage3_max_reuse_distance": KEPT_NUMEL if is_once else 0}
        optimizer = zero.ZeroOptimizer(
            model, torch.optim.SGD, topology=ranks, lr=0.1, gradient_accumulation_steps=NUM_MICRO, **options
        )
        for step in range(2):  # the first one records the order
            with zcomm.traffic() as traffic:
                for micro in range(NUM_MICRO):
                    with optimizer.no_sync() if is_once and micro < NUM_MICRO - 1 else nullcontext():
                        model(torch.ones(1, WIDTH, dtype=torch.bfloat16)).float().sum().backward()
                        if is_once and (step, micro) == (1, 0):
                            _check_full(optimizer.memory(), options["stage"])
                optimizer.step()
                optimizer.finish_update()
                optimizer.zero_grad()
        optimizer.close()
        settings = resolve_config(None, {"gradient_accumulation_steps": NUM_MICRO, **options}).settings
        planned = Model.of_module(_layers(), num_layers=3, hidden=WIDTH)
        kinds = step_moved(planned, Exchanges.of(settings, 2, 2, torch.bfloat16), NUM_MICRO, is_once=is_once)
        agreements = kinds.pop("agreements").exchanges.inter  # of all ranks at once: each has one peer in its node
        assert traffic.calls(operation="control", link="intra") == agreements, f"{name}: {traffic}"
        found = kinds.values()
        for link in ("intra", "inter"):
            counted = traffic.bytes(link=link) - traffic.bytes(operation="control", link=link)
            assert counted == sum(getattr(moved.sent, link) for moved in found), f"{name}, {link}: {traffic}"
            calls = traffic.calls(link=link) - traffic.calls(operation="control", link=link)  # there is one peer
            expected = sum(getattr(moved.exchanges, link) for moved in found)
            assert link not in counted_links or calls == expected, f"{name}, {link}: {traffic}"
    ranks.close()


def _check_full(memory: Any, stage: int) -> None:
    """Between micro-batches the pool has what the plan counts: float32 gradients, and at stage 3 bf16 parameters."""
    if stage < 2:
        return
    counts = Counts(numel=sum(param.numel() for param in _layers().parameters()))
    usage = {u.kind: u.nbytes for u in usage_of(counts, TrainingSetup(stage=stage, is_once=True))}
    assert memory.unreduced_gradients == pytest.approx(usage["unreduced gradients"], rel=0.05), (memory, usage)
    pool = memory.buffers["pool"] - memory.unreduced_gradients
    assert pool == pytest.approx(usage.get("gathered parameters", 0), rel=0.05), (memory, usage)


@pytest.mark.parametrize("check", [_check_sent, _check_chunks, _check_once])
def test_planned_bytes_and_exchanges_are_those_of_ranks(check: Callable[[int], None]) -> None:
    """To the byte and to the exchange, except for agreements; on 2 nodes x 2 ranks, full and in chunks."""
    run_ranks(4, check)


@pytest.fixture(scope="module")
def published() -> Any:
    """The tables of bench/plan_validation.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
        import plan_validation
    return plan_validation


@pytest.mark.parametrize("table", ["table_1", "table_2"])
def test_memory_of_zero(published: Any, table: str) -> None:
    lines = list(getattr(published, table)())
    assert [line for line in lines if abs(line.error) > 0.01 and line.digit_error > 0.5] == []


def test_throughput_of_zeropp(published: Any) -> None:
    lines = list(published.zeropp())
    assert len(lines) == 20
    assert [line for line in lines if abs(line.error) > 0.15] == []


def test_largest_models_on_one_dgx2(published: Any) -> None:
    """At least as many as published, at most half more: the formulas omit the frameworks' own memory."""
    lines = list(published.dgx2())
    assert [line for line in lines if not -0.01 <= line.error <= 0.55] == []
    assert [line.planned for line in lines] == sorted(line.planned for line in lines)
    free = {what: (place, gb) for what, place, gb, _ in published.spare(lines)}
    assert set(free) == {line.what for line in lines if abs(line.error) > 0.2}, "each large difference is explained"
    place, gb = free["data parallel"]  # 1.4e9 parameters of 16 + 2 bytes, and up to 3 GB of activations, on each of 16
    assert place == "device"
    assert 16 * (32 * 1.0737 - 18 * 1.4 - 3) < gb < 16 * (32 * 1.0737 - 16 * 1.4)


def test_zero_offload(published: Any) -> None:
    lines = {line.what: line for line in published.offload()}
    largest = lines.pop("largest model on one GPU, billions")
    assert 0 <= largest.error < 0.25
    assert all(line.planned == pytest.approx(float(line.published), rel=0.01) for line in lines.values())


def test_the_runs_of_the_tutorial(published: Any) -> None:
    """What the tutorial calls 1.5 billion parameters has 1.56."""
    assert all(abs(line.error) < 0.04 for line in published.megatron())
    runs = published.megatron_fits()
    assert [run.batch for run in runs if run.published is not None] == [1] * 4
    assert [run.what for run in runs if run.published not in (None, run.planned)] == ["48 x 1600 on 8 without ZeRO"]
    without = [run for run in runs if run.what == "48 x 1600 on 8 without ZeRO"]
    assert [run.planned for run in without] == [True, True, False]
    assert without[2].batch == without[1].batch + 1
    assert all((run.gib < 32) == run.planned for run in runs)


def test_the_committed_page_is_what_the_command_writes(published: Any) -> None:
    page = Path(__file__).parents[2] / "bench" / "results" / "plan.md"
    assert page.read_text() == published.page()


@pytest.mark.parametrize("num_nodes", [1, 12_500])
def test_a_plan_is_quick_and_its_configurations_are_read(num_nodes: int) -> None:
    start = time.process_time()
    rows = plan(Model.of_shape(64, 8192), replace(CLUSTERS["8xa100"], num_nodes=num_nodes), Job(num_micro=4))
    assert time.process_time() - start < 5
    assert len({(row.stage, row.variant, row.tier) for row in rows}) == len(rows) >= 20
    fits = [row for row in rows if row.fits]
    assert rows[: len(fits)] == fits
    assert [row.tokens_per_s for row in fits] == sorted((row.tokens_per_s for row in fits), reverse=True)
    for row in rows:
        asked = resolve_config(parse(row.config, "plan"), {}).settings
        assert (asked.stage, asked.gradient_accumulation_steps) == (row.stage, 4)
        assert (asked.mode is not None, asked.quantized_gradients) == (
            "delta-hpZ" in row.variant,
            "ZeRO++" in row.variant,
        )
        assert "inactive" not in explain(parse(row.config, "plan"), world_size=8 * num_nodes)


def test_only_some_configurations_are_planned() -> None:
    model, cluster = Model.of_shape(4, 1024), Cluster(num_nodes=2)
    only = [(3, "plain", "device"), (3, "delta-hpZ", "device"), (0, "delta-hpZ", "device")]  # the last does not exist
    some = plan(model, cluster, only=only)
    assert some == [row for row in plan(model, cluster) if (row.stage, row.variant, row.tier) in only]
    assert len(some) == 2


def test_a_step_by_hand() -> None:
    """10^9 parameters in one layer at stage 3 on 2 nodes x 1 rank: the time of each part, computed from the rates."""
    cluster = Cluster(num_nodes=2, ranks_per_node=1, tflops=100, between_gbit=80, between_us=50, device_gbps=1000)
    model = Model.of_numel(1e9, 1, sequence=1000)
    rows = plan(model, cluster, Job(is_checkpointed=False))
    (row,) = (row for row in rows if (row.stage, row.variant, row.tier) == (3, "plain", "device"))
    attention = 12 * model.hidden * 1000
    assert row.times.computation == pytest.approx((6e9 + attention) * 1000 / (100e12 * 0.45))
    assert row.times.between == pytest.approx(3 * 1e9 / (10e9 * 0.9), rel=0.01)  # 3 times half of 2 bytes a parameter
    assert row.times.kernels == pytest.approx((4 + 2 + 2) * 1e9 / (1000e9 * 0.9), rel=0.01)
    assert (row.times.within, row.times.pcie, row.times.host, row.times.nvme) == (0, 0, 0, 0)
    assert row.times.latency == pytest.approx(
        (3 * 3 + 2) * 5e-5
    )  # 2 agreements, and 3 times, in pieces of less than 5 * 10^8
    assert row.times.step == pytest.approx(row.times.computation + row.times.transfers)
    assert row.tokens_per_s == pytest.approx(2000 / row.times.step)
    assert row.times.transfers > 1.1 * row.times.computation  # which limits how much could be hidden
    assert row.times.overlap == pytest.approx(row.times.computation / row.times.step)


def test_a_step_of_muon_by_hand() -> None:
    """One layer of width 1024 on 2 nodes x 1 rank: 4 matrices are dealt out, and the embeddings are cut in half."""
    h, cluster = 1024, Cluster(num_nodes=2, ranks_per_node=1, tflops=100, between_gbit=80)
    model = Model.of_shape(1, h, vocabulary=2048)
    found = {}
    for kind in ("adamw", "muon"):
        rows = plan(model, cluster, Job(is_checkpointed=False, optimizer=kind))
        (found[kind],) = (row for row in rows if (row.stage, row.variant, row.tier) == (1, "plain", "device"))
    # The matrices have 3, 1, 4 and 4 times h^2 elements: one rank has 4 + 1 + 1 of them, the other 4 + 3 of 12.
    work = {3: 4 * 3 + 2, 1: 4 + 2, 4: 4 * 4 + 2}
    flops = 5 * h**3 * max(work[4] + work[1], work[4] + work[3])
    added = found["muon"].times.computation - found["adamw"].times.computation
    assert added == pytest.approx(flops / (100e12 * 0.45))
    states = {kind: sum(u.nbytes for u in row.memory.usage() if u.kind == "states") for kind, row in found.items()}
    ends, small = (2048 + 1024) * h, 13 * h + 2 * h
    whole, own = (4 + 3) * h * h, ends / 2
    assert states["adamw"] == pytest.approx(12 * (12 * h * h + ends + small) / 2, rel=0.001)
    assert states["muon"] == pytest.approx(8 * whole + 12 * own, rel=0.005)
    longer = found["muon"].times.between / found["adamw"].times.between
    assert longer == pytest.approx((2 * whole + ends) / (12 * h * h + ends), rel=0.005)
    assert found["muon"].config["optimizer"] == {"type": "Muon"}
    assert "optimizer" not in found["adamw"].config


def test_a_planned_model_has_the_shares_of_the_estimate() -> None:
    model = nn.Sequential(nn.Embedding(300, WIDTH), *_layers()).bfloat16()
    planned = Model.of_module(model, num_layers=3, hidden=WIDTH)
    for stage in range(4):
        config = {"zero_optimization": {"stage": stage}, "optimizer": {"type": "Muon"}, "bf16": {"enabled": True}}
        expected = zero.estimate(model, config, 2, 2, prints=False).counts
        merged = 0 if stage == 3 else numel_to_merge(ZeroSettings(), 2)
        buckets = planned.dealt(2, 2, merged, deals=stage > 0)
        counts = with_shares(expected, buckets, 2, 2)
        assert counts == expected
        assert bool(counts.shares) is (stage > 0)


def test_a_plan_with_muon_is_quick() -> None:
    start = time.process_time()
    rows = plan(Model.of_shape(64, 8192), replace(CLUSTERS["8xa100"], num_nodes=16), Job(optimizer="muon"))
    assert time.process_time() - start < 10
    assert all(row.config["optimizer"]["type"] == "Muon" for row in rows)


def test_the_largest_model_fits_and_a_larger_one_does_not() -> None:
    cluster = replace(CLUSTERS["8xv100"], host_gib=0, nvme_gib=0)
    model, row = largest_model(Model.of_shape(2, 2048), cluster)
    assert row.fits
    assert row.memory.nbytes() > 0.9 * 32 * 2**30
    larger = model.of_layers(round(1.02 * model.num_layers))
    assert not any(row.fits for row in plan(larger, cluster))
    with pytest.raises(ConfigError, match="not even one layer of 2048"):
        largest_model(model, replace(cluster, device_gib=0.01))


def test_models_are_known_by_their_configuration(tmp_path: Path) -> None:
    """GPT-2 has 124 million parameters, without its attention masks."""
    pytest.importorskip("transformers", reason="transformers is not installed: it is in the bench extra")
    values = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "vocab_size": 50257, "n_positions": 1024}
    assert Model.of_config(values).numel == 124_439_808
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert main(["plan", "--model", str(tmp_path), "--json", "--nodes", "2"]) == 0


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    assert main(["plan", "--parameters", "7e9", "--layers", "32", "--nodes", "8", "--plot", str(picture)]) == 0
    shown = capsys.readouterr().out
    assert picture.stat().st_size > 10_000
    assert 'optimizer= or an "optimizer" section' in shown
    config = json.loads(shown[shown.index("\n{") :])
    assert parse(config, "shown").values.zero_optimization.stage == config["zero_optimization"]["stage"]
    assert main(["plan", "--layers", "4", "--hidden", "1024", "--max-model", "--host-gib", "0", "--nvme-gib", "0"]) == 0
    assert "fastest: stage 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "a model is needed: give --model NAME"),
        (["--model", "nothing"], "must be one of gpt2-1.5b"),
        (["--parameters", "0"], "parameters and layers: parameters=0"),
        (["--model", "13b", "--nodes", "0"], "num_nodes must be at least 1: num_nodes=0"),
        (["--model", "13b", "--batch", "0"], "batch=0"),
        (["--parameters", "7e9", "--layers", "32", "--optimizer", "muon"], "Muon updates matrices, and none are known"),
        (["--model", "13b", "--max-model", "--optimizer", "muon"], "optimizer='adamw' only: got 'muon'"),
    ],
)
def test_what_cannot_be_planned(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 1
    assert text in capsys.readouterr().err


def test_a_precision_that_is_not_planned() -> None:
    with pytest.raises(ConfigError, match="precision='fp32'"):
        Job(precision="fp32")
    with pytest.raises(ConfigError, match="optimizer='sgd'"):
        Job(optimizer="sgd")
