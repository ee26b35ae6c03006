"""``mode="delta_hpz"``: equals plain training without quantization, and the NumPy oracle's bits with it."""

# covers zero/_modes/mode.py zero/_modes/deltas.py zero/_modes/delta_hpz.py

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zcomm
from tests.ranks import run_ranks, topology
from tests.zcomm import oracle
from tests.zcomm.oracle import Wire
from tests.zero.deltas import check_drift, check_nodes_agree, check_writes, replicas_of, residuals_of
from tests.zero.models import as_vector, batch, groups_of, loss_of, new_model, relative_error, train_plain
from tests.zero.training import full_values, train, zero_optimizer
from zcomm import ConfigError, control
from zero import ZeroOptimizer

RANDOM = dataclasses.replace(zcomm.FORMATS["int4"], rounding="stochastic")
MODE: dict[str, Any] = {"stage": 3, "mode": "delta_hpz", "changes": "quantized", "ranks_per_node": 2}
EXACT = {"weight_format": "none", "gradient_format": ("none", "none")}
INT8, NF4, INT4 = Wire("int8", 256), Wire("nf4", 64), Wire("int4", 128)


# The same as training in one process, where nothing is rounded.


def _check_exact(rank: int, per_node: int) -> None:
    world_size, options = topology(per_node).world_size, {"has_frozen": True, "has_unused": True}
    for num_micro, max_norm in ((1, None), (3, 0.5)):
        plain = new_model(**options)
        expected = train_plain(
            plain, torch.optim.AdamW(groups_of(plain), lr=1e-2), world_size=world_size, steps=3, num_micro=num_micro,
            max_norm=max_norm,
        )  # fmt: skip
        model = new_model(**options)
        with zero_optimizer(
            model, stage=3, mode="delta_hpz", ranks_per_node=per_node, gradient_accumulation_steps=num_micro, **EXACT
        ) as optimizer:
            norms = train(
                model, optimizer, rank, steps=3, num_micro=num_micro, max_norm=max_norm, uses_no_sync=num_micro == 1
            )
            got = full_values(model)
        assert norms == pytest.approx(expected, rel=1e-5)
        assert relative_error(as_vector(got.values()), as_vector(plain.parameters())) < 1e-5


