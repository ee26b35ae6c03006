"""zero.estimate compared with allocated memory, and with the papers' figures worked out by hand."""

# covers zero/_storage/parameter_storage.py zero/plan/estimate.py zero/plan/formulas.py

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from tests.ranks import run_ranks
from tests.zero.configs import CONFIGS
from tests.zero.training import zero_optimizer
from zcomm import ConfigError
from zero.cli import main
from zero.plan.estimate import TIERS
from zero.plan.formulas import Activations, Counts, TrainingSetup, usage_of

WIDTH, DEPTH = 256, 6


class Layered(nn.Module):
    """Equal layers that are gathered one by one; some may be frozen."""

    def __init__(self, *, has_frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(DEPTH)
        )
        if has_frozen:
            self.layers[2:4].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


CASES: list[tuple[int, bool, dict[str, Any]]] = [
    *((stage, False, {"bf16": {"enabled": True}}) for stage in range(4)),
    *((stage, True, {}) for stage in (1, 3)),
    (2, False, {"fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp16"}}),
    (1, False, {"zero_quantized_weights": True}),
    (3, False, {"bf16": {"enabled": True}, "zero_hpz_partition_size": 2, "zero_quantized_weights": True}),
    *((stage, False, {"bf16": {"enabled": True}, "zcomm": {"mode": "delta"}}) for stage in (1, 2)),
    (3, False, {"bf16": {"enabled": True}, "zcomm": {"mode": "delta_hpz"}}),
]
KINDS = {"pool": ("buckets", "prefetch"), "secondary partition": ("secondary partition",), "residuals": ("residuals",)}


