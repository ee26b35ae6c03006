"""Scripts of DeepSpeed's users, and of front ends, that run through the door with no line changed."""

from __future__ import annotations

from typing import Any

from tests.ecosystem import material
from tests.ecosystem.case import Case

_ADAMW = {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}}
_ZENFLOW = {"topk_ratio": 0.1, "update_interval": 4, "full_warm_up_rounds": 0, "overlap_step": True}
_OFFLOAD = {"device": "cpu", "pin_memory": True}
_JSON: dict[str, Any] = {"bf16": {"enabled": True}, "zero_optimization": {}, "gradient_clipping": 1.0}
_QUANTIZED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
_AUTO = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "zero_optimization": {}, "bf16": {"enabled": "auto"},
}  # fmt: skip
_TRAINER = {"zero_allow_untested_optimizer": True, **_AUTO}
_CHAT = (
    "--data_path local/jsonfile --data_split {split} --model_name_or_path {folder}/opt --max_seq_len 64 "
    "--per_device_train_batch_size 4 --per_device_eval_batch_size 4 --num_train_epochs 2 --zero_stage {stage} "
    "--dtype bf16 --learning_rate 3e-3 --data_output_path {out}/data --seed 7 --dropout 0.0"
)


def _chat(name: str, folder: str, split: str, more: str, loss: str, **others: Any) -> Case:
    return Case(
        f"DeepSpeed-Chat, {name}", "DeepSpeedExamples", f"applications/DeepSpeed-Chat/training/{folder}", "main.py",
        loss, _CHAT.replace("{split}", split) + more, material=(material.opt, material.chat_data), local_rank=True,
        old_transformers=True, environment={"PYTHONPATH": "{root}/applications/DeepSpeed-Chat"}, **others,
    )  # fmt: skip


