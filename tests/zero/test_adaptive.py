"""Adaptive precision under ZeroOptimizer: what travels how, an outlier gradient, resuming, and how it is asked for."""

from __future__ import annotations

import json
import logging
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import zcomm
import zero
from tests.ranks import run_ranks, topology
from tests.zero.training import assert_same_bits, full_values
from zcomm import AdaptivePrecision, ConfigError
from zero import ZeroOptimizer
from zero.cli import main
from zero.config import make_plan

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from outliers import largest_matrix, outlier_gradient

VOCAB, WIDTH = 64, 64


class Net(nn.Module):
    """An embedding, a matrix, a norm, a small matrix and a head: every role."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, WIDTH)
        self.mlp = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.router = nn.Linear(2 * WIDTH, 2 * WIDTH, bias=False)
        self.head = nn.Linear(2 * WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(F.gelu(self.mlp(self.wte(tokens))))
        return self.head(x + F.gelu(self.router(x)))


def new_net() -> Net:
    torch.manual_seed(0)
    return Net()


def loss_at(model: nn.Module, step: int, rank: int) -> Tensor:
    """Of learning by heart which token follows a token, one of three at random."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(VOCAB, (48,), generator=generator)
    targets = (tokens * 7 + torch.randint(3, (48,), generator=generator)) % VOCAB
    return F.cross_entropy(model(tokens), targets)


@contextmanager
def optimizer_of(model: nn.Module, **options: Any) -> Iterator[ZeroOptimizer]:
    """ZeRO++'s formats over two nodes of one rank, or of two."""
    ranks_per_node = torch.distributed.get_world_size() // 2
    formats: dict[str, Any] = {"quantized_gradients": True, "quantized_weights": True}
    inner = torch.optim.AdamW(model.parameters(), lr=5e-3)
    optimizer = ZeroOptimizer(model, inner, topology=topology(ranks_per_node), **(formats | options))
    try:
        yield optimizer
    finally:
        optimizer.close()


def train(
    model: nn.Module, optimizer: ZeroOptimizer, rank: int, steps: range, outlier_at: int = -1, factor: float = 1e4
) -> list[bool]:
    """Which steps were applied."""
    applied = []
    for step in steps:
        loss = loss_at(model, step, rank)
        optimizer.report_loss(loss)
        with outlier_gradient(model, factor, "head.weight") if step == outlier_at else nullcontext():
            loss.backward()
        optimizer.step()
        applied.append(optimizer.was_step_applied)
        optimizer.zero_grad()
    return applied


def held_out_loss(model: nn.Module, rank: int) -> float:
    with torch.no_grad():
        return sum(loss_at(model, 10_000 + index, rank).item() for index in range(10)) / 10