def _check_allocated(rank: int, world_size: int) -> None:
    per_node = 2
    for stage, has_frozen, options in CASES:
        model = Layered(has_frozen=has_frozen)
        zero_keys = {k: v for k, v in options.items() if k.startswith("zero_")} | {"stage": stage}
        config = {k: v for k, v in options.items() if not k.startswith("zero_")} | {"zero_optimization": zero_keys}
        found = zero.estimate(model, config, world_size // per_node, per_node, prints=False)
        params = [p for p in model.parameters() if p.requires_grad]
        with zero_optimizer(model, torch.optim.AdamW(params), ranks_per_node=per_node, config=config) as optimizer:
            for _ in range(2):
                x = torch.randn(4, WIDTH, dtype=next(model.parameters()).dtype)
                optimizer.scale(model(x).float().square().mean()).backward()
                optimizer.step()
                optimizer.zero_grad()
            report = optimizer.memory()
        nbytes = {usage.kind: usage.nbytes for usage in found.usage()}
        case = (stage, has_frozen, options, nbytes, report)
        for kind in ("parameters", "gradients", "states"):
            assert nbytes.get(kind, 0) == pytest.approx(report.by_kind[kind], rel=0.01), case
        for ours, theirs in KINDS.items():
            together = sum(nbytes.get(kind, 0) for kind in theirs)
            assert together == pytest.approx(report.buffers[ours], rel=0.02), case
        assert found.nbytes() == pytest.approx(report.total, rel=0.02), case


class Spoken(Layered):
    """The same with an embedding, which is for AdamW, and a matrix of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.wide = nn.Embedding(300, WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(super().forward(x + self.words(torch.arange(4))))


WHOLE_CASES: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    *((stage, {}, {"bf16": {"enabled": True}}) for stage in range(4)),
    (1, {}, {}),
    (2, {}, {"fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp16"}}),
    (3, {}, {}),
    (3, {"zero_hpz_partition_size": 2, "zero_quantized_weights": True}, {"bf16": {"enabled": True}}),
    *((stage, {}, {"bf16": {"enabled": True}, "zcomm": {"mode": "delta"}}) for stage in (1, 2)),
    (3, {}, {"bf16": {"enabled": True}, "zcomm": {"mode": "delta_hpz"}}),
    (3, {}, {"bf16": {"enabled": True}, "zcomm": {"mode": "delta_hpz"}, "gradient_accumulation_steps": 2}),
    (2, {"offload_optimizer": {"device": "cpu"}}, {"bf16": {"enabled": True}}),
    (3, {"offload_optimizer": {"device": "nvme"}}, {"bf16": {"enabled": True}}),
]


def _check_whole(rank: int, folder: Path) -> None:
    """Muon and AdamW: what is estimated for this rank is what it has, and the default is the rank that has most."""
    for stage, keys, options in WHOLE_CASES:
        config = _with_tiers(options | {"zero_optimization": {"stage": stage, **keys}}, folder)
        model = Spoken()
        found = zero.estimate(model, config | {"optimizer": {"type": "Muon"}}, 2, 2, prints=False)
        matrices, others, _ = zero.split_for_muon(model)
        given = [torch.optim.Muon(matrices, ns_steps=1), torch.optim.AdamW(others)]  # as much memory in less time
        with zero_optimizer(model, given, ranks_per_node=2, config=config) as optimizer:
            for _ in range(2 * (config.get("gradient_accumulation_steps") or 1)):
                x = torch.randn(4, WIDTH, dtype=next(model.parameters()).dtype)
                optimizer.scale(model(x).float().square().mean()).backward()
                if optimizer.is_boundary:
                    optimizer.step()
                    optimizer.zero_grad()
            report = optimizer.memory()
        nbytes: dict[str, float] = {}
        for usage in found.usage(rank=rank):
            if usage.place != "nvme":
                nbytes[usage.kind] = nbytes.get(usage.kind, 0) + usage.nbytes
        case = (stage, keys, options, rank, nbytes, report)
        for kind in ("parameters", "gradients", "states"):
            assert nbytes.get(kind, 0) == pytest.approx(report.by_kind[kind], rel=0.01, abs=1e3), (kind, case)
        for kind in ("secondary partition", "residuals", "sums of the node"):
            assert nbytes.get(kind, 0) == pytest.approx(report.buffers.get(kind, 0), rel=0.01), (kind, case)
        in_files = sum(u.nbytes for u in found.usage(rank=rank) if (u.kind, u.place) == ("states", "nvme"))
        assert in_files == pytest.approx(report.states_in_files, rel=0.02), case
        of_ranks = [sum(usage.nbytes for usage in found.usage(rank=one)) for one in range(4)]
        assert sum(usage.nbytes for usage in found.usage()) == max(of_ranks), case
        assert (len(set(of_ranks)) > 1) is (stage > 0), case


def test_estimate_of_whole_tensors_is_what_is_allocated(tmp_path: Path) -> None:
    run_ranks(4, _check_whole, tmp_path)


def test_whole_tensors_by_hand() -> None:
    """Muon has one moment; LAMB two; of a number of parameters alone all are taken for matrices."""
    counts, gigabytes = Counts(numel=10**9), dict[str, float]()
    for kind in ("AdamW", "Muon", "Lamb", "Adafactor"):
        found = zero.estimate(counts, {"optimizer": {"type": kind}, "bf16": {"enabled": True}}, 1, 4, prints=False)
        gigabytes[kind] = sum(u.nbytes for u in found.usage(stage=2) if u.kind == "states") / 1e9
    assert gigabytes == {"AdamW": 3.0, "Muon": 2.0, "Lamb": 3.0, "Adafactor": 1.0}


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_stage_is_estimated_alike_whatever_stage_is_configured(nodes: int) -> None:
    configured = [
        zero.estimate(Layered(), {"zero_optimization": {"stage": stage}}, nodes, 4, prints=False) for stage in range(4)
    ]
    for stage in range(4):
        assert len({found.nbytes(stage=stage) for found in configured}) == 1, stage


@pytest.mark.parametrize(("mode", "stages"), [("delta_hpz", {3}), ("delta", {1, 2})])
def test_a_mode_takes_memory_at_its_stages_alone(mode: str, stages: set[int]) -> None:
    config = {"zero_optimization": {"stage": min(stages)}, "gradient_accumulation_steps": 2, "zcomm": {"mode": mode}}
    plain = zero.estimate(Layered(), config | {"zcomm": {}}, 2, 2, prints=False)
    with_mode = zero.estimate(Layered(), config, 2, 2, prints=False)
    assert {stage for stage in range(4) if with_mode.nbytes(stage=stage) > plain.nbytes(stage=stage)} == stages


@pytest.mark.parametrize("world_size", [2, 4])
def test_estimate_is_what_is_allocated(world_size: int) -> None:
    run_ranks(world_size, _check_allocated, world_size)


def _check_persistent(rank: int) -> None:
    """Parameters gathered temporarily belong to the pool, not to the persistent parameters."""
    model = Layered()
    small = sum(p.numel() * p.element_size() for p in model.parameters() if p.numel() <= WIDTH)
    with zero_optimizer(model, stage=3, stage3_param_persistence_threshold=WIDTH + 1) as optimizer:
        before = optimizer.memory().buffers
        with zero.GatheredParameters(model.parameters()):
            inside = optimizer.memory().buffers
    assert small <= before["persistent parameters"] < 2 * small + 1024, (small, before)
    assert inside["persistent parameters"] == before["persistent parameters"], (inside, before)
    assert inside["pool"] > 0


def test_what_is_gathered_for_a_while_is_no_persistent_parameter() -> None:
    run_ranks(2, _check_persistent)


PAPER = Counts(numel=7_500_000_000, largest_unit=50_000_000)


@pytest.mark.parametrize(
    ("stage", "num_nodes", "gigabytes"), [(0, 8, 120.0), (1, 8, 31.4), (2, 8, 16.6), (3, 8, 1.9), (3, 1, 15.0)]
)
def test_model_states_are_those_of_the_paper(stage: int, num_nodes: int, gigabytes: float) -> None:
    """ZeRO, figure 1 and table 1: 7.5 G parameters in 16 bit, gradients too, 8 ranks a node."""
    setup = TrainingSetup(stage=stage, num_nodes=num_nodes, ranks_per_node=8, gradient_nbytes=2)
    states = {u.kind: u.nbytes for u in usage_of(PAPER, setup)}
    found = sum(states[kind] for kind in ("parameters", "gradients", "states")) / 1e9
    assert found == pytest.approx(gigabytes, abs=0.05)


SHAPE = Activations(hidden=1024, num_layers=16, batch=4, sequence=512)
TOKENS = 2 * 1024 * 4 * 512  # bytes of one layer's input in 16 bit


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, {("activations", "device"): 12 * 16 * TOKENS}),
        (
            {"is_checkpointed": True},
            {("activations", "device"): 12 * 4 * TOKENS, ("activation checkpoints", "device"): 4 * TOKENS},
        ),
        (
            {"is_checkpointed": True, "num_checkpoints": 8, "model_parallel": 2, "on_host": True},
            {("activations", "device"): 12 * 2 * TOKENS, ("activation checkpoints", "host"): 8 * TOKENS / 2},
        ),
    ],
)
def test_activations(more: dict[str, Any], expected: dict[tuple[str, str], float]) -> None:
    shape = Activations(hidden=1024, num_layers=16, batch=4, sequence=512, **more)
    found = usage_of(PAPER, TrainingSetup(stage=3), shape)
    assert {(u.kind, u.place): u.nbytes for u in found if u.kind.startswith("activation")} == expected


def test_tiers_move_what_they_name() -> None:
    """By hand: 7.5 G parameters over 8 ranks, 16 bits, Adam; 4 bytes of each gradient on the device."""
    gigabytes: dict[str, dict[tuple[str, str], float]] = {}
    for name, tier in TIERS.items():
        setup = TrainingSetup(stage=3, num_nodes=2, ranks_per_node=4, sent_nbytes=2, tier=tier)
        states = [u for u in usage_of(PAPER, setup) if u.kind in ("parameters", "gradients", "states")]
        gigabytes[name] = {(u.kind, u.place): u.nbytes / 1e9 for u in states}
        assert all(u.is_pinned == (u.place == "host") for u in states)
    parameters, on_device, sent, states = 1.875, 3.75, 1.875, 11.25
    near = {("parameters", "device"): parameters}
    assert gigabytes == {
        "device": {**near, ("gradients", "device"): on_device, ("states", "device"): states},
        "cpu optimizer": {**near, ("gradients", "host"): sent, ("states", "host"): states},
        "cpu": {("parameters", "host"): parameters, ("gradients", "host"): sent, ("states", "host"): states},
        "nvme optimizer": {**near, ("gradients", "nvme"): on_device, ("states", "nvme"): 2 * states},
        "nvme": {("parameters", "nvme"): parameters, ("gradients", "nvme"): on_device, ("states", "nvme"): 2 * states},
    }


def _with_tiers(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """``config`` with the NVMe folder filled in."""
    section = {
        key: value | {"nvme_path": str(folder)} if isinstance(value, dict) and value.get("device") == "nvme" else value
        for key, value in config["zero_optimization"].items()
    }
    return config | {"zero_optimization": section}


CPU, NVME = {"device": "cpu"}, {"device": "nvme"}
FEW = {"device": "nvme", "max_in_cpu": 264_000}  # two layers' shards
BF16 = {"bf16": {"enabled": True}}
DELAYED = {"zcomm": {"delayed_update": True, "delay_start": 0}}
TIER_CASES: list[tuple[dict[str, Any], bool]] = [
    *((BF16 | DELAYED | {"zero_optimization": {"stage": 2, "offload_optimizer": tier}}, False) for tier in (CPU, NVME)),
    *((BF16 | {"zero_optimization": {"stage": stage, "offload_optimizer": CPU}}, False) for stage in (1, 2, 3)),
    ({"zero_optimization": {"stage": 2, "offload_optimizer": CPU}, "gradient_accumulation_steps": 2}, False),
    (BF16 | {"zero_optimization": {"stage": 3, "offload_optimizer": CPU | {"ratio": 0.5}}}, False),
    (BF16 | {"zero_optimization": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}}, True),
    (
        BF16
        | {"zero_optimization": {"stage": 2, "offload_optimizer": NVME}, "zcomm": {"keep_previous_states": False}}
        | {"gradient_accumulation_steps": 2},
        False,
    ),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": NVME | {"pipeline_read": True}}}, True),
    *(
        (BF16 | {"zero_optimization": {"stage": 3, "offload_optimizer": NVME, "offload_param": tier}}, False)
        for tier in (NVME, FEW)
    ),
    (BF16 | {"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True}}, True),
    (
        BF16
        | {
            "zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True, "offload_param": CPU}
            | {"offload_optimizer": CPU}
        },
        True,
    ),
]


def _check_tiers(rank: int, folder: Path) -> None:
    for raw, has_frozen in TIER_CASES:
        model, config = Layered(has_frozen=has_frozen), _with_tiers(raw, folder)
        found = zero.estimate(model, config, 1, 2, prints=False)
        params = [p for p in model.parameters() if p.requires_grad]
        with zero_optimizer(model, zero.CPUAdam(params), config=config) as optimizer:
            for _ in range(2 * (config.get("gradient_accumulation_steps") or 1)):
                x = torch.randn(4, WIDTH, dtype=next(model.parameters()).dtype)
                model(x).float().square().mean().backward()
                if optimizer.is_boundary:
                    optimizer.step()
                    optimizer.zero_grad()
            report = optimizer.memory()
        in_places: dict[tuple[str, str], float] = {}
        for usage in found.usage():
            kind, place = usage.kind, usage.place
            if kind == "frozen as INT8":  # on the device, whose memory is the host's here
                kind, place = "parameters", "device"
            in_places[kind, place] = in_places.get((kind, place), 0) + usage.nbytes
        case = (config, in_places, report)
        shards = report.shards if found.stage == 3 else {"device": report.parameters, "cpu": 0, "nvme": 0}
        for tier, place in (("device", "device"), ("cpu", "host"), ("nvme", "nvme")):
            assert in_places.get(("parameters", place), 0) == pytest.approx(shards[tier], rel=0.02), case
        for kind, allocated in (("gradients", report.gradients), ("states", report.states)):
            together = in_places.get((kind, "device"), 0) + in_places.get((kind, "host"), 0)
            assert together == pytest.approx(allocated, rel=0.01, abs=1e3), (kind, case)  # and step counters
        assert in_places.get(("states", "nvme"), 0) == pytest.approx(report.states_in_files, rel=0.02), case
        assert in_places.get(("gradients", "nvme"), 0) == pytest.approx(report.gradients_in_files, rel=0.02), case
        delayed = sum(report.buffers[f"{kind} of a delayed update"] for kind in ("parameters", "gradients"))
        assert in_places.get(("delayed update", "host"), 0) == pytest.approx(delayed, rel=0.01), case
        # Not closer: how many gradient buffers are in flight at a time depends on the disk.
        buffers = sum(report.buffers[f"{kind} on their way"] for kind in ("parameters", "states", "gradients"))
        assert in_places.get(("NVMe buffers", "host"), 0) == pytest.approx(buffers, rel=0.5, abs=2e5), case


def test_estimated_tiers_are_what_is_allocated(tmp_path: Path) -> None:
    run_ranks(2, _check_tiers, tmp_path)


def test_tutorial_configurations_are_estimated(capsys: pytest.CaptureFixture[str]) -> None:
    """Offload and checkpointing are counted even in configurations that this version refuses to run."""
    cases = {"zero_infinity": (3, "nvme"), "zero_offload": (3, "cpu"), "zeropp": (3, "device")}
    for name, (stage, tier) in cases.items():
        found = zero.estimate(Layered().to("meta"), CONFIGS[name], 2, 2, activations=SHAPE)
        text = capsys.readouterr().out
        assert (found.stage, found.tier) == (stage, tier)
        assert text == str(found)
        assert text.count("<- as configured") == 1
        assert ("checkpoints cost 33 % more computation" in text) == (name != "zeropp")
        assert ("secondary partition" in text) == (name == "zeropp")
        rows = [line.split()[:1] for line in text.splitlines()]
        assert [rows.count([str(number)]) for number in range(4)] == [1, 3, 3, 5]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}))
    arguments = ["estimate", "1e9", "--config", str(path), "--nodes", "2", "--ranks", "8", "--layers", "10"]
    assert main([*arguments, "--hidden", "2048", "--checkpointing"]) == 0
    text = capsys.readouterr().out
    assert "1,000,000,000 parameters on 2 nodes x 8 ranks" in text
    assert "states                 device      750 MB" in text  # 12 / 16 bytes a parameter
    assert "activation checkpoints" in text
    assert main(["estimate", "0.1"]) == 1
    assert "there must be parameters" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="nodes=0"):
        zero.estimate(PAPER, None, 0, 8)
