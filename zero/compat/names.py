"""Which of DeepSpeed's names there are here, by module, and where each comes from."""

from __future__ import annotations

INTERFACE = "0.19.8"
"""The version of DeepSpeed whose names, signatures and defaults are followed."""

_ENGINE, _HELPERS, _OPTIMIZERS = "zero.compat.engine", "zero.compat.helpers", "zero.compat.optimizers"
_PARAMETERS, _COMM, _ACCELERATOR = "zero.compat.parameters", "zero.compat.comm", "zero.compat.accelerator"
_FRAGMENTS = "safe_get_full_fp32_param safe_get_local_fp32_param safe_update_full_grad_vectorized"
_SECTIONS, _SPELLINGS = "zero.compat.sections", "zero.compat.spellings"
_MONITORS = "zero.compat.monitors"
_FLOPS = "zero.compat.flops_profiler"
_CHECKPOINTS, _BUILDERS = "zero.compat.checkpoint_files", "zero.compat.op_builders"
_LOGGING = "logger log_dist log_dist_once set_log_level_from_string print_rank_0 warning_once"
_GATHERING = {"zero": "Init GatheredParameters register_external_parameter unregister_external_parameter"}
_ZERO_3 = "estimate_zero3_model_states_mem_needs_all_live estimate_zero3_model_states_mem_needs_all_cold"
_ZERO_2 = "estimate_zero2_model_states_mem_needs_all_live estimate_zero2_model_states_mem_needs_all_cold"
_SCHEDULES = "LRRangeTest OneCycle WarmupLR WarmupDecayLR WarmupCosineLR"
_OPS = (
    "OpBuilder ALL_OPS CPUAdamBuilder CPUAdagradBuilder CPULionBuilder FusedAdamBuilder FusedLionBuilder "
    "AsyncIOBuilder FusedLambBuilder QuantizerBuilder UtilsBuilder EvoformerAttnBuilder FPQuantizerBuilder GDSBuilder "
    "InferenceBuilder PinMemoryBuilder RandomLTDBuilder SparseAttnBuilder SpatialInferenceBuilder "
    "StochasticTransformerBuilder TransformerBuilder"
)

