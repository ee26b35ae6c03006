"""zero.TiledLinear equals the untiled layer, has one tile in memory at a time, and is saved under its tiles' keys."""

# covers zero/_access/tiled_linear.py zero/_storage/safetensors_file.py

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from tests.ranks import run_ranks
from tests.zero.models import as_vector, new_model, relative_error, train_plain
from tests.zero.training import assert_same_bits, full_values, train, zero_optimizer
from zcomm import ConfigError, LayoutError
from zero._checkpoint.model_file import save_model_file
from zero._storage.pretrained_reader import open_tensors

NUM_TILED = 6
"""Linear layers in the MLPs of the test model."""


def _integers(*shape: int, seed: int) -> Tensor:
    """Small whole numbers: every product and sum is exact in float32, in any order."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


def _gradients(layer: Callable[[Tensor], Tensor], x: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(upstream)
    assert x.grad is not None
    return y.detach(), x.grad


def _joined(tiled: zero.TiledLinear, name: str) -> Tensor:
    rows = []
    for row in tiled.linears:
        tiles = [getattr(tile, name).grad for tile in row if getattr(tile, name) is not None]
        rows.append(torch.cat(tiles, dim=1) if name == "weight" else tiles[0])
    return torch.cat(rows)


@pytest.mark.parametrize(("in_splits", "out_splits"), [(1, 1), (1, 4), (3, 1), (3, 4), (11, 7)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_tiled_layer_is_the_untiled_one(in_splits: int, out_splits: int, *, bias: bool) -> None:
    plain = nn.Linear(11, 7, bias=bias)
    with torch.no_grad():
        for seed, param in enumerate(plain.parameters()):
            param.copy_(_integers(*param.shape, seed=seed))
    tiled = zero.TiledLinear(11, 7, bias, in_splits, out_splits, init_linear=plain)
    x, upstream = _integers(2, 5, 11, seed=8), _integers(2, 5, 7, seed=9)
    for got, expected in zip(_gradients(tiled, x, upstream), _gradients(plain, x, upstream), strict=True):
        assert torch.equal(got, expected)
    assert torch.equal(_joined(tiled, "weight"), plain.weight.grad)
    assert not bias or torch.equal(_joined(tiled, "bias"), plain.bias.grad)
    parts = list(x.split([b - a for a, b in zip(tiled.in_parts, tiled.in_parts[1:], strict=False)], dim=-1))
    open_ended = zero.TiledLinear(
        11, 7, bias, in_splits, out_splits, input_is_already_split=True, combine_out_splits=False, init_linear=plain
    )
    assert torch.equal(torch.cat(open_ended(parts), dim=-1), plain(x))


def test_rounding_stays_within_the_dtype() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(96, 40).double()
    x, upstream = torch.randn(6, 96).double(), torch.randn(6, 40).double()
    expected = _gradients(plain, x, upstream)
    for in_splits, out_splits in product((1, 5), (1, 3)):
        tiled = zero.TiledLinear(96, 40, True, in_splits, out_splits, init_linear=plain, dtype=torch.float64)
        for got, wanted in zip(_gradients(tiled, x, upstream), expected, strict=True):
            assert relative_error(got, wanted) < 1e-14


class _ReturnsBias(nn.Linear):
    """Returns its bias, as Megatron's layers do."""

    def forward(self, x: Tensor) -> Any:
        return nn.functional.linear(x, self.weight), self.bias


def test_layers_that_return_their_bias() -> None:
    plain = nn.Linear(6, 5)
    tiled = zero.zero.TiledLinearReturnBias(6, 5, True, 2, 3, linear_cls=_ReturnsBias, init_linear=plain)
    x = torch.randn(4, 6)
    output, bias = tiled(x)
    assert torch.equal(bias, plain.bias)
    assert torch.allclose(output + bias, plain(x))
    without = zero.zero.TiledLinearReturnBias(6, 5, False, 2, 3, linear_cls=_ReturnsBias)
    assert without(x)[1] is None


def test_what_cannot_be_tiled_is_refused() -> None:
    for options in ({"in_splits": 0}, {"in_splits": 7}, {"out_splits": 6}):
        with pytest.raises(ConfigError, match=r"must be 1 to the \d features"):
            zero.TiledLinear(6, 5, **options)
    tiled = zero.TiledLinear(6, 5, in_splits=2)
    for other in (nn.Linear(5, 6), nn.Linear(6, 5, bias=False), nn.LayerNorm(6)):
        with pytest.raises(LayoutError, match="a layer with weight"):
            tiled.copy_params_from(other)
    with pytest.raises(LayoutError, match="in_features=6"):
        tiled(torch.zeros(2, 5))
    with pytest.raises(LayoutError, match=r"parts of \[3, 3\] columns"):
        zero.TiledLinear(6, 5, in_splits=2, input_is_already_split=True)([torch.zeros(2, 2), torch.zeros(2, 4)])