def _check_early_step(rank: int) -> None:
    """After three backwards of a window of four, one within no_sync, step() reduces the remaining node sums."""
    model, plain = new_model(), new_model()
    with zero_optimizer(
        model, stage=3, mode="delta_hpz", ranks_per_node=2, gradient_accumulation_steps=4, **EXACT
    ) as optimizer:
        for micro in range(3):
            if micro == 1:
                with optimizer.no_sync():
                    loss_of(model, *batch(0, micro, rank)).backward()
            else:
                loss_of(model, *batch(0, micro, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, rank, steps=1, num_micro=4)
        got = full_values(model)
    reference = torch.optim.AdamW(groups_of(plain), lr=1e-2)
    for num_micro, divisor in ((3, 1), (4, 4)):
        for micro in range(num_micro):
            parts = [batch(0, micro, r) for r in range(4)]
            tokens, targets = (torch.cat(column) for column in zip(*parts, strict=True))
            (loss_of(plain, tokens, targets) / divisor).backward()
        reference.step()
        reference.zero_grad()
    assert relative_error(as_vector(got.values()), as_vector(plain.parameters())) < 1e-5


@pytest.mark.parametrize(("world_size", "per_node"), [(2, 1), (4, 2)])
def test_without_quantization_it_is_plain_training(world_size: int, per_node: int) -> None:
    run_ranks(world_size, _check_exact, per_node)
    if world_size == 4:
        run_ranks(world_size, _check_early_step)


# Bit for bit the oracle's.

SIZE, RATE = 32, 0.5  # one matrix: shards of one block of 256


def _data(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    x, y = (torch.randn(4, SIZE, generator=generator).to(torch.bfloat16) for _ in range(2))
    return x, y


def _loss(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    x, y = _data(step, micro, rank)
    return (model(x).float() - y.float()).square().mean()


def _gradient(weights: np.ndarray, step: int, micro: int, rank: int) -> np.ndarray:
    model = nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(weights).view(SIZE, SIZE))
    model.weight.grad_dtype = torch.float32  # type: ignore[attr-defined]
    _loss(model, step, micro, rank).backward()
    assert model.weight.grad is not None
    return model.weight.grad.float().flatten().numpy()


class Oracle:
    """One process that plays 2 nodes x 2 ranks: SGD on the masters, the wire in NumPy. Shard l * 2 + n is (n, l)'s."""

    def __init__(self, weights: Tensor, beta: float = 1.0, reset_interval: int = 0) -> None:
        self.beta, self.reset_interval = beta, reset_interval
        self.held = weights.float().flatten().numpy().reshape(4, -1)  # bfloat16 values
        self.masters = self.held.copy()
        self.residuals = self._no_residuals()

    @staticmethod
    def _no_residuals() -> dict[tuple[int, int], list[tuple[int, list[int]]]]:
        return {(n, s): oracle.residual_blocks(256) for n in range(2) for s in range(4)}

    def step(self, step: int, num_micro: int) -> None:
        sums = np.zeros((2, 4, 256), np.float32)
        for micro in range(num_micro):
            grads = [_gradient(self.held.reshape(-1), step, micro, rank).reshape(4, 256) for rank in range(4)]
            for node, shard in np.ndindex(2, 4):
                sent = [oracle.decode([grads[2 * node + local][shard]], INT8)[0] for local in range(2)]
                sums[node, shard] = (sent[0] + sent[1]) + sums[node, shard]
        for shard in range(4):
            total = np.float32(0)
            for node in range(2):
                sent, new = oracle.encode_with_residual(sums[node, shard], self.residuals[node, shard], NF4, self.beta)
                self.residuals[node, shard] = new
                total = total + sent
            self.masters[shard] -= np.float32(RATE) * (total / np.float32(4))
            target = _rounded(self.masters[shard])
            change = oracle.decode([target - self.held[shard]], INT4)[0]
            self.held[shard] = _rounded(self.held[shard] + change)
        if self.reset_interval and (step + 1) % self.reset_interval == 0:
            self.residuals = self._no_residuals()


def _rounded(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).to(torch.bfloat16).float().numpy()


def _check_against_oracle(rank: int) -> None:
    t = topology(2)
    for num_micro, beta, reset_interval in ((1, 1.0, 0), (2, 1.0, 0), (1, 0.7, 3)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16))
        expected = Oracle(model[0].weight.detach().clone(), beta, reset_interval)
        inner = torch.optim.SGD(model.parameters(), lr=RATE)
        with zero_optimizer(
            model, inner, stage=3, mode="delta_hpz", ranks_per_node=2, gradient_accumulation_steps=num_micro,
            changes="quantized", residual_beta=beta, residual_reset_interval=reset_interval,
        ) as optimizer:  # fmt: skip
            for step in range(4):
                for micro in range(num_micro):
                    _loss(model, step, micro, rank).backward()
                optimizer.step()
                optimizer.zero_grad()
                expected.step(step, num_micro)
                rows = expected.held[2 * t.local_rank : 2 * t.local_rank + 2]
                assert np.array_equal(replicas_of(optimizer).float().numpy(), rows.reshape(-1)), (num_micro, step)
                mine = [oracle.decode_residual(expected.residuals[t.node_rank, 2 * t.local_rank + n]) for n in range(2)]
                assert np.array_equal(residuals_of(optimizer).numpy(), np.concatenate(mine))
                check_nodes_agree(optimizer)
            assert not np.array_equal(expected.held, _rounded(expected.masters)), "changes are quantized"


def test_replicas_and_residuals_are_the_oracles() -> None:
    run_ranks(4, _check_against_oracle)


# What crosses the network.


class Aligned(nn.Module):
    """Two matrices whose sizes need no padding, and a large frozen one."""

    def __init__(self, frozen: int = 0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 512, bias=False), nn.Linear(512, 128, bias=False)
        self.frozen = nn.Linear(128, frozen, bias=False) if frozen else None
        if self.frozen is not None:
            self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(x)))
        return y if self.frozen is None else y + self.frozen(x).mean(-1, keepdim=True)


def inter_node_units(optimizer: ZeroOptimizer, sent: zcomm.Traffic, numel: int) -> float:
    """Bytes to other nodes of all ranks, over (nodes - 1), in units of 2 bytes per element."""
    mine = torch.tensor([float(sent.bytes(link="inter"))])
    total = float(control.gather_float64(mine, optimizer.topology).sum())
    return total / max(optimizer.topology.num_nodes - 1, 1) / (2 * numel)


def _units_of_steps(rank: int, per_node: int, num_micro: int, frozen: int = 0, **options: Any) -> list[float]:
    torch.manual_seed(0)
    model = Aligned(frozen).to(torch.bfloat16)
    numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
    generator, units = torch.Generator().manual_seed(rank), []
    with zero_optimizer(
        model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3), stage=3,
        ranks_per_node=per_node, gradient_accumulation_steps=num_micro, **options,
    ) as optimizer:  # fmt: skip
        for _ in range(3):
            with zcomm.traffic() as sent:
                for _ in range(num_micro):
                    x = torch.randn(8, 128, generator=generator).to(torch.bfloat16)
                    (model(x).float() - 1).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                for replica in optimizer.parts.runtime.gatherer.replicas.values():
                    replica.node.wait()
            units.append(inter_node_units(optimizer, sent, numel))
    return units


