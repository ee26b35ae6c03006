"""Pretrain GPT-2 with the launch flags of DeepSpeed's ZeRO tutorial, which are Megatron-LM's.

    torchrun --nproc-per-node 8 bench/pretrain_gpt2.py --model-parallel-size 1 --num-layers 48 --hidden-size 1600 \
        --num-attention-heads 16 --batch-size 1 --deepspeed_config ds_zero_stage_1.config
    torchrun --nproc-per-node 2 bench/pretrain_gpt2.py --deepspeed --deepspeed_config FILE --train-iters 20

The model is that of gpt_model.py, over bytes. As in GPT-2 the word embedding is also the output matrix; used outside
the embedding's forward, it is an external parameter of ZeRO-3. The JSON sets stage, precision, schedule and offload.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from gpt_model import GPT, GPTConfig, choose_matmul_dtype
from learning_rate import warmup_cosine
from text_data import Text, load_text, training_batch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import zcomm
import zero as deepspeed
from zero._ranks.distributed import local_device

PRECISIONS = {"fp16": torch.float16, "bf16": torch.bfloat16}
DEFAULT_BATCH = 4


def parse_arguments() -> argparse.Namespace:
    """Read the command line; exit if a flag is not supported."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_argument_group("model")
    model.add_argument("--num-layers", type=int, default=4)
    model.add_argument("--hidden-size", type=int, default=256)
    model.add_argument("--num-attention-heads", type=int, default=4)
    model.add_argument("--seq-length", type=int, default=128)
    model.add_argument("--max-position-embeddings", type=int, help="rows of the position table (default: seq-length)")
    model.add_argument("--model-parallel-size", type=int, default=1, help="1: ZeRO shards the model over all ranks")
    training = parser.add_argument_group("training")
    training.add_argument("--batch-size", type=int, help="sequences a rank and backward (default: the JSON's, or 4)")
    training.add_argument("--train-iters", type=int, default=100)
    training.add_argument("--lr", type=float, default=1.5e-4)
    training.add_argument("--weight-decay", type=float, default=0.01)
    training.add_argument("--seed", type=int, default=1234)
    training.add_argument("--data-path", type=Path, help="a file or folder (default: Python's standard library)")
    training.add_argument("--log-interval", type=int, default=1)
    memory = parser.add_argument_group("memory")
    memory.add_argument("--checkpoint-activations", action="store_true", help="keep one activation a layer")
    memory.add_argument(
        "--deepspeed-activation-checkpointing",
        action="store_true",
        help="the same, by deepspeed.checkpointing with the JSON's section activation_checkpointing",
    )
    memory.add_argument(
        "--zero-stage", type=int, choices=range(4), help="must equal the JSON's stage; 3 builds the model sharded"
    )
    memory.add_argument("--remote-device", choices=("none", "cpu", "nvme"), help="where zero.Init stores the shards")
    parser.add_argument("--local_rank", type=int, help="as launchers pass it")
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    if args.model_parallel_size != 1:
        parser.error(
            f"--model-parallel-size must be 1: got {args.model_parallel_size}. This script splits no layer; ZeRO "
            "stage 3 shards every layer over all ranks. For a model that is tensor-parallel itself pass mpu= to "
            "zero.initialize"
        )
    if args.deepspeed_config is None:
        parser.error("--deepspeed_config FILE is required: the JSON sets stage, precision and offload")
    return args


