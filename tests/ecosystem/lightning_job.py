"""A LightningModule under the Trainer, as its users write it.

    DEVICES=2 torchrun --nproc-per-node 2 tests/ecosystem/lightning_job.py OUT ddp fit -- 3 fit resumed
    DEVICES=2 python tests/ecosystem/lightning_job.py OUT 2 launched       Lightning starts the ranks

"ddp" is DDPStrategy, a number ZeroStrategy(stage=number). Rank 0 writes OUT/JOB-STAGE.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zcomm
import zero

BATCHES = 12
"""Of a rank of two, in each of two epochs. A step has two batches."""


class Regression(LightningModule):
    """Two layers, and a scale that the module itself holds and uses outside of any forward."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1))
        self.scale = nn.Parameter(torch.ones(1))
        self.losses: list[float] = []

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)

    def _loss(self, batch: list[Tensor]) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self(inputs) * self.scale, targets)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss = self._loss(batch)
        self.losses.append(self.trainer.strategy.reduce(loss.detach().clone()).item())
        return loss

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        self.log("validation", self._loss(batch), sync_dist=True)

    def test_step(self, batch: list[Tensor], _: int) -> None:  # noqa: PT019
        self.log("test", self._loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Manual(Regression):
    """The same training, in a loop of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = super().training_step(batch, index)
        optimizer = self.optimizers()
        self.manual_backward(loss / 2)
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()
        return loss


class Deferred(Regression):
    """Its layers are built by configure_model, where the strategy shards them at once."""

    def __init__(self) -> None:
        super().__init__(width=32)
        self.layers = nn.Identity()
        self.was_sharded = False

    def configure_model(self) -> None:
        if isinstance(self.layers, nn.Identity):
            torch.manual_seed(3)
            self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
            self.was_sharded = self.layers[0].weight.numel() == 0 or hasattr(self.layers[0].weight, "zero_shard")


class Two(Regression):
    """With two optimizers."""

    def configure_optimizers(self) -> Any:
        self.automatic_optimization = False
        halves = self.layers[0].parameters(), self.layers[2].parameters()
        return [torch.optim.SGD(half, lr=0.1) for half in halves]


def _data(seed: int) -> DataLoader[Any]:
    made = torch.Generator().manual_seed(seed)
    inputs = torch.randn(BATCHES * 2 * 4, 8, generator=made)
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=True)


def _strategy(stage: str) -> Any:
    if stage == "ddp":
        return "ddp"
    return zero.integrations.ZeroStrategy(stage=int(stage))


def _trainer(out: Path, stage: str, **more: Any) -> Trainer:
    options: dict[str, Any] = {
        "accelerator": "cpu", "devices": int(os.environ["DEVICES"]), "max_epochs": 2, "logger": False,
        "accumulate_grad_batches": 2, "gradient_clip_val": 0.3, "enable_progress_bar": False,
        "enable_model_summary": False, "num_sanity_val_steps": 1, "default_root_dir": str(out),
        "enable_checkpointing": False, "strategy": _strategy(stage),
    }  # fmt: skip
    return Trainer(**(options | more))


def fit(out: Path, stage: str) -> dict[str, Any]:
    """Two epochs with validation, a checkpoint after each and one at the end, tests and a full state dict."""
    kept = ModelCheckpoint(out / "kept", save_on_train_epoch_end=True, save_top_k=-1, filename="{epoch}")
    trainer = _trainer(out, stage, callbacks=[kept], enable_checkpointing=True)
    model = Regression()
    trainer.fit(model, _data(1), _data(2))
    validated = trainer.validate(model, _data(2), verbose=False)[0]["validation"]
    tested = trainer.test(model, _data(3), verbose=False)[0]["test"]
    trainer.save_checkpoint(out / "end.ckpt")
    total = {name: value.double().sum().item() for name, value in model.state_dict().items()}
    rate = trainer.lr_scheduler_configs[0].scheduler.get_last_lr()
    return {"losses": model.losses, "validated": validated, "tested": tested, "weights": total, "rate": rate}


def resumed(out: Path, stage: str) -> dict[str, Any]:
    """The second epoch of :func:`fit`, from its checkpoint after the first, on any number of ranks."""
    trainer, model = _trainer(out, stage), Regression()
    trainer.fit(model, _data(1), _data(2), ckpt_path=_saved(out, stage) / "kept" / "epoch=0.ckpt")
    return {"losses": model.losses, "step": trainer.global_step}


def evaluated(out: Path, stage: str) -> dict[str, Any]:
    """A test of what :func:`fit` has saved at its end, without a fit; a fit of the same module after it."""
    trainer, model = _trainer(out, stage, max_steps=2), Regression()
    path = _saved(out, stage) / "end.ckpt"
    tested = trainer.test(model, _data(3), ckpt_path=path, verbose=False)[0]["test"]
    trainer.fit(model, _data(1))
    return {"tested": tested, "losses": model.losses}


def _saved(out: Path, stage: str) -> Path:
    """Where :func:`fit` has saved, at stage 3 for every stage."""
    return out.parent / ("fit-ddp" if stage == "ddp" else "fit-3")


def manual(out: Path, stage: str) -> dict[str, Any]:
    """Manual optimization, without clipping."""
    trainer, model = _trainer(out, stage, accumulate_grad_batches=1, gradient_clip_val=None, max_epochs=1), Manual()
    trainer.fit(model, _data(1))
    return {"losses": model.losses}


def deferred(out: Path, stage: str) -> dict[str, Any]:
    """A module that is built in configure_model."""
    trainer, model = _trainer(out, stage, max_epochs=1), Deferred()
    trainer.fit(model, _data(1))
    return {"losses": model.losses, "was_sharded": model.was_sharded}


def half(out: Path, stage: str) -> dict[str, Any]:
    """float16 with a loss scale, in a loop of the module's own."""
    strategy = zero.integrations.ZeroStrategy(stage=int(stage), fp16={"enabled": True, "initial_scale_power": 8})
    options = {"accumulate_grad_batches": 1, "gradient_clip_val": None, "precision": "16-true"}
    trainer, model = _trainer(out, stage, strategy=strategy, **options), Manual()
    trainer.fit(model, _data(1))
    return {"losses": model.losses, "scale": strategy.zero_optimizer.loss_scale.scale}


def launched(out: Path, stage: str) -> dict[str, Any]:
    """A step on ranks that Lightning has started."""
    trainer, model = _trainer(out, stage, max_steps=1), Regression()
    trainer.fit(model, _data(1))
    return {"losses": model.losses, "ranks": trainer.world_size}


def refused(out: Path, stage: str) -> dict[str, Any]:
    """What cannot be trained, or loaded."""
    errors = []
    torch.save({}, out / f"{os.environ['RANK']}.ckpt")
    for model, options, path in (
        (Two(), {"accumulate_grad_batches": 1, "gradient_clip_val": None}, None),
        (Regression(), {"gradient_clip_algorithm": "value"}, None),
        (Regression(), {}, out / "0.ckpt"),
    ):
        try:
            _trainer(out, stage, **options).fit(model, _data(1), ckpt_path=path)
        except zcomm.ZcommError as error:
            errors.append(f"{type(error).__name__}: {error}")
    return {"errors": errors}


def installed(out: Path, stage: str) -> dict[str, Any]:
    """DDP with quantized gradients."""
    callback, model = zero.integrations.InstallDDP("zeropp", overrides={"layers.2": "none"}), Regression(512)
    _trainer(out, stage, callbacks=[callback], max_epochs=1).fit(model, _data(1))
    report = callback.installation.report()
    is_installed = callback.installation.is_installed
    return {"losses": model.losses, "saved": sum(report.sent) / sum(report.plain), "is_installed": is_installed}


JOBS = {j.__name__: j for j in (fit, resumed, evaluated, manual, deferred, half, launched, refused, installed)}


def _run(root: Path, stage: str, name: str) -> None:
    seed_everything(0, verbose=False)
    out = root / f"{name}-{stage}"
    out.mkdir(parents=True, exist_ok=True)
    result = JOBS[name](out, stage)
    if torch.distributed.get_rank() == 0:
        (root / f"{name}-{stage}.json").write_text(json.dumps(result))
    torch.distributed.barrier()


def main() -> None:
    root, *groups = sys.argv[1:]
    torch.set_num_threads(1)
    for group in " ".join(groups).split(" -- "):
        stage, *names = group.split()
        for name in names:
            _run(Path(root), stage, name)


if __name__ == "__main__":
    main()
