"""``torchrun plain_ddp.py script.py ARGS``: runs a script of DeepSpeed's over torch's DistributedDataParallel.

For the column "beside DDP" of :mod:`tests.ecosystem.run`: names come from zero.compat, but the engine is torch alone,
so that the script's own line prints a loss that no part of ZeRO has touched.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zero
import zero.compat
from zero._optim.lr_schedulers import SCHEDULERS
from zero._ranks.distributed import DataParallel, RankDataLoader
from zero.compat.comm import get_local_rank


class PlainEngine:
    """DistributedDataParallel and a torch optimizer, by the names of an engine that scripts call."""

    def __init__(self, model: nn.Module, optimizer: Any, config: dict[str, Any], scheduler: Any) -> None:
        self.config, self.module = config, model
        dtypes = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16}
        self.dtype = next((dtypes[key] for key in dtypes if config.get(key, {}).get("enabled")), torch.float32)
        self.masters: dict[nn.Parameter, Tensor] = {}
        model.to(self.dtype)
        trained = [param for param in model.parameters() if param.requires_grad]
        self.wrapped = DistributedDataParallel(model, find_unused_parameters=True) if trained else model
        self.optimizer = optimizer or self._configured(trained)
        for group in self.optimizer.param_groups:
            group["params"] = [self._master(param) for param in group["params"]]
        section = config.get("scheduler")
        if scheduler is None and section is not None:
            scheduler = SCHEDULERS[section["type"]](self.optimizer, **section["params"])
        self.lr_scheduler = scheduler
        self.micro_steps, self.accumulation = 0, config.get("gradient_accumulation_steps", 1)
        self.device, self.local_rank = torch.device("cpu"), get_local_rank()
        self.tput_timer = SimpleNamespace(update_epoch_count=lambda: None)

    def _configured(self, trained: list[nn.Parameter]) -> torch.optim.Optimizer:
        section = self.config.get("optimizer")
        params = {} if section is None else dict(section["params"])
        if "betas" in params:
            params["betas"] = tuple(params["betas"])
        return torch.optim.AdamW(trained or [nn.Parameter(torch.zeros(1))], **{"weight_decay": 0.0, **params})

    def _master(self, param: nn.Parameter) -> Tensor:
        self.masters[param] = param.detach().float().clone()
        return self.masters[param]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["module"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapped(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        (loss / self.accumulation).backward()

    def step(self) -> None:
        self.micro_steps += 1
        if self.micro_steps % self.accumulation:
            return
        for param, master in self.masters.items():
            master.grad = None if param.grad is None else param.grad.float()
        if clipping := self.config.get("gradient_clipping", 1.0):
            nn.utils.clip_grad_norm_(list(self.masters.values()), clipping)
        self.optimizer.step()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        for param, master in self.masters.items():
            param.data.copy_(master)
            param.grad = None

    def bfloat16_enabled(self) -> bool:
        return self.dtype is torch.bfloat16

    def fp16_enabled(self) -> bool:
        return self.dtype is torch.float16

    def is_gradient_accumulation_boundary(self) -> bool:
        return (self.micro_steps + 1) % self.accumulation == 0

    def save_checkpoint(self, *_: Any, **__: Any) -> None:
        """Nothing: only losses are compared."""


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    collate_fn: Any = None,
    config: Any = None,
    config_params: Any = None,
    **_: Any,
) -> tuple[Any, Any, Any, Any]:
    """``deepspeed.initialize`` without ZeRO."""
    zero.init_distributed()
    source = next(one for one in (config, config_params, getattr(args, "deepspeed_config", None)) if one is not None)
    given = dict(source) if isinstance(source, dict) else json.loads(Path(source).read_text())
    assert model is not None
    engine = PlainEngine(model, optimizer, given, lr_scheduler)
    loader = None
    if training_data is not None:
        ranks = DataParallel(None)
        whole = torch.distributed.get_world_size() * engine.accumulation
        size = given.get("train_micro_batch_size_per_gpu") or given["train_batch_size"] // whole
        loader = RankDataLoader(training_data, ranks, batch_size=size, collate_fn=collate_fn)
    return engine, engine.optimizer, loader, engine.lr_scheduler


def main() -> None:
    """Run the script that the command line names."""
    zero.compat.as_deepspeed()
    import deepspeed

    deepspeed.initialize = initialize
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "--local_rank":
        sys.argv = [sys.argv[1], f"--local_rank={get_local_rank()}", *sys.argv[2:]]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
