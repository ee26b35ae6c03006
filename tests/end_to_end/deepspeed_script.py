"""The training script of DeepSpeed's tutorials with one import changed, a small model and this repository's text.

test_deepspeed_script.py runs it. At its end it writes the values that the test checks, as JSON.
"""

import json
from argparse import ArgumentParser
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim import Adam
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import zero as deepspeed
from zero._storage.transfer_counters import moved

torch.set_num_threads(1)
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=2))

parser = ArgumentParser()
parser.add_argument("--deepspeed_config", default="zero_dp_config.json", type=str)
parser.add_argument("--local_rank", default=0, type=int)
parser.add_argument("--output", type=str)
parser.add_argument("--steps", default=30, type=int)
args = parser.parse_args()

optimizer = Adam(model.parameters(), lr=3e-5, weight_decay=3e-7)

engine, optimizer, _, scheduler = deepspeed.initialize(args=args, model=model, optimizer=optimizer)

text = (Path(__file__).parents[2] / "README.md").read_bytes()
datasets = [text[i : i + 64] for i in range(0, len(text) - 64, 16)]
data_loader = DataLoader(datasets, batch_size=8, collate_fn=lambda rows: torch.tensor([list(row) for row in rows]))

rows = []
movements = ExitStack().enter_context(moved())
for i, data in enumerate(data_loader):
    tokens = data.to(engine.device)

    loss = engine(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens).loss

    scale = engine.cur_scale
    engine.backward(loss)
    engine.step()

    rows.append({"loss": loss.item(), "scale": scale, "applied": engine.was_step_applied(), "lr": engine.get_lr()[0]})
    if i % 10 == 0 and dist.get_rank() == 0:
        print(f"step:{i}, loss:{loss}")  # noqa: T201

    if i >= args.steps:
        break

report = {
    "rows": rows,
    "effective": str(optimizer.effective),
    "skipped": engine.skipped_steps,
    "moved": {f"{key.kind} {key.link}": count.bytes for key, count in movements.counts.items()},
    "shards": optimizer.memory().shards,
    "numel": sum(p.zero_shard.shape.numel() for p in model.parameters()),
    "files": [str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()],
}
Path(f"{args.output}-{dist.get_rank()}.json").write_text(json.dumps(report))