def _check_traffic(rank: int) -> None:
    mode = {"mode": "delta_hpz", "changes": "quantized"}
    for num_micro in (1, 4):
        assert max(_units_of_steps(rank, 2, num_micro, **mode)) <= 0.55, num_micro
    plain = _units_of_steps(rank, 2, 4, stage3_max_reuse_distance=0)
    assert plain[-1] > 11.5, "plain stage 3, 4 micro-batches"
    assert max(_units_of_steps(rank, 2, 2, frozen=4096, **mode)) <= 0.55, "frozen parameters are sent"
    assert _units_of_steps(rank, 1, 2, **mode)[-1] <= 0.55, "one rank a node"
    assert max(_units_of_steps(rank, 4, 2, **mode)) == 0, "one node"


def test_bytes_between_nodes() -> None:
    run_ranks(4, _check_traffic)


# Skipped steps, and writes outside of steps.


def _check_skipped_steps(rank: int) -> None:
    model = new_model(torch.float32)
    with zero_optimizer(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=3, mode="delta_hpz", ranks_per_node=2,
        changes="quantized", gradient_accumulation_steps=2,
        fp16={"enabled": True, "initial_scale_power": 10, "hysteresis": 1},
    ) as optimizer:  # fmt: skip
        train(model, optimizer, rank, steps=2, num_micro=2)
        residuals, replicas = residuals_of(optimizer), replicas_of(optimizer).clone()
        assert residuals.abs().sum() > 0
        for micro in range(2):
            loss = loss_of(model, *batch(7, micro, rank))
            optimizer.scale(loss * (float("inf") if rank == 2 and micro == 0 else 1.0)).backward()
        optimizer.step()
        assert not optimizer.was_step_applied
        optimizer.zero_grad()
        assert torch.equal(residuals_of(optimizer), residuals)
        assert torch.equal(replicas_of(optimizer), replicas)
        loss_of(model, *batch(8, 0, rank)).backward()  # an abandoned step
        optimizer.zero_grad()
        assert torch.equal(residuals_of(optimizer), residuals)
        train(model, optimizer, rank, steps=1, num_micro=2)  # at half the scale
        assert optimizer.was_step_applied
        now = residuals_of(optimizer)
        assert not torch.equal(now, residuals)
        assert 0.1 < now.norm() / residuals.norm() < 10, "residuals are in units without the scale"
        check_nodes_agree(optimizer)


def test_skipped_steps_and_writes() -> None:
    run_ranks(4, _check_skipped_steps)
    run_ranks(4, check_writes, partial(zero_optimizer, **MODE))


def test_replicas_do_not_drift() -> None:
    run_ranks(4, check_drift, partial(zero_optimizer, **MODE))


# Refused combinations.


def _check_refusals(rank: int) -> None:
    refused = (
        ({"stage": 2}, "stage=2; mode='delta' is of stages 1 and 2"),
        ({"mode": "deltas"}, "mode must be one of delta_hpz, delta"),
        ({"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}, "offload_param"),
        ({"zero_quantized_nontrainable_weights": True}, "zero_quantized_nontrainable_weights"),
        ({"gradient_format": ("int8", RANDOM)}, "rounds stochastically"),
        ({"offload_optimizer": {"device": "cpu"}, "delayed_update": True}, "delayed_update"),
    )
    for options, match in refused:
        model = new_model()
        given = {"stage": 3, "mode": "delta_hpz", "topology": topology(2), "lr": 0.1} | options
        with pytest.raises(ConfigError, match=match):
            ZeroOptimizer(model, torch.optim.SGD, **given)
    with pytest.raises(zcomm.LayoutError, match="float64 gradients"):
        ZeroOptimizer(
            new_model(torch.float64), torch.optim.SGD, lr=0.1, stage=3, mode="delta_hpz", topology=topology(2)
        )
    config = {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}, "zcomm": {"mode": "delta_hpz"}}
    optimizer = ZeroOptimizer(new_model(), torch.optim.SGD, lr=0.1, config=config, topology=topology(2))
    assert "delta-hpZ" in str(optimizer.effective)
    assert any("quantized_weights" in reason for reason in optimizer.effective.inactive)
    optimizer.close()


def test_what_it_is_not_combined_with() -> None:
    run_ranks(4, _check_refusals)
