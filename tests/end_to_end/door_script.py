"""A script that uses DeepSpeed's names as scripts do; test_compat_door.py runs it with python -m zero.compat.

Each line of NAMES is used, and its result compared with what DeepSpeed documents. At its end it prints the names.
"""

import argparse
import sys
from pathlib import Path

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.pipe import PipelineModule
from deepspeed.profiling.flops_profiler import get_model_profile
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES, WarmupLR
from deepspeed.runtime.utils import see_memory_usage
from deepspeed.runtime.zero.partition_parameters import GatheredParameters, Init, ZeroParamStatus
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live
from deepspeed.utils import RepeatingLoader, groups, log_dist, logger, safe_get_full_fp32_param, set_z3_leaf_modules
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn

assert __name__ == "__main__"
parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("folder")
args = parser.parse_args()
assert args.deepspeed_config.endswith("ds.json"), args
assert sys.path[0] == str(Path(__file__).parent)

deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False, distributed_port=29501)
dist.init_distributed()  # again: nothing
dist.init_distributed("nccl")  # so for a backend that is not available
assert (dist.get_rank(), dist.get_world_size(), dist.get_local_rank(), dist.is_initialized()) == (0, 1, 0, True)
total = torch.ones(3)
dist.all_reduce(total)
dist.barrier()
dist.log_summary()
assert groups._get_data_parallel_world_size() == 1
assert total.tolist() == [1.0, 1.0, 1.0]

device = get_accelerator()
assert device is deepspeed.get_accelerator()
assert device.device_name(0) == device.current_device_name() == "cpu"
assert (device.communication_backend_name(), device.is_available()) == ("gloo", True)
assert device.device_count() >= 1
assert device.on_accelerator(torch.ones(1))

with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
    layer = nn.Linear(2, 2)
assert (layer.weight.device.type, layer.weight.dtype, torch.get_default_dtype()) == (
    "meta",
    torch.bfloat16,
    torch.float32,
)
with deepspeed.utils.OnDevice(torch.float16, "meta", enabled=False):
    assert nn.Linear(1, 1).weight.device.type == "cpu"

assert Init is deepspeed.zero.Init
assert GatheredParameters is deepspeed.runtime.zero.GatheredParameters is deepspeed.zero.GatheredParameters
with deepspeed.zero.Init(config_dict_or_path={"zero_optimization": {"stage": 3}}):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 4))
weight = model[0].weight
assert weight.ds_status == deepspeed.zero.ZeroParamStatus.NOT_AVAILABLE == ZeroParamStatus.NOT_AVAILABLE
assert (weight.ds_numel, weight.ds_shape) == (160_000, (400, 400))
assert {name: tuple(value.shape) for name, value in model.state_dict().items()} == {
    "0.weight": (400, 400), "0.bias": (400,), "2.weight": (4, 400), "2.bias": (4,)
}  # fmt: skip
with GatheredParameters(weight, modifier_rank=0):
    assert weight.ds_status == ZeroParamStatus.AVAILABLE
    weight.data.mul_(0.5)
assert set_z3_leaf_modules(model, [nn.ReLU]) == [model[1]]
deepspeed.zero.register_external_parameter(model, weight)

deepspeed.checkpointing.configure(None, partition_activations=False)
assert deepspeed.checkpointing.is_configured()
deepspeed.checkpointing.model_parallel_cuda_manual_seed(3)
assert (
    deepspeed.checkpointing.get_cuda_rng_tracker()
    is deepspeed.runtime.activation_checkpointing.checkpointing.get_cuda_rng_tracker()
)
x = torch.ones(2, requires_grad=True)
deepspeed.checkpointing.checkpoint(torch.exp, x).sum().backward()
assert torch.equal(x.grad, torch.exp(x.detach()))
deepspeed.checkpointing.reset()

engine, optimizer, _, scheduler = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
assert isinstance(engine, DeepSpeedEngine)
assert DeepSpeedEngine is deepspeed.DeepSpeedEngine
assert isinstance(engine, nn.Module)
assert not isinstance(engine, PipelineModule)
assert isinstance(optimizer, deepspeed.DeepSpeedOptimizer)
assert isinstance(scheduler, WarmupLR)
assert "WarmupLR" in VALID_LR_SCHEDULES
assert engine.zero_optimization_stage() == deepspeed.DeepSpeedConfig(args.deepspeed_config).zero_optimization_stage == 3
assert model[0].bias.ds_status == ZeroParamStatus.AVAILABLE, "smaller than the persistence threshold"
assert model[0].bias.sum().item() != 0.0
losses = []
batches = RepeatingLoader([(torch.ones(4, 400), torch.arange(4))])
for _ in range(8):
    inputs, labels = next(batches)
    loss = nn.functional.cross_entropy(engine(inputs), labels)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
assert not optimizer.overflow
assert optimizer.cur_scale == 1.0
full = safe_get_full_fp32_param(weight)
assert full is not None
assert full.shape == (400, 400)
with deepspeed.zero.unwrap_model_for_generation(engine) as plain:
    assert plain is model
    assert torch.equal(plain[0].weight, full)
engine.save_checkpoint(args.folder)
assert torch.equal(get_fp32_state_dict_from_zero_checkpoint(args.folder)["0.weight"], full)
engine.destroy()

for build in (DeepSpeedCPUAdam, FusedAdam, FusedLamb, DeepSpeedCPULion):
    param = nn.Parameter(torch.ones(4))
    updated = build([param], 0.5)
    param.grad = torch.ones(4)
    updated.step()
    assert (param < 1).all(), build

files = AsyncIOBuilder().load().aio_handle(1024**2, 8, False, True, 2)
written = torch.arange(5000.0)
read = files.new_cpu_locked_tensor(5000, written)
assert (files.async_pwrite(written, f"{args.folder}/tensor"), files.wait()) == (0, 1)
assert (files.sync_pread(read, f"{args.folder}/tensor"), files.get_block_size()) == (1, 1024**2)
assert torch.equal(read, written)
assert files.free_cpu_locked_tensor(read)

flops, macs, params = get_model_profile(nn.Linear(8, 16), (4, 8), as_string=False)
assert (flops, macs, params) == (2 * 4 * 8 * 16, 4 * 8 * 16, 8 * 16 + 16)

table = nn.Embedding(10, 4, sparse=True)
adagrad = DeepSpeedCPUAdagrad(table.parameters(), lr=0.5)
table(torch.tensor([3, 3])).sum().backward()
before = table.weight.detach().clone()
adagrad.step()
assert table.weight.grad.is_sparse
assert torch.allclose(before - table.weight, torch.where(torch.arange(10)[:, None] == 3, 0.5, 0.0))

log_dist("a line on rank 0", ranks=[0])
logger.info("another")
deepspeed.logger.info("another")
see_memory_usage("now", force=True)
estimate_zero3_model_states_mem_needs_all_live(nn.Linear(4, 4), num_gpus_per_node=2)
assert deepspeed.zero.TiledLinear(8, 8, in_splits=2)(torch.ones(1, 8)).shape == (1, 8)
print("the end", deepspeed.__version__)
