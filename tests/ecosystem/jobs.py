"""Jobs of front ends as their users write them: transformers' Trainer, accelerate, peft, TRL.

    python tests/ecosystem/jobs.py OUT 2 plain trainer accelerate                    2 ranks, without DeepSpeed's names
    python -m zero.compat tests/ecosystem/jobs.py OUT 2 3 trainer -- 3 1 resumed     stage 3 on 2 ranks, then 1 on 3
    accelerate launch ... -m zero.compat tests/ecosystem/jobs.py OUT 2 launched accelerate

Rank 0 writes OUT/JOB-STAGE.json. Ranks are forks of this process, as what is imported above takes 4 s of a core; one
that a launcher has started runs the jobs itself. Nothing here imports zero or zcomm.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

VOCAB, LENGTH = 64, 16
STEPS, SAVED_AT = 50, 25
ON_CPU = {"use_cpu": True, "ddp_backend": "gloo"}
"""What a Trainer needs on several CPU ranks without DeepSpeed."""
AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
LR = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
WARMUP = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Rows of consecutive tokens from random starts."""

    def __init__(self, size: int) -> None:
        starts = torch.randint(0, VOCAB, (size, 1), generator=torch.Generator().manual_seed(1))
        self.rows = (starts + torch.arange(LENGTH)) % VOCAB

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def _gpt2() -> nn.Module:
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def _arguments(out: Path, stage: str, json_file: bool = False, **more: Any) -> TrainingArguments:  # noqa: FBT001
    config: Any = {**AUTO, "zero_optimization": {"stage": int(stage)}} if stage != "plain" else None
    if config is not None and json_file:  # its own optimizer and schedule, from a file
        config |= {
            "optimizer": {"type": "AdamW", "params": LR},
            "scheduler": {"type": "WarmupDecayLR", "params": WARMUP},
        }
        path = out / "ds.json"
        if int(os.environ["RANK"]) == 0:
            path.write_text(json.dumps(config))
        torch.distributed.barrier()
        config = str(path)
    return TrainingArguments(
        str(out), per_device_train_batch_size=4, learning_rate=1e-3, lr_scheduler_type="linear", logging_steps=1,
        gradient_accumulation_steps=2, report_to=[], disable_tqdm=True, deepspeed=config,
        **({"max_steps": STEPS} | more), **(ON_CPU if config is None else {}),
    )  # fmt: skip


def _losses(trainer: Trainer) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def trainer(out: Path, stage: str) -> dict[str, Any]:
    """50 steps with a save in the middle and evaluations; the weights at the end."""
    arguments = _arguments(out, stage, save_steps=SAVED_AT, eval_strategy="steps", eval_steps=SAVED_AT)
    made = Trainer(model=_gpt2(), args=arguments, train_dataset=Counting(400), eval_dataset=Counting(32))
    made.train()
    made.save_model(str(out / "final"))
    norms = [line["grad_norm"] for line in made.state.log_history if "loss" in line]
    evaluated = [line["eval_loss"] for line in made.state.log_history if "eval_loss" in line]
    return {"losses": _losses(made), "norms": norms, "evaluated": evaluated}


def resumed(out: Path, stage: str) -> dict[str, Any]:
    """The second half of :func:`trainer`, from its save, on any number of ranks."""
    first = next(path for path in sorted(out.parent.glob(f"trainer-*/checkpoint-{SAVED_AT}")) if path.is_dir())
    arguments = _arguments(out, stage, save_strategy="no")
    made = Trainer(model=_gpt2(), args=arguments, train_dataset=Counting(400), eval_dataset=Counting(32))
    evaluated: list[float] = []
    made.add_callback(_at_begin(lambda: evaluated.append(made.evaluate()["eval_loss"])))
    made.train(resume_from_checkpoint=str(first))
    return {"losses": _losses(made), "evaluated": evaluated}


