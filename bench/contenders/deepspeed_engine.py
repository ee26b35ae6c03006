"""The contender DeepSpeed, at any stage."""

from __future__ import annotations

import warnings
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn
from torch.optim import AdamW

from contenders.contender import Contender, ContenderSetup
from contenders.muon import LEARNING_RATE, WEIGHT_DECAY

__all__ = ["build"]

warnings.filterwarnings(
    "ignore", "`torch.distributed.*is deprecated", FutureWarning
)  # DeepSpeed calls collectives by old names


def build(
    setup: ContenderSetup,
    stage: int,
    *,
    offload: str | None = None,
    has_cpu_adam: bool = False,
    stays_in_node: bool = False,
    sections: dict[str, Any] | None = None,
    accumulation: int = 1,
    has_muon: bool = False,
) -> Contender:
    """Wrap the model at ``stage``. Defaults, except that nothing is clipped, as by no other contender, and for buckets.

    DeepSpeed allocates these in full, by default for 5e8 elements; here they are as large as the model.

    ``offload`` is where parameters and states are stored: "cpu", or "nvme" for files in the setup's folder.
    ``has_cpu_adam``: DeepSpeed's own AdamW updates them, compiled when it is first used; otherwise torch's does.
    ``stays_in_node``: the ranks of a node keep all parameters together (hpZ): only the first gather leaves the node.
    ``sections``: more keys of its configuration, by section.
    ``has_muon``: DeepSpeed's Muon updates the matrices of blocks, by the standard iteration.
    """
    parameters = list(setup.model.parameters())
    numel = sum(param.numel() for param in parameters)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": setup.num_sequences,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": numel, "allgather_bucket_size": numel},
        "zero_allow_untested_optimizer": True,
    }
    if offload is not None:
        config["zero_optimization"] |= _offloaded(setup, offload, numel)
        config["zero_force_ds_cpu_optimizer"] = False
    if stays_in_node:
        assert setup.topology is not None, "hpZ needs nodes"
        config["zero_optimization"]["zero_hpz_partition_size"] = setup.topology.ranks_per_node
    config["bf16"] = {"enabled": setup.dtype == torch.bfloat16}
    for name, values in (sections or {}).items():
        config[name] = config[name] | values if isinstance(values, dict) else values
    optimizer = None
    if has_muon:
        config["zero_optimization"]["reduce_scatter"] = stage != 3  # refused there with Muon
        config["optimizer"] = {"type": "Muon", "params": _muon(setup)}
        _name_output_layer(setup.model)
    elif has_cpu_adam:
        optimizer = DeepSpeedCPUAdam(setup.model.parameters(), lr=setup.learning_rate, weight_decay=0.01)  # as AdamW's
    else:
        optimizer = AdamW(setup.model.parameters(), lr=setup.learning_rate, fused=True)
    engine, *_ = deepspeed.initialize(model=setup.model, optimizer=optimizer, config=config)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros((), device=tokens.device)
        for batch in zip(tokens.chunk(accumulation), targets.chunk(accumulation), strict=True):
            loss: Tensor = engine(*batch)
            engine.backward(loss)  # which divides it by ``accumulation``
            engine.step()
            total += loss.detach() / accumulation
        return total

    return Contender(step, accumulation, engine.destroy, lambda: map(safe_get_full_fp32_param, parameters))


def _offloaded(setup: ContenderSetup, device: str, numel: int) -> dict[str, Any]:
    """Its settings of offloading. In files a rank's states are two sub-groups, one moved while the other is updated.

    By default there is one, and nothing to overlap; of more, DeepSpeed would keep those below 1 MiB in memory.
    """
    if device != "nvme":
        return {"offload_optimizer": {"device": device}, "offload_param": {"device": device}}
    files = {"device": device, "nvme_path": setup.folder}
    return {
        # DeepSpeed stops with an AssertionError if sub-groups on their way need more than the default of 4 buffers.
        "offload_optimizer": files | {"pipeline_read": True, "pipeline_write": True, "buffer_count": 12},
        "offload_param": files | {"buffer_size": numel, "max_in_cpu": 0},
        "sub_group_size": numel // dist.get_world_size() // 2,
    }


def _muon(setup: ContenderSetup) -> dict[str, Any]:
    params = {"muon_lr": LEARNING_RATE, "adam_lr": setup.learning_rate, "weight_decay": WEIGHT_DECAY}
    return params | {"betas": (0.9, 0.999), "eps": 1e-8, "ns_method": "standard", "torch_adam": True}  # AdamW's own


def _name_output_layer(model: nn.Module) -> None:
    """Name the output layer as DeepSpeed knows it: it gives Muon every other matrix, but for embeddings."""
    head = model._modules.pop("head")
    model.add_module("lm_head", head)
    object.__setattr__(model, "head", head)  # forward calls it by its own name