_LM = "--model_name_or_path {folder}/gpt2 --per_device_train_batch_size 4 --num_train_epochs 2 --seed 3 "
_ACCELERATE = {"ACCELERATE_USE_CPU": "true"}
_PLUGIN = {
    "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "{stage}",
    "ACCELERATE_GRADIENT_CLIPPING": "1.0",
}  # fmt: skip
_CLM = (
    "--model_name_or_path {folder}/gpt2 --train_file {folder}/text.txt --block_size 32 --do_train --max_steps 12 "
    "--per_device_train_batch_size 4 --learning_rate 3e-3 --logging_steps 1 --save_strategy no --use_cpu True "
    "--bf16 True --report_to none --output_dir {out} "
)
CASES = (
    Case(
        "cifar10_deepspeed.py, float32", "DeepSpeedExamples", "training/cifar", "cifar10_deepspeed.py",
        r"loss: +([0-9.]+)", "--dtype fp32 --stage {stage} --log-interval 1 -e 3 --deepspeed", stages=(0, 1, 2, 3),
        material=(material.torchvision,), beside="plain", note="stand-in for torchvision",
    ),
    Case(
        "cifar10_deepspeed.py, bfloat16", "DeepSpeedExamples", "training/cifar", "cifar10_deepspeed.py",
        r"loss: +([0-9.]+)", "--dtype bf16 --stage {stage} --log-interval 1 -e 3 --deepspeed",
        material=(material.torchvision,), beside="plain", note="stand-in for torchvision",
    ),
    Case(
        "HelloDeepSpeed/train_bert_ds.py", "DeepSpeedExamples", "training/HelloDeepSpeed", "train_bert_ds.py",
        r"Loss: ([0-9.]+)", "--checkpoint_dir {out} --num_layers 2 --num_heads 2 --ff_dim 64 --h_dim 32 "
        "--max_seq_length 64 --num_iterations 25 --log_every 1 --checkpoint_every 20", stages=(1,),
        material=(material.roberta_tokenizer, material.wikitext), beside="plain",
        needs=("fire", "loguru", "sh", "pytz", "tensorboard"), note="stage is the script's; saves checkpoints",
    ),
    Case(
        "DeepSpeed-SuperOffload/finetune_zero3.py", "DeepSpeedExamples", "training/DeepSpeed-SuperOffload",
        "finetune_zero3.py", r"- INFO - Step .*Loss: ([0-9.]+)", "--model_name {folder}/llama --lr 1e-3 --batch_size 4 "
        "--output_dir {out} --attn_implementation sdpa --max_length 64 --bench_steps 10 --activation_checkpointing "
        "--deepspeed_config {config}", material=(material.llama, material.alpaca), beside="plain", needs=("wandb",),
        config={**_JSON, "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"offload_optimizer": _OFFLOAD}},
        formats=_QUANTIZED, note="Adam on the host",
    ),
    Case(
        "DeepSpeed-ZenFlow/finetune_llama.py, without its zenflow section", "DeepSpeedExamples",
        "training/DeepSpeed-ZenFlow/finetuning", "finetune_llama.py", r"Loss: ([0-9.]+)",
        "--model_name {folder}/llama --lr 1e-3 --batch_size 4 --output_dir {out} --num_train_epochs 1 "
        "--deepspeed_config {config}", material=(material.llama, material.alpaca), ranks=1, beside="plain",
        config={**_JSON, "train_batch_size": 8, "optimizer": _ADAMW}, note="one rank: it saves on rank 0 only",
    ),
    Case(
        "DeepSpeed-ZenFlow/finetune_llama.py, as shipped", "DeepSpeedExamples",
        "training/DeepSpeed-ZenFlow/finetuning", "finetune_llama.py", r"Loss: ([0-9.]+)",
        "--model_name {folder}/llama --lr 1e-3 --batch_size 4 --output_dir {out} --num_train_epochs 1 "
        "--deepspeed_config {config}", material=(material.llama, material.alpaca), ranks=1, stages=(2,),
        config={**_JSON, "train_batch_size": 8, "optimizer": _ADAMW,
                "zero_optimization": {"zenflow": _ZENFLOW, "offload_optimizer": _OFFLOAD}},
    ),
    Case(
        "tensor_parallel/hf_integration/train.py (Trainer)", "DeepSpeedExamples",
        "training/tensor_parallel/hf_integration", "train.py", r"'loss': '?([0-9.]+)",
        "--model_name_or_path {folder}/gpt2 --data_path alpaca_data.json --output_dir {out} --max_steps 12 "
        "--per_device_train_batch_size 4 --learning_rate 3e-3 --logging_steps 1 --save_strategy no --bf16 True "
        "--use_cpu True --deepspeed {config}", material=(material.gpt2, material.alpaca), config=_TRAINER, beside="own",
        own_arguments="--model_name_or_path {folder}/gpt2 --data_path alpaca_data.json --output_dir {out} "
        "--max_steps 12 --per_device_train_batch_size 4 --learning_rate 3e-3 --logging_steps 1 --save_strategy no "
        "--bf16 True --use_cpu True", own_uses_door=True, formats=_QUANTIZED,
    ),
    Case(
        "benchmarks/deepcompile/run_bench_lm.py (accelerate)", "DeepSpeedExamples", "benchmarks/deepcompile",
        "run_bench_lm.py", r"Loss: ([0-9.]+)", "--model_name tiny/gpt2 --batch_size 4 --seq_length 32 "
        "--learning_rate 3e-3 --bench_step 12 --warmup_step 2 --zero_stage {stage} --attn_impl sdpa",
        material=(material.gpt2_in_folder, material.ag_news), environment=_PLUGIN, beside="own",
        own_arguments="--model_name tiny/gpt2 --batch_size 4 --seq_length 32 --learning_rate 3e-3 --bench_step 12 "
        "--warmup_step 2 --attn_impl sdpa", own_environment=_ACCELERATE,
    ),
    _chat("SFT", "step1_supervised_finetuning", "10,0,0", " --print_loss", r"Rank: 0, loss = ([0-9.]+)",
          beside="plain"),
    _chat("LoRA", "step1_supervised_finetuning", "10,0,0",
          " --print_loss --lora_dim 4 --lora_module_name decoder.layers. --only_optimize_lora --lora_learning_rate "
          "3e-2", r"Rank: 0, loss = ([0-9.]+)"),
    _chat("reward model", "step2_reward_model_finetuning", "0,10,0", "", r"with loss ([0-9.]+)",
          beside="plain"),
    _chat("DPO", "step2_dpo_finetuning", "0,10,0", " --print_loss", r"Rank: 0, loss = ([0-9.]+)",
          beside="plain"),
    Case(
        "DeepSpeed-Chat, RLHF", "DeepSpeedExamples",
        "applications/DeepSpeed-Chat/training/step3_rlhf_finetuning", "main.py", r"Critic Loss: ([0-9.]+)",
        "--data_path local/jsonfile --data_split 0,0,10 --actor_model_name_or_path {folder}/opt "
        "--critic_model_name_or_path {folder}/critic --num_padding_at_beginning 1 --actor_zero_stage {stage} "
        "--critic_zero_stage {stage} --per_device_generation_batch_size 4 --per_device_training_batch_size 4 "
        "--max_prompt_seq_len 48 --max_answer_seq_len 8 --dtype bf16 --data_output_path {out}/data --seed 7 "
        "--actor_dropout 0.0 --critic_learning_rate 1e-3 --enable_test_mode --test_stop_step 8",
        material=(material.opt, material.critic, material.chat_data), local_rank=True, old_transformers=True,
        environment={"PYTHONPATH": "{root}/applications/DeepSpeed-Chat"}, falls=False,
        note="loss of the critic; generates between steps",
    ),
    Case(
        "benchmarks/communication/run_all.py", "DeepSpeedExamples", "benchmarks/communication", "run_all.py",
        r"(----)", "--device cpu --scan --maxsize 4", stages=(0,), falls=False,
        note="runs every collective; prints no loss",
    ),
    Case(
        "accelerate deepspeed_with_config_support.py", "accelerate", "examples/by_feature",
        "deepspeed_with_config_support.py", r"(?:eval_loss|train_loss|loss)[^0-9]*([0-9]+[.][0-9]+)",
        _LM + "--train_file {folder}/text.txt --validation_file {folder}/text.txt --block_size 32 "
        "--learning_rate 3e-3 --output_dir {out}", material=(material.gpt2, material.text_file),
        environment={"ACCELERATE_USE_DEEPSPEED": "true",
                     "ACCELERATE_DEEPSPEED_CONFIG_FILE": "{config}", "ACCELERATE_MIXED_PRECISION": "bf16"},
        config={**_AUTO, "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {
            "lr": "auto", "weight_decay": "auto"}}, "scheduler": {"type": "WarmupDecayLR", "params": {
                "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto",
                "total_num_steps": "auto"}}},
    ),
    Case(
        "transformers run_clm.py (Trainer)", "transformers", "examples/pytorch/language-modeling", "run_clm.py",
        r"'loss': '?([0-9.]+)", _CLM + "--deepspeed {config}", material=(material.gpt2, material.text_file),
        config=_TRAINER, beside="own", own_arguments=_CLM, formats=_QUANTIZED, needs=("evaluate",),
    ),
)  # fmt: skip