def _at_begin(call: Any) -> Any:
    from transformers import TrainerCallback

    class Once(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            call()

    return Once()


def from_json(out: Path, stage: str) -> dict[str, Any]:
    """The optimizer and the schedule of a JSON file in which the Trainer fills in "auto"."""
    arguments = _arguments(out, stage, json_file=True, save_strategy="no", warmup_steps=5, max_steps=10)
    made = Trainer(model=_gpt2(), args=arguments, train_dataset=Counting(400))
    made.train()
    rates = [line["learning_rate"] for line in made.state.log_history if "loss" in line]
    return {"losses": _losses(made), "rates": rates}


def pretrained(out: Path, stage: str) -> dict[str, Any]:
    """from_pretrained, which builds under zero.Init at stage 3; generation by the trained model."""
    source = out / "llama"
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(source if int(os.environ["RANK"]) == 0 else out / "unused")
    arguments = _arguments(out, stage, save_strategy="no", max_steps=5)
    torch.distributed.barrier()
    model = AutoModelForCausalLM.from_pretrained(source)
    made = Trainer(model=model, args=arguments, train_dataset=Counting(400))
    made.train()
    prompt = torch.tensor([[5, 6, 7]])
    plain = made.model_wrapped.module if stage != "plain" else made.model
    tokens = plain.generate(prompt, max_new_tokens=6, do_sample=False, synced_gpus=stage == "3").tolist()
    return {"losses": _losses(made), "tokens": tokens, "is_sharded": hasattr(next(model.parameters()), "ds_id")}


def accelerate(out: Path, stage: str) -> dict[str, Any]:
    """A loop of accelerate's examples, with accumulation, a save in the middle, and its second half once more."""
    from accelerate import Accelerator, DeepSpeedPlugin

    steps = 2
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":  # accelerate launch has read its own file
        made = Accelerator()
    elif stage == "plain":
        made = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    else:
        plugin = DeepSpeedPlugin(zero_stage=int(stage), gradient_accumulation_steps=steps, gradient_clipping=0.5)
        made = Accelerator(deepspeed_plugin=plugin)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    data = torch.randn(128, 8)
    loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=8, shuffle=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 20))
    model, optimizer, loader, schedule = made.prepare(model, optimizer, loader, schedule)

    def epoch() -> list[float]:
        losses = []
        for inputs, targets in loader:
            with made.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                made.backward(loss)
                if made.sync_gradients:
                    made.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(made.reduce(loss.detach(), "mean").item())
        return losses

    losses = epoch() + epoch()
    made.save_state(str(out / "state"))
    after = epoch()
    made.load_state(str(out / "state"))
    again = epoch()
    made.wait_for_everyone()
    weights = made.get_state_dict(model)
    total = None if not weights else {name: value.double().sum().item() for name, value in weights.items()}
    ranks = [str(made.state.distributed_type), made.num_processes]
    return {"losses": losses + after, "again": again, "rate": schedule.get_last_lr(), "weights": total, "ranks": ranks}


def sft(out: Path, stage: str) -> dict[str, Any]:
    """TRL's SFTTrainer with a LoRA adapter of peft; the tokenizer is made from its text."""
    from datasets import Dataset as Rows
    from peft import LoraConfig
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    text = ["the quick brown fox jumps over the lazy dog", "a stitch in time saves nine"] * 40
    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    words.train_from_iterator(text, trainers.WordLevelTrainer(special_tokens=list(special.values())))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    config = {**AUTO, "zero_optimization": {"stage": int(stage)}} if stage != "plain" else None
    arguments = SFTConfig(
        str(out), per_device_train_batch_size=4, max_steps=10, logging_steps=1, learning_rate=1e-2, report_to=[],
        save_strategy="no", disable_tqdm=True, max_length=32, bf16=False, deepspeed=config,
        **(ON_CPU if config is None else {}),
    )  # fmt: skip
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    made = SFTTrainer(
        model=_gpt2(), args=arguments, train_dataset=Rows.from_dict({"text": text}), processing_class=tokenizer,
        peft_config=adapter,
    )  # fmt: skip
    made.train()
    made.save_model(str(out / "final"))
    return {"losses": _losses(made)}


JOBS = {job.__name__: job for job in (trainer, resumed, from_json, pretrained, accelerate, sft)}


def _forget() -> None:
    """Front ends keep their state in globals."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]


def _run(root: str, stage: str, names: list[str]) -> None:
    for name in names:
        set_seed(0)
        out = Path(root) / f"{name}-{stage}"
        out.mkdir(parents=True, exist_ok=True)
        result = JOBS[name](out, stage)
        if torch.distributed.get_rank() == 0:
            Path(root, f"{name}-{stage}.json").write_text(json.dumps(result))
        torch.distributed.barrier()
        _forget()


def _start(num_ranks: int, *arguments: Any) -> None:
    """Run the jobs on forks, with the environment that torchrun gives to ranks; all end when one fails."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    size = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= size | place | {"TORCHELASTIC_RUN_ID": "jobs", "TORCHELASTIC_RESTART_COUNT": "0"}
    started = torch.multiprocessing.start_processes(
        _as_rank, arguments, nprocs=num_ranks, join=False, start_method="fork"
    )
    while not started.join():
        pass


def _as_rank(rank: int, *arguments: Any) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    _run(*arguments)


def main() -> None:
    root, *groups = sys.argv[1:]
    torch.set_num_threads(1)
    for group in " ".join(groups).split(" -- "):
        num_ranks, stage, *names = group.split()
        if "RANK" in os.environ:
            _run(root, stage, names)
        else:
            _start(int(num_ranks), root, stage, names)


if __name__ == "__main__":
    main()