class GPT2(GPT):
    """The model with tied word embedding and optional activation checkpointing."""

    def __init__(self, config: GPTConfig, run_layer: Callable[[nn.Module, Tensor], Tensor]) -> None:
        """``run_layer`` calls a layer with its input."""
        super().__init__(config)
        del self.head
        self._run_layer = run_layer
        deepspeed.zero.register_external_parameter(self, self.token_embedding.weight)

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the scores [batch, seq, 256] of the byte after each of int64 ``tokens`` [batch, seq]."""
        x = self.token_embedding(tokens) + self.position_embedding(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = self._run_layer(block, x)
        x = self.final_norm(x)
        dtype = self.config.matmul_dtype or x.dtype
        return F.linear(x.to(dtype), self.token_embedding.weight.to(dtype))


def choose_layer_call(args: argparse.Namespace) -> Callable[[nn.Module, Tensor], Tensor]:
    """Return how to call a layer: directly, or through torch's checkpoint or zero's."""
    if args.deepspeed_activation_checkpointing:
        deepspeed.checkpointing.configure(None, deepspeed_config=args.deepspeed_config)
        return deepspeed.checkpointing.checkpoint
    if args.checkpoint_activations:
        return lambda layer, x: torch_checkpoint(layer, x, use_reentrant=False)
    return lambda layer, x: layer(x)


def build_model(args: argparse.Namespace, config: dict[str, Any]) -> GPT2:
    """Build the model from the seed, the same on every rank; with ``--zero-stage 3`` under zero.Init."""
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if args.zero_stage not in (None, stage):
        raise ValueError(f"--zero-stage must be the stage of {args.deepspeed_config}: {args.zero_stage} and {stage}")
    dtype = next((d for key, d in PRECISIONS.items() if config.get(key, {}).get("enabled")), torch.float32)
    shape = {name: getattr(args, name) for name in ("num_layers", "hidden_size", "num_attention_heads")}
    positions = args.max_position_embeddings or args.seq_length
    if positions < args.seq_length:
        raise ValueError(f"--max-position-embeddings must be at least --seq-length: {positions} and {args.seq_length}")
    torch.manual_seed(args.seed)
    with deepspeed.zero.Init(enabled=args.zero_stage == 3, dtype=dtype, remote_device=args.remote_device):
        matmul_dtype = choose_matmul_dtype(dtype, local_device(args))
        return GPT2(GPTConfig(**shape, seq_length=positions, matmul_dtype=matmul_dtype), choose_layer_call(args))


def choose_batch(args: argparse.Namespace, engine: Any) -> int:
    """Return the number of sequences per rank and backward."""
    of_json = engine.train_micro_batch_size_per_gpu()
    if None not in (args.batch_size, of_json) and args.batch_size != of_json:
        raise ValueError(
            f"--batch-size must equal the JSON's micro-batch size: batch_size={args.batch_size}, "
            f"train_micro_batch_size_per_gpu={of_json}; set only one of them"
        )
    return args.batch_size or of_json or DEFAULT_BATCH


def train(args: argparse.Namespace, engine: Any, text: Text) -> None:
    """Train, and print a line each ``--log-interval`` iterations on the first rank."""
    ranks, batch_size = engine.optimizer.topology, choose_batch(args, engine)
    num_micro, device = engine.gradient_accumulation_steps(), engine.device
    rows = slice(ranks.rank * batch_size, (ranks.rank + 1) * batch_size)
    for iteration in range(args.train_iters):
        start_s, losses = time.perf_counter(), torch.zeros(1, device=device)
        for micro in range(num_micro):
            batch = training_batch(
                text, step=iteration * num_micro + micro, seed=args.seed,
                batch_size=batch_size * ranks.world_size, seq_length=args.seq_length,
            )  # fmt: skip
            loss = engine(*(part[rows].to(device) for part in batch))
            engine.backward(loss)
            engine.step()
            losses += loss.detach().float() / num_micro
        if (iteration + 1) % args.log_interval == 0:
            zcomm.all_reduce(losses, "avg", group=ranks)
            if ranks.rank == 0:
                print(
                    f" iteration {iteration + 1:8d}/{args.train_iters:8d} | "
                    f"elapsed time per iteration (ms): {1e3 * (time.perf_counter() - start_s):.1f} | "
                    f"learning rate: {engine.get_lr()[0]:.3E} | lm loss: {losses.item():.8E} | "
                    f"loss scale: {engine.cur_scale:.1f} |",
                    flush=True,
                )


def main() -> None:
    """Build, train and close."""
    args = parse_arguments()
    deepspeed.init_distributed()
    config = json.loads(Path(args.deepspeed_config).read_text())
    text = load_text(args.data_path, max_bytes=8_000_000, seq_length=args.seq_length)
    model = build_model(args, config)

    def scheduler(optimizer: Any) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: warmup_cosine(step, args.train_iters))

    engine, *_ = deepspeed.initialize(
        args=args,
        model=model,
        optimizer=AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay),
        lr_scheduler=None if "scheduler" in config else scheduler,
    )
    train(args, engine, text)
    engine.destroy()


if __name__ == "__main__":
    main()