NAMES: dict[str, dict[str, str]] = {
    "": {
        _ENGINE: "initialize DeepSpeedEngine DeepSpeedOptimizer DeepSpeedConfigError",
        _SECTIONS: "DeepSpeedConfig",
        "zero": "add_config_arguments",
        "zero.compat": "as_deepspeed",
        _COMM: "init_distributed",
        _HELPERS: "OnDevice logger log_dist DeepSpeedDataLoader __git_hash__ __git_branch__ __version_major__ "
        "__version_minor__ __version_patch__",
        _ACCELERATOR: "get_accelerator",
    },
    "accelerator": {
        _ACCELERATOR: "get_accelerator set_accelerator is_current_accelerator_supported DeepSpeedAccelerator"
    },
    "accelerator.real_accelerator": {_ACCELERATOR: "get_accelerator set_accelerator is_current_accelerator_supported"},
    "accelerator.abstract_accelerator": {_ACCELERATOR: "DeepSpeedAccelerator"},
    "checkpoint.ds_to_universal": {_CHECKPOINTS: "main convert_to_universal"},
    "checkpoint.utils": {_CHECKPOINTS: "clone_tensors_for_torch_save"},
    "comm": {
        _COMM: "init_distributed is_initialized get_local_rank get_global_rank log_summary configure get_world_group "
        "has_all_gather_into_tensor has_reduce_scatter_tensor get_all_ranks_from_group all_gather_into_tensor "
        "allgather_fn inference_all_reduce"
    },
    "comm.comm": {
        _COMM: "init_distributed get_local_rank get_global_rank log_summary configure all_gather_into_tensor "
        "inference_all_reduce"
    },
    "compression.helper": {_HELPERS: "recursive_getattr recursive_setattr"},
    "constants": {_COMM: "TORCH_DISTRIBUTED_DEFAULT_PORT CROSS_RANK CROSS_SIZE LOCAL_RANK"},
    "git_version_info": {_HELPERS: "version git_hash git_branch torch_info"},
    "launcher.runner": {_HELPERS: "DEEPSPEED_ENVIRONMENT_NAME"},
    "moe.utils": {
        _HELPERS: "has_moe_layers is_moe_param is_moe_param_group split_params_into_different_moe_groups_for_optimizer"
    },
    "ops": {_BUILDERS: "__compatible_ops__"},
    "ops.adagrad": {_OPTIMIZERS: "DeepSpeedCPUAdagrad"},
    "ops.adagrad.cpu_adagrad": {_OPTIMIZERS: "DeepSpeedCPUAdagrad"},
    "ops.adam": {_OPTIMIZERS: "DeepSpeedCPUAdam FusedAdam"},
    "ops.adam.cpu_adam": {_OPTIMIZERS: "DeepSpeedCPUAdam"},
    "ops.adam.fused_adam": {_OPTIMIZERS: "FusedAdam"},
    "ops.aio": {_BUILDERS: "AsyncIOBuilder"},
    "ops.lamb": {_OPTIMIZERS: "FusedLamb"},
    "ops.lamb.fused_lamb": {_OPTIMIZERS: "FusedLamb"},
    "ops.lion": {_OPTIMIZERS: "DeepSpeedCPULion FusedLion"},
    "ops.lion.cpu_lion": {_OPTIMIZERS: "DeepSpeedCPULion"},
    "ops.lion.fused_lion": {_OPTIMIZERS: "FusedLion"},
    "ops.op_builder": {_BUILDERS: _OPS},
    "profiling.flops_profiler": {_FLOPS: "FlopsProfiler get_model_profile"},
    "profiling.flops_profiler.profiler": {
        _FLOPS: "FlopsProfiler get_model_profile number_to_string macs_to_string params_to_string"
    },
    "runtime.activation_checkpointing.checkpointing": {_HELPERS: "non_reentrant_checkpoint"},
    "runtime.base_optimizer": {_ENGINE: "DeepSpeedOptimizer ZeROOptimizer"},
    "monitor.comet": {_MONITORS: "CometMonitor"},
    "monitor.config": {_MONITORS: "DeepSpeedMonitorConfig"},
    "monitor.csv_monitor": {_MONITORS: "csvMonitor"},
    "monitor.monitor": {_MONITORS: "MonitorMaster TensorBoardMonitor WandbMonitor csvMonitor CometMonitor"},
    "monitor.tensorboard": {_MONITORS: "TensorBoardMonitor"},
    "monitor.wandb": {_MONITORS: "WandbMonitor"},
    "runtime.config": {_ENGINE: "DeepSpeedConfigError", _SECTIONS: "DeepSpeedConfig get_gradient_clipping"},
    "runtime.dataloader": {_HELPERS: "RepeatingLoader DeepSpeedDataLoader"},
    "runtime.engine": {_ENGINE: "DeepSpeedEngine"},
    "runtime.lr_schedules": {"zero._optim.lr_schedulers": _SCHEDULES},
    "runtime.precision_config": {_SECTIONS: "DeepSpeedFP16Config DeepSpeedBF16Config get_bfloat16_config"},
    "runtime.utils": {
        _HELPERS: "see_memory_usage set_random_seed noop_decorator ensure_directory_exists empty_cache move_to_device",
        "torch.nn.utils": "clip_grad_norm_",
    },
    "runtime.zero": {**_GATHERING, _PARAMETERS: "ZeroParamStatus", _HELPERS: "unwrap_model_for_generation"},
    "runtime.zero.config": {
        _SECTIONS: "DeepSpeedZeroConfig DeepSpeedZeroOffloadParamConfig DeepSpeedZeroOffloadOptimizerConfig "
        "ZeroStageEnum"
    },
    "runtime.zero.offload_config": {
        _HELPERS: "OffloadDeviceEnum OffloadStateTypeEnum",
        _SECTIONS: "DeepSpeedZeroOffloadParamConfig DeepSpeedZeroOffloadOptimizerConfig",
    },
    "runtime.zero.leaf_module_config": {
        _SECTIONS: "DeepSpeedZeroLeafModuleConfig",
        _SPELLINGS: "DEFAULT_LEAF_MODULE_CLASSES DEFAULT_LEAF_MODULE_NAMES DEFAULT_LEAF_MODULE_NAME_SUFFIXES",
    },
    "runtime.zero.linear": {_HELPERS: "LinearModuleForZeroStage3 zero3_linear_wrap"},
    "runtime.zero.partition_parameters": {
        **_GATHERING,
        _HELPERS: "zero3_linear_wrap",
        _PARAMETERS: "ZeroParamStatus ZeroParamType is_zero_param zero_wrapper_for_fp_tensor_constructor "
        "_orig_torch_arange partitioned_param_data_shape",
        _ACCELERATOR: "get_accelerator",
    },
    "runtime.zero.stage_1_and_2": {_ENGINE: "DeepSpeedZeroOptimizer", _HELPERS: _ZERO_2},
    "runtime.zero.stage3": {_ENGINE: "DeepSpeedZeroOptimizer_Stage3", _HELPERS: _ZERO_3},
    "runtime.zero.tiling": {"zero": "TiledLinear TiledLinearReturnBias"},
    "runtime.zero.utils": {_PARAMETERS: "is_zero_param", _ENGINE: "ZeRORuntimeException"},
    "utils": {
        _HELPERS: f"{_LOGGING} OnDevice RepeatingLoader instrument_w_nvtx",
        _PARAMETERS: _FRAGMENTS,
        "zero.utils": "safe_get_full_grad z3_leaf_module",
    },
    "utils.groups": {
        _COMM: "_get_data_parallel_group _get_data_parallel_rank _get_data_parallel_world_size "
        "_get_model_parallel_world_size _get_sequence_parallel_group _get_sequence_parallel_rank "
        "_get_sequence_parallel_world_size get_data_parallel_group get_data_parallel_rank "
        "get_data_parallel_world_size get_model_parallel_world_size"
    },
    "utils.tensor_fragment": {_PARAMETERS: _FRAGMENTS},
    "utils.init_on_device": {_HELPERS: "OnDevice"},
    "utils.logging": {_HELPERS: _LOGGING},
    "utils.module_utils": {_HELPERS: "recursive_getattr recursive_setattr"},
    "utils.nvtx": {_HELPERS: "instrument_w_nvtx"},
    "utils.torch": {_HELPERS: "required_torch_version"},
    "utils.zero_to_fp32": {
        _CHECKPOINTS: "get_fp32_state_dict_from_zero_checkpoint convert_zero_checkpoint_to_fp32_state_dict "
        "load_state_dict_from_zero_checkpoint"
    },
    "zero": {**_GATHERING, _PARAMETERS: "ZeroParamStatus", _HELPERS: "unwrap_model_for_generation"},
}
"""Module without "deepspeed.": module of this library or torch: its names that DeepSpeed's module has."""