def _peak_numel(model: nn.Module, *, is_frozen: bool) -> int:
    """The pool's peak of gathered parameter elements over two steps; gradients are kept in another dtype."""
    if is_frozen:
        model.get_submodule("1").requires_grad_(False)
    options = {"stage3_prefetch_bucket_size": 0, "gradient_format": "bf16"}
    with zero_optimizer(model, torch.optim.SGD, stage=3, lr=0.1, **options) as optimizer:
        pool = optimizer.parts.runtime.pool
        for _ in range(2):
            model(torch.randn(2, 8, dtype=torch.bfloat16)).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        gathered = {bucket.dtype for bucket in optimizer.parts.runtime.buckets}
        assert gathered == {torch.bfloat16}
        return sum(buffer.numel() for buffer in pool._owned.values() if buffer.dtype == torch.bfloat16)


def _check_a_tile_is_in_memory_at_a_time(rank: int) -> None:
    first = lambda: nn.Linear(8, 64)  # noqa: E731  (so that the large layer's input has a gradient)
    for tiles, is_frozen in product((4, 8), (False, True)):
        whole = _peak_numel(nn.Sequential(first(), nn.Linear(64, 2048)).bfloat16(), is_frozen=is_frozen)
        tiled = nn.Sequential(first(), zero.TiledLinear(64, 2048, out_splits=tiles)).bfloat16()
        assert _peak_numel(tiled, is_frozen=is_frozen) <= 1.1 * whole / tiles


def test_a_tile_is_in_memory_at_a_time() -> None:
    run_ranks(2, _check_a_tile_is_in_memory_at_a_time)


def _tile_mlps(model: nn.Module) -> nn.Module:
    """Replace each linear layer of the blocks' MLPs by three rows of tiles, as a user does."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and ".mlp." in name:
            parent, _, child = name.rpartition(".")
            rows = zero.TiledLinear(
                module.in_features, module.out_features, module.bias is not None, out_splits=3, init_linear=module,
                dtype=module.weight.dtype,
            )  # fmt: skip
            setattr(model.get_submodule(parent), child, rows.requires_grad_(module.weight.requires_grad))
    return model


def _untiled(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict with the rows of each tiled layer joined, under the keys of the untiled layer."""
    joined: dict[str, list[Tensor]] = {}
    for key, value in state.items():
        joined.setdefault(re.sub(r"linears\.\d+\.0\.", "", key), []).append(value)
    return {key: torch.cat(rows) if len(rows) > 1 else rows[0] for key, rows in joined.items()}


def _check_training_is_the_untiled_one(rank: int) -> None:
    plain = new_model(torch.float64, has_frozen=True)
    train_plain(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), world_size=2, steps=3, max_norm=0.5)
    model = _tile_mlps(new_model(torch.float64, has_frozen=True))
    assert sum(isinstance(module, zero.TiledLinear) for module in model.modules()) == NUM_TILED
    with zero_optimizer(model, torch.optim.AdamW, stage=3, lr=1e-2) as optimizer:
        train(model, optimizer, rank, steps=3, max_norm=0.5)
        state = _untiled(model.state_dict())
    if rank == 0:
        expected = plain.state_dict()
        assert state.keys() == expected.keys()
        assert relative_error(as_vector([state[key] for key in expected]), as_vector(expected.values())) < 1e-10


def _check_files_hold_the_tiles(rank: int, folder: str) -> None:
    model = _tile_mlps(new_model(torch.bfloat16))
    exported, saved = Path(folder) / "model.safetensors", Path(folder) / "living.safetensors"
    with zero_optimizer(model, stage=3) as optimizer:
        train(model, optimizer, rank, steps=1)
        zero.save_checkpoint(optimizer, folder, "one")
        save_model_file(optimizer, saved)
        state, before = model.state_dict(), full_values(model)
        if rank == 0:
            zero.export_checkpoint(folder, exported, tag="one", dtype=torch.bfloat16)
        for load in (
            lambda: zero.load_checkpoint(optimizer, folder, "one"),
            lambda: zero.load_checkpoint(optimizer, exported, load_module_only=True),
            lambda: zero.load_pretrained(model, saved if rank == 0 else None),
        ):
            train(model, optimizer, rank, steps=1)
            load()
            assert_same_bits(full_values(model), before)
    if rank == 0:
        for file in (exported, saved):
            assert all(torch.equal(read(), state[name]) for name, read in open_tensors(file).items())


def test_a_model_with_tiled_layers_trains_as_without_and_saves_its_tiles(tmp_path: Path) -> None:
    run_ranks(2, _check_training_is_the_untiled_one)
    run_ranks(2, _check_files_hold_the_tiles, str(tmp_path))