@contextmanager
def logged() -> Iterator[list[str]]:
    """What the library warns of."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zero").addHandler(handler)
    try:
        yield texts
    finally:
        logging.getLogger("zero").removeHandler(handler)


def _an_outlier(rank: int) -> None:
    def ends_at(stage: int, outlier_at: int, **options: Any) -> float:
        model = new_net()
        with optimizer_of(model, stage=stage, **options) as optimizer:
            train(model, optimizer, rank, range(60), outlier_at)
            return held_out_loss(model, rank)

    undisturbed = ends_at(2, -1, adaptive={"quiet_steps": 3})
    assert undisturbed < 2.5  # of log(64) = 4.2 at the start
    for stage, outlier in ((2, "skip"), (2, "clip"), (3, "skip")):
        with logged() as texts:
            disturbed = ends_at(stage, 50, adaptive={"quiet_steps": 3, "outlier": outlier})
        assert abs(disturbed - undisturbed) < 0.05, (stage, outlier, disturbed, undisturbed)
        if rank == 0:
            (text,) = [text for text in texts if "adaptive" in text]
            done = "the step is skipped" if outlier == "skip" else "gradients are clipped to"
            assert text.startswith("adaptive precision, step 50: gradient norm")
            assert done in text
            assert "exchanges back off to the parameters' dtype for 3 quiet steps" in text
        else:
            assert not texts
    # Without it Adam pushes every weight of that matrix by some learning rates a step, for ten steps.
    unprotected = ends_at(2, 50)
    assert unprotected > undisturbed + 0.2, (unprotected, undisturbed)


def test_a_run_with_an_outlier_gradient_ends_like_an_undisturbed_one() -> None:
    assert largest_matrix(Net()) == "router.weight"
    run_ranks(2, _an_outlier)


def _an_outlier_under_delta_hpz(rank: int) -> None:
    options = {"quantized_gradients": False, "quantized_weights": False, "mode": "delta_hpz", "stage": 3}
    losses = []
    for outlier_at in (-1, 33):
        model = new_net()
        with logged() as texts, optimizer_of(model, adaptive={"outlier": "clip"}, **options) as optimizer:
            applied = train(model, optimizer, rank, range(40), outlier_at)
            losses.append(held_out_loss(model, rank))
        assert [step for step, was_applied in enumerate(applied) if not was_applied] == [33] * (outlier_at == 33)
        if rank == 0 and outlier_at == 33:
            (text,) = [text for text in texts if "adaptive" in text]
            assert text.startswith("adaptive precision, step 33: gradient norm")
            assert text.endswith("the step is skipped; formats stay")
    assert abs(losses[1] - losses[0]) < 0.05, losses


def test_delta_hpz_keeps_its_formats_and_skips_an_outlier() -> None:
    run_ranks(4, _an_outlier_under_delta_hpz)


def _formats(rank: int) -> None:
    model = new_net()
    numels = {name: param.numel() for name, param in model.named_parameters()}
    settings = AdaptivePrecision(bf16_steps=1, int8_steps=1, quiet_steps=2)
    with optimizer_of(model, stage=3, adaptive=settings) as optimizer:
        train(model, optimizer, rank, range(1))  # also the schedule of gathers is recorded
        seen = []
        for step in range(1, 22):
            with zcomm.traffic() as sent:
                train(model, optimizer, rank, range(step, step + 1), outlier_at=14, factor=float("nan"))
            seen.append({name: sent.elements(operation="reduce_scatter", format=name) for name in FORMATS})
            gathered = {name: sent.elements(operation="all_gather", format=name) for name in FORMATS}
            assert gathered["int4"] == 0
        assert "int4,int4" in str(optimizer.effective)
    careful, matrices = numels["wte.weight"], numels["mlp.weight"] + numels["head.weight"]
    exact = numels["router.weight"] + 2 * 4 * 256  # the bias and the norm: a run of 256 elements for each rank

    def elements(*by_format: int) -> dict[str, int]:
        """Of a rank: the shards of two ranks to the other one of its node, then one to the other node."""
        return {name: 3 * numel // 4 for name, numel in zip(FORMATS, by_format, strict=True)}

    everything = exact + careful + matrices
    eight, four = elements(exact, careful + matrices, 0), elements(exact, careful, matrices)
    assert seen[0] == eight, (seen[0], eight)
    assert all(one == four for one in seen[1:14])
    # Step 14 was not finite: after it 2 quiet steps and what follows them, in the dtype and then in 8 bits.
    assert seen[14:17] == [elements(everything, 0, 0)] * 3, seen[13:]
    assert seen[17:20] == [eight] * 3
    assert seen[20] == four


FORMATS = ("none", "int8", "int4")


def test_roles_schedule_and_back_off_are_what_is_sent() -> None:
    run_ranks(4, _formats)


def _resume(rank: int, folder: str) -> None:
    options: dict[str, Any] = {
        "quantized_gradients": False,
        "adaptive": {"max_relative_error": 0.4, "bf16_steps": 3, "sample_interval": 5, "quiet_steps": 3},
    }
    for stage in (1, 3):
        model = new_net()
        with optimizer_of(model, stage=stage, **options) as optimizer:
            applied = train(model, optimizer, rank, range(28), outlier_at=17)
            expected, decided = full_values(model), optimizer.state_dict()["adaptive"]
            formats = [bucket.gradient_formats for bucket in optimizer.inside.runtime.buckets]
        assert [step for step, was_applied in enumerate(applied) if not was_applied] == [17]
        assert any("nf4" in str(hops) for hops in formats), formats
        checksum = zlib.crc32(json.dumps(decided).encode())
        mine = torch.tensor([checksum, -checksum])
        assert torch.equal(zcomm.control.agree_max(mine, topology(1)), mine)  # the same on every rank
        model = new_net()
        with optimizer_of(model, stage=stage, **options) as optimizer:
            train(model, optimizer, rank, range(20), outlier_at=17)
            zero.save_checkpoint(optimizer, folder, f"{stage}")
            saved = optimizer.state_dict()
        for way in ("state_dict", "checkpoint"):
            model = new_net()
            with optimizer_of(model, stage=stage, **options) as optimizer:
                if way == "checkpoint":
                    zero.load_checkpoint(optimizer, folder, f"{stage}")
                else:
                    optimizer.load_state_dict(saved)
                train(model, optimizer, rank, range(20, 28))
                assert_same_bits(full_values(model), expected)
                assert optimizer.state_dict()["adaptive"] == decided


def test_resuming_within_a_back_off_is_bit_identical(tmp_path: Path) -> None:
    run_ranks(2, _resume, str(tmp_path))


def _odd_steps(rank: int) -> None:
    model = new_net()
    with optimizer_of(model, stage=2, adaptive=True) as optimizer:
        train(model, optimizer, rank, range(2))
        before = optimizer.state_dict()["adaptive"]
        loss_at(model, 2, rank).backward()
        update, optimizer._update.run = optimizer._update.run, _fails  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="no update"):
            optimizer.step()
        assert optimizer.state_dict()["adaptive"] == before
        optimizer._update.run = update  # type: ignore[method-assign]
        optimizer.step()
        assert optimizer.state_dict()["adaptive"]["step"] == 3
        optimizer.zero_grad()
        # What clip_grad_norm_ hides is seen all the same: the norm before.
        train(model, optimizer, rank, range(3, 20))
        with outlier_gradient(model, 1e4):
            loss_at(model, 20, rank).backward()
        assert optimizer.clip_grad_norm_(0.1) > 10
        optimizer.step()
        assert not optimizer.was_step_applied
        optimizer.zero_grad()
    for stage, options, reason in (
        (0, {"adaptive": True}, "stage 0 has no sharded exchange"),
        (2, {"adaptive": True, "quantized_gradients": False, "quantized_weights": False}, "nothing is quantized"),
    ):
        with optimizer_of(new_net(), stage=stage, **options) as optimizer:
            assert any(reason in text for text in optimizer.effective.inactive)
            assert optimizer.state_dict()["adaptive"] is None
    with pytest.raises(ConfigError, match="max_relative_error must be greater than 0"):
        ZeroOptimizer(new_net(), torch.optim.AdamW, adaptive={"max_relative_error": 0.0}, topology=topology(1))


def _fails() -> bool:
    raise RuntimeError("no update")


def test_failed_steps_clipped_outliers_and_what_is_inactive() -> None:
    run_ranks(2, _odd_steps)


def test_ways_to_ask_for_it(tmp_path: Path, capsys: Any) -> None:
    def asked(config: dict[str, Any] | None = None, **keywords: Any) -> AdaptivePrecision | None:
        return make_plan(config, {"stage": 2, **keywords}).settings.adaptive

    expected = AdaptivePrecision(max_relative_error=0.1)
    assert asked(max_relative_error=0.1) == expected
    assert asked(adaptive=expected) == expected
    assert asked(adaptive={"max_relative_error": 0.1}) == expected
    assert asked({"zcomm": {"adaptive": {"max_relative_error": 0.1}}}) == expected
    both = asked({"zcomm": {"adaptive": {"quiet_steps": 7}}}, max_relative_error=0.1)
    assert both == AdaptivePrecision(max_relative_error=0.1, quiet_steps=7)
    assert asked(adaptive=True) == asked({"zcomm": {"adaptive": {"enabled": True}}}) == AdaptivePrecision()
    assert asked() is asked(adaptive=False) is asked({"zcomm": {"adaptive": {"quiet_steps": 7}}}) is None
    with pytest.raises(ConfigError, match=r"zcomm\.adaptive\.bf16_step \(did you mean 'bf16_steps'\?\)"):
        asked(adaptive={"bf16_step": 3})
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({"zero_optimization": {"stage": 2}, "zcomm": {"adaptive": {"enabled": True, "bf16_steps": 9}}})
    )
    assert main(["config", "explain", str(path)]) == 0
    text = capsys.readouterr().out
    assert "zcomm.adaptive.bf16_steps" in text
    assert "= 9            [config.json]" in text
    path.write_text(json.dumps({"zcomm": {"adaptive": {"bf16_steps": 9}}}))
    assert main(["config", "explain", str(path)]) == 0
    assert "zcomm.adaptive.enabled is false" in capsys.readouterr().out