FALLBACKS: dict[str, tuple[str, ...]] = {
    "": ("zero",),
    "checkpointing": ("zero.checkpointing",),
    "comm": ("torch.distributed",),
    "comm.comm": ("torch.distributed",),
    "runtime.activation_checkpointing.checkpointing": ("zero.checkpointing",),
    "checkpoint": (_SPELLINGS,),
    "runtime.config": (_SPELLINGS,),
    "runtime.config_utils": ("zero.compat.config_model",),  # without pydantic its class raises
    "runtime.constants": (_SPELLINGS,),
    "runtime.swap_tensor": (_SPELLINGS,),
    "runtime.lr_schedules": ("zero._optim.lr_schedulers", _SPELLINGS),
    "utils": ("zero.utils",),
    "utils.tensor_fragment": ("zero.utils",),
    "utils.z3_leaf_module": ("zero.utils",),
    "zero": ("zero.zero", "zero"),
}
"""Where a module's other names are looked up."""

_PIPELINE = "for pipeline parallelism use torch.distributed.pipelining, and pass its mesh as mpu="
_MOE = "write the layer with torch, and mark it by deepspeed.utils.set_z3_leaf_modules at stage 3"
_BACKEND = "the functions of deepspeed.comm are torch.distributed's"
_SERVING = "for inference call initialize() without an optimizer (stage 3), or serve the exported weights elsewhere"
_LAUNCH = "start the script with torchrun -m zero.compat script.py"
_BUILD = "nothing has to be built here: CPU optimizers and kernels are part of zcomm-zero"
_PROFILE = "use torch.utils.flop_counter.FlopCounterMode or torch.profiler"
_ONE_CLASS = "the optimizer of every engine is a deepspeed.runtime.base_optimizer.ZeROOptimizer"
_FILES = "checkpoints here are other files: read their weights by deepspeed.utils.zero_to_fp32"
_BACKGROUND = "engine.save_checkpoint(..., async_op=True) writes in the background"
_TENSOR = "for tensor parallelism build the model with its layers, and pass mpu="
_GENERATE = "generate inside deepspeed.zero.unwrap_model_for_generation(engine)"
_INSIDE = "it belongs to DeepSpeed's implementation"
_LOGGED = "set comms_logger in the configuration: engine.destroy() logs what was sent"
_TIMED = "set wall_clock_breakdown in the configuration, or use torch.profiler"
_MICS = (
    "use deepspeed.zero.Init, and hpZ for gathers inside a node: zero_hpz_partition_size, the ranks of a node, not "
    "mics_shard_size; optimizer states are sharded over all ranks"
)
_ZENFLOW = "zcomm.delayed_update with offload_optimizer overlaps the update on the host with the next step"
_ONEBIT = "set zero_quantized_gradients, or zcomm.mode 'delta', to send fewer bytes with any optimizer"
_SEQUENCE = "for sequence parallelism pass mpu= with its groups"

