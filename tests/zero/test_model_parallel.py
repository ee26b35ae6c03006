"""Data parallelism combined with tensor parallelism: 2 x 2 ranks train a split MLP as one process does."""

# covers zero/_ranks/model_parallel.py zero/errors.py

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import zero
from tests.ranks import device_mesh, run_ranks
from tests.zero.training import full_values
from zcomm import ConfigError, DivergedError, StateError
from zero import ZeroOptimizer

WIDTH, INNER, STEPS = 12, 20, 4


class Whole(nn.Module):
    """A residual MLP with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class _SumBackward(torch.autograd.Function):
    """Megatron's f: each rank's part of the layer contributes a part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _SumForward(torch.autograd.Function):
    """Megatron's g."""

    @staticmethod
    def forward(_: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(_: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Split(nn.Module):
    """One tensor-parallel rank's part of :class:`Whole`: columns of ``up``, rows of ``down``; others are replicated."""

    def __init__(self, whole: Whole, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, rank = group, dist.get_rank(group)
        mine = slice(rank * INNER // 2, (rank + 1) * INNER // 2)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER // 2)
        self.down = nn.Linear(INNER // 2, WIDTH, bias=False)
        self.bias = nn.Parameter(whole.down.bias.detach().clone())
        for param, part in (
            (self.up.weight, whole.up.weight[mine]),
            (self.up.bias, whole.up.bias[mine]),
            (self.down.weight, whole.down.weight[:, mine]),
        ):
            param.data = part.detach().clone()
            param.tensor_model_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(_SumBackward.apply(self.norm(x), self.group)).relu()
        return x + _SumForward.apply(self.down(inner), self.group) + self.bias

    def of_whole(self, whole: Whole) -> dict[str, Tensor]:
        """The part of each parameter in ``whole`` that this rank has."""
        rank = dist.get_rank(self.group)
        mine = slice(rank * INNER // 2, (rank + 1) * INNER // 2)
        return {
            "bias": whole.down.bias,
            "norm.weight": whole.norm.weight,
            "norm.bias": whole.norm.bias,
            "up.weight": whole.up.weight[mine],
            "up.bias": whole.up.bias[mine],
            "down.weight": whole.down.weight[:, mine],
        }


def _whole() -> Whole:
    torch.manual_seed(5)
    return Whole().double()


def _batch(step: int, data_rank: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + data_rank)).double()


def _train_whole(max_norm: float, norm_type: float = 2.0) -> tuple[Whole, list[float]]:
    model, norms = _whole(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        model(torch.cat([_batch(step, rank) for rank in range(2)])).square().mean().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type).item())
        optimizer.step()
        optimizer.zero_grad()
    return model, norms


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


class Mpu:
    """Megatron's mpu interface on a device mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.get_data_parallel_group = lambda: mesh.get_group("dp")
        self.get_model_parallel_group = lambda: mesh.get_group("tp")
        self.get_model_parallel_world_size = mesh["tp"].size
        self.get_tensor_model_parallel_rank = lambda: mesh.get_local_rank("tp")


def _check_split_equals_whole(rank: int, stages: tuple[int, ...]) -> None:
    mesh = device_mesh((2, 2), ("dp", "tp"))
    whole, expected_norms = _train_whole(0.3)
    assert min(expected_norms) > 0.3, "clipping must have something to do"
    for stage in stages:
        model = Split(_whole(), mesh.get_group("tp")).double()
        config = {"zero_optimization": {"stage": stage}, "gradient_clipping": 0.3}
        mpu = mesh if stage % 2 else Mpu(mesh)
        engine, *_ = zero.initialize(model=model, optimizer=_sgd, mpu=mpu, config=config)
        norms = []
        for step in range(STEPS):
            engine.backward(engine(_batch(step, mesh.get_local_rank("dp"))).square().mean())
            engine.step()
            norms.append(engine.get_global_grad_norm())
        got = full_values(model)
        engine.destroy()
        assert norms == pytest.approx(expected_norms, rel=1e-6)
        for name, expected in model.of_whole(whole).items():
            torch.testing.assert_close(got[name], expected.detach(), rtol=0, atol=1e-10, msg=f"{stage}: {name}")


def test_split_model_equals_the_whole() -> None:
    run_ranks(4, _check_split_equals_whole, (0, 1, 2, 3))


def _check_infinity_norm(rank: int) -> None:
    mesh = device_mesh((2, 2), ("dp", "tp"))
    _, expected = _train_whole(1e9, float("inf"))
    model = Split(_whole(), mesh.get_group("tp")).double()
    optimizer = ZeroOptimizer(model, torch.optim.SGD, stage=2, lr=0.1, momentum=0.9, group=mesh)
    model(_batch(0, mesh.get_local_rank("dp"))).square().mean().backward()
    assert optimizer.clip_grad_norm_(1e9, float("inf")).item() == pytest.approx(expected[0])
    optimizer.close()


def test_infinity_norm() -> None:
    run_ranks(4, _check_infinity_norm)


def _check_overflow(rank: int) -> None:
    """One rank of four overflows, in one part of the model: all skip, and the scales stay equal."""
    mesh = device_mesh((2, 2), ("dp", "tp"))
    model = Split(_whole(), mesh.get_group("tp")).float()
    fp16 = {"enabled": True, "initial_scale_power": 6, "hysteresis": 1}
    engine, *_ = zero.initialize(model=model, optimizer=_sgd, mpu=mesh, config={"fp16": fp16})
    applied, scales = [], []
    for step in range(4):
        x = _batch(step, mesh.get_local_rank("dp")).half()
        loss = engine(x).float().square().mean()
        if step in (1, 2):  # inside one rank's own part, where no exchange of the model shows it to the others
            loss = loss + (model.up.bias.float().sum() * (float("inf") if rank == step else 0.0))
        engine.backward(loss)
        engine.step()
        applied.append(engine.was_step_applied())
        scales.append(engine.cur_scale)
    engine.destroy()
    assert applied == [True, False, False, True]
    assert scales == [64, 32, 16, 16]


def test_an_overflow_in_one_part_skips_the_step_everywhere() -> None:
    run_ranks(4, _check_overflow)


def _check_grad_scaler(rank: int, stage: int) -> None:
    """The same with torch's GradScaler, which looks at each rank's gradients by itself."""
    mesh = device_mesh((2, 2), ("dp", "tp"))
    model = Split(_whole(), mesh.get_group("tp")).float()
    optimizer = ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1, group=mesh)
    scaler, scales = torch.amp.GradScaler("cpu", init_scale=64.0), []
    for step in range(4):
        before = full_values(model)
        loss = model(_batch(step, mesh.get_local_rank("dp")).float()).square().mean()
        hook = model.up.bias.register_hook(lambda grad: grad * (float("inf") if rank == step in (1, 2) else 1.0))  # noqa: B023
        scaler.scale(loss).backward()
        hook.remove()
        if step == 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        after = full_values(model)
        assert all(torch.equal(after[name], old) == (step in (1, 2)) for name, old in before.items()), step
    optimizer.close()
    assert scales == [64, 32, 16, 16]


def test_a_grad_scaler_skips_the_step_on_all_parts() -> None:
    for stage in (1, 3):
        run_ranks(4, _check_grad_scaler, stage)


def _train(engine: Any, data_rank: int, steps: range) -> None:
    for step in steps:
        engine.backward(engine(_batch(step, data_rank)).square().mean())
        engine.step()


def _check_checkpoint(rank: int, folder: Path, stage: int) -> None:
    """A run resumed from a checkpoint has the bits of an uninterrupted one; errors reach all ranks."""
    mesh = device_mesh((2, 2), ("dp", "tp"))
    data_rank, part = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
    config = {"zero_optimization": {"stage": stage}}

    def start() -> tuple[Split, Any]:
        model = Split(_whole(), mesh.get_group("tp")).double()
        return model, zero.initialize(model=model, optimizer=_sgd, mpu=mesh, config=config)[0]

    model, engine = start()
    _train(engine, data_rank, range(2))
    with pytest.raises(zero.CheckpointError, match="a checkpoint does not store"):  # in one part only
        engine.save_checkpoint(folder, tag="bad", client_state={"x": object() if part else 1})
    engine.save_checkpoint(folder, tag="a", client_state={"part": part}, async_op=True)
    saved = full_values(model)
    with pytest.raises(zero.CheckpointError, match="each of the 2 model-parallel ranks must write its part"):
        engine.save_16bit_model(folder, "model.safetensors")
    engine.save_16bit_model(folder, f"model-{part}.safetensors")
    _train(engine, data_rank, range(2, 4))
    expected = full_values(model)
    engine.save_checkpoint(folder, tag="b")
    if (data_rank, part) == (1, 1):
        engine.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(DivergedError, match=r"group 0 lr is .* and 0\.5 on rank"):  # of one part only
        engine.save_checkpoint(folder, tag="bad")
    engine.destroy()

    model, engine = start()
    path, client = engine.load_checkpoint(folder, tag="a")
    assert (path, client["part"]) == (folder / "a", part)
    assert all(torch.equal(value, saved[name]) for name, value in full_values(model).items())
    _train(engine, data_rank, range(2, 4))
    assert all(torch.equal(value, expected[name]) for name, value in full_values(model).items())
    dist.barrier()
    if rank == 0:
        _damage(folder / "b", f"part/1/weight/{next(iter(saved))}")
    dist.barrier()
    with pytest.raises(zero.CheckpointError, match="checksum"):  # of one part only
        engine.load_checkpoint(folder)
    assert all(torch.equal(value, expected[name]) for name, value in full_values(model).items())
    engine.destroy()

    alone = ZeroOptimizer(_whole(), torch.optim.SGD, lr=0.1, momentum=0.9)
    with pytest.raises(zero.CheckpointError, match="must be loaded by 2 model-parallel ranks, which saved it: got 1"):
        zero.load_checkpoint(alone, folder, "a")
    alone.close()
    outsider = ZeroOptimizer(_whole(), torch.optim.SGD, lr=0.1, group=mesh.get_group("dp"))
    with pytest.raises(zero.CheckpointError, match="knows of 2 data-parallel ones and 1 parts"):
        zero.save_checkpoint(outsider, folder, "x")
    outsider.close()
    with pytest.raises(zero.CheckpointError, match="choose one of 0 to 1"):
        zero.export_checkpoint(folder, folder / "whole.safetensors", tag="a")
    zero.export_checkpoint(folder, folder / f"{rank}.safetensors", tag="a", model_parallel_rank=part)
    exported = load_file(folder / f"{rank}.safetensors")
    assert all(torch.equal(exported[name], value) for name, value in saved.items())
    written = load_file(folder / f"model-{part}.safetensors")
    assert all(torch.equal(written[name], value) for name, value in saved.items())


def _damage(folder: Path, key: str) -> None:
    """Flip a bit of a stored tensor."""
    content = json.loads((folder / "metadata.json").read_text())["content"]
    _, _, file, position, _ = content["tensors"][key]["chunks"][0]
    with (folder / file).open("r+b") as shard:
        shard.seek(position)
        byte = shard.read(1)[0]
        shard.seek(position)
        shard.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_holds_all_parts(tmp_path: Path, stage: int) -> None:
    run_ranks(4, _check_checkpoint, tmp_path, stage)
    assert not (tmp_path / "bad").exists()


def _check_pipeline_axis(rank: int) -> None:
    """Pipeline stages have different parameters; a parameter that stages share is counted by one of them."""
    mesh = device_mesh((1, 2, 2), ("dp", "pp", "tp"))
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False)
    tied = nn.Parameter(torch.ones(2))
    model.register_parameter("tied", tied)
    if mesh.get_local_rank("pp") == 1:
        tied.shared = True  # type: ignore[attr-defined]
    optimizer = ZeroOptimizer(model, torch.optim.SGD, stage=1, lr=0.1, group=mesh)
    (model(torch.ones(1, 3)).sum() + 2 * tied.sum()).backward()
    # weight: 6 ones in each of 2 stages, counted by the first tensor-parallel rank; tied: 2 twos, in one stage.
    assert optimizer.clip_grad_norm_(1e9).item() == pytest.approx((2 * 6 + 2 * 4) ** 0.5)
    optimizer.close()
    mpu = Mpu(device_mesh((2, 2), ("dp", "tp")))
    del mpu.get_model_parallel_group
    with pytest.raises(ConfigError, match="get_model_parallel_group"):
        ZeroOptimizer(nn.Linear(2, 2), torch.optim.SGD, lr=0.1, group=mpu)


def test_pipeline_stages_and_shared_parameters() -> None:
    run_ranks(4, _check_pipeline_axis)


class _Stages:
    """Two pipeline stages of one layer each, without microbatches: the gradient goes back after the last backward."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group, self.stage = mesh.get_group("pp"), mesh.get_local_rank("pp")
        self.model = nn.Linear(WIDTH, WIDTH)
        self.other = dist.get_global_rank(self.group, 1 - self.stage)

    def train(self, x: Tensor, scale: Any) -> None:
        """A forward and a backward of both stages."""
        if self.stage == 0:
            sent = self.model(x)
            dist.send(sent.detach(), self.other, self.group)
            grad = torch.empty_like(sent)
            dist.recv(grad, self.other, self.group)
            sent.backward(grad)
            return
        got = torch.empty(x.shape[0], WIDTH).requires_grad_()
        dist.recv(got.detach(), self.other, self.group)
        scale(self.model(got).square().mean()).backward()
        assert got.grad is not None
        dist.send(got.grad, self.other, self.group)


def _check_scaler_of_stages(rank: int) -> None:
    """A stage waits for the other's backward, so they agree on overflow at the step, whichever stage has it."""
    mesh = device_mesh((2, 2), ("dp", "pp"))
    torch.manual_seed(0)
    stages = _Stages(mesh)
    optimizer = ZeroOptimizer(stages.model, torch.optim.SGD, stage=1, lr=0.1, group=mesh)
    scaler, scales = torch.amp.GradScaler("cpu", init_scale=64.0), []
    for step in range(4):
        before = full_values(stages.model)
        factor = float("inf") if (step, rank) in ((1, 0), (2, 1)) else 1.0
        hook = stages.model.bias.register_hook(lambda grad: grad * factor)  # noqa: B023
        scaler.scale(torch.ones(()))  # of a stage without the loss
        stages.train(torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step)), scaler.scale)
        hook.remove()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        after = full_values(stages.model)
        assert all(torch.equal(after[name], old) == (step in (1, 2)) for name, old in before.items()), step
    assert scales == [64, 32, 16, 16]
    hook = stages.model.bias.register_hook(lambda grad: grad * (float("inf") if rank == 1 else 1.0))
    stages.train(torch.ones(3, WIDTH), scaler.scale)
    hook.remove()
    scaler.unscale_(optimizer)
    with pytest.raises(StateError, match="with pipeline stages leave unscale_"):
        scaler.step(optimizer)
    optimizer.close()


def test_a_grad_scaler_with_pipeline_stages() -> None:
    run_ranks(4, _check_scaler_of_stages)
