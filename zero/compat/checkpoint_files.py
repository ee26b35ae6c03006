"""``deepspeed.utils.zero_to_fp32`` and ``deepspeed.checkpoint.utils``: weights of this library's checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import zero
from zero._checkpoint.export import read_weights


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """``item`` with copies of its tensors on ``device``, which share no memory."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to(device, copy=True), item)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Tensor]:
    """The weights and buffers of a checkpoint of any stage, floating-point ones in float32.

    Args:
        checkpoint_dir: The folder that checkpoints were saved to.
        tag: The name of the checkpoint. Default: what ``latest`` names.
        exclude_frozen_parameters: Leave out parameters that were not trained.
        lazy_mode: Without effect: the values are read.

    Raises:
        CheckpointError: There is no such checkpoint, or it is damaged.
    """
    return read_weights(
        checkpoint_dir, tag=tag, dtype=torch.float32, exclude_frozen_parameters=exclude_frozen_parameters
    )


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: Any = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights of a checkpoint in float32 to ``output_dir``: pytorch_model.bin, or safetensors.

    Files of safetensors are as large as :func:`zero.export_checkpoint` makes them.
    """
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    if safe_serialization and not exclude_frozen_parameters:
        zero.export_checkpoint(checkpoint_dir, Path(output_dir) / "model.safetensors", tag=tag, dtype=torch.float32)
        return
    weights = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    torch.save(weights, Path(output_dir) / "pytorch_model.bin")


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> nn.Module:
    """Load the weights of a checkpoint into a plain ``model``, and return it."""
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def convert_to_universal(args: Any) -> None:
    """Copy the checkpoint ``args.input_folder`` to ``args.output_folder``: it loads on any number of ranks as it is."""
    shutil.copytree(args.input_folder, args.output_folder, dirs_exist_ok=True)


main = convert_to_universal