ABSENT_NAMES: dict[str, str] = {
    "comm.TorchBackend": _BACKEND,
    "comm.torch.TorchBackend": _BACKEND,
    "DeepSpeedHybridEngine": _SERVING,
    "DeepSpeedInferenceConfig": _SERVING,
    "DeepSpeedTransformerConfig": "use torch.nn.functional.scaled_dot_product_attention",
    "DeepSpeedTransformerLayer": "use torch.nn.functional.scaled_dot_product_attention",
    "InferenceEngine": _SERVING,
    "init_inference": _SERVING,
    "launcher.runner.main": _LAUNCH,
    "moe.layer.MoE": _MOE,
    "pipe.LayerSpec": _PIPELINE,
    "pipe.PipelineModule": _PIPELINE,
    "pipe.TiedLayerSpec": _PIPELINE,
    "PipelineEngine": _PIPELINE,
    "PipelineModule": _PIPELINE,
    "checkpoint.utils.get_model_ckpt_name_for_rank": _FILES,
    "runtime.bf16_optimizer.BF16_Optimizer": _ONE_CLASS,
    "runtime.fp16.fused_optimizer.FP16_Optimizer": _ONE_CLASS,
    "runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer": _ONE_CLASS,
    "runtime.pipe.module.PipelineModule": _PIPELINE,
    "runtime.pipe.topology.PipeDataParallelTopology": _PIPELINE,
    "runtime.pipe.topology.PipeModelDataParallelTopology": _PIPELINE,
    "runtime.torch_autocast.get_comm_dtype": _INSIDE,
    "runtime.torch_autocast.has_comm_dtype": _INSIDE,
    "runtime.sparse_tensor.SparseTensor": "gradients of embeddings with sparse=True are made dense",
    "runtime.zero.offload_states.get_state_devices": _INSIDE,
    "runtime.zero.linear.LinearFunctionForZeroStage3": _INSIDE,
    "runtime.zero.parameter_offload.ZeROOrderedDict": _INSIDE,
    "runtime.zero.partition_parameters.CUDAQuantizer": _INSIDE,
    "runtime.zero.partition_parameters.InsertPostInitMethodToModuleSubClasses": _INSIDE,
    "runtime.zero.partition_parameters.MultipleAllGatherHandles": _INSIDE,
    "tp_model_init": _TENSOR,
    "utils.comms_logging.CommsLogger": _LOGGED,
    "utils.timer.SynchronizedWallClockTimer": _TIMED,
    "utils.timer.ThroughputTimer": _TIMED,
    "zero.MiCS_Init": _MICS,
}
"""Names of DeepSpeed that raise when they are used, and the remedy."""

ABSENT_PACKAGES: dict[str, str] = {
    "autotuning": "zero plan prints the fastest configuration that fits",
    "checkpoint": _FILES,
    "compile": "call engine.compile(), or torch.compile on the model's blocks",
    "compression": "compress the trained weights with torchao",
    "elasticity": "start with torchrun --nnodes=MIN:MAX; checkpoints load on any number of ranks",
    "env_report": "zcomm env prints versions, libraries and devices",
    "inference": _SERVING,
    "launcher": _LAUNCH,
    "model_implementations": _SERVING,
    "module_inject": _SERVING,
    "moe.layer": _MOE,
    "moe.sharded_moe": _MOE,
    "linear": "for LoRA use peft",
    "nebula": _BACKGROUND,
    "ops.aio": _BUILD,
    "ops.adam.ZenFlowCPUAdam": _ZENFLOW,
    "ops.adam.ZenFlowSelectiveAdamW": _ZENFLOW,
    "ops.adam.ZenFlowSelectiveAdamW_stage3": _ZENFLOW,
    "ops.op_builder": _BUILD,
    "ops.sparse_attention": "use torch.nn.attention.flex_attention",
    "ops.transformer": "use torch.nn.functional.scaled_dot_product_attention",
    "pipe": _PIPELINE,
    "profiling": _PROFILE,
    "profiling.flops_profiler": _PROFILE,
    "runtime.checkpoint_engine": _BACKGROUND,
    "runtime.comm": "collectives with fewer bytes are functions of zcomm",
    "runtime.data_pipeline": "choose samples and sequence lengths in the script's dataloader",
    "runtime.domino": _TENSOR,
    "runtime.fp16.onebit": _ONEBIT,
    "runtime.hybrid_engine": _GENERATE,
    "runtime.pipe": _PIPELINE,
    "runtime.rollout": _GENERATE,
    "runtime.tensor_parallel": _TENSOR,
    "runtime.zenflow": _ZENFLOW,
    "runtime.sequence_parallel": _SEQUENCE,
    "runtime.zero.mics": _MICS,
    "sequence": _SEQUENCE,
    "utils.groups": "process groups are torch's: pass mpu= to initialize()",
}
"""Packages of which other names do not exist here, and the remedy."""


def _modules() -> frozenset[str]:
    """Every module that can be imported, with the packages it is in."""
    held = [name.rpartition(".")[0] for name in ABSENT_NAMES]
    parts = (name.split(".") for name in [*NAMES, *FALLBACKS, *held])
    return frozenset({""} | {".".join(one[:count]) for one in parts for count in range(1, len(one) + 1)})


MODULES = _modules()
