"""Scripts in which a few lines are changed: ``install_ddp``, ``install_fsdp2``, ``ZeroOptimizer``, a strategy of ours.

Those of accelerate run through the door as well, with no line of ours.
"""

from __future__ import annotations

from typing import Any

from tests.ecosystem import material
from tests.ecosystem.case import Case, Change

_PLAIN = 'zcomm.Recipe(weights="none", gradients=("none", "none"), reduced="none")'
"""Our transport without formats."""
_QUANTIZED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}


def _imports(file: str, module: str) -> Change:
    return Change(file, "import torch\n", f"import torch\nimport {module}\n")


def _without_formats(file: str, call: str, model: str = "model") -> tuple[Change, ...]:
    return (Change(file, f"zcomm.{call}({model})", f"zcomm.{call}({model}, {_PLAIN})"),)


def _with_formats(file: str) -> tuple[Change, ...]:
    return (Change(file, "stage={stage})", "stage={stage}, quantized_weights=True, quantized_gradients=True)"),)


# nanoGPT and minGPT
_NANO = (
    "--dataset=made --device=cpu --backend=gloo --compile=False --dtype=float32 --n_layer=2 --n_head=2 --n_embd=32 "
    "--block_size=32 --batch_size=8 --gradient_accumulation_steps=2 --max_iters=20 --lr_decay_iters=20 "
    "--warmup_iters=2 --learning_rate=1e-2 --eval_interval=1000 --eval_iters=1 --log_interval=1 --dropout=0.0 "
    "--out_dir={out}"
)
_NANO_EVERYWHERE = (
    Change("train.py", "    device = f'cuda:{ddp_local_rank}'\n", "    device = 'cpu'\n"),
    Change("train.py", "    torch.cuda.set_device(device)\n", ""),
    Change("train.py", "device_ids=[ddp_local_rank]", "device_ids=None"),
)
_NANO_WRAP = "    model = DDP(model, device_ids=None)\n"
_NANO_INSTALL = (
    _imports("train.py", "zcomm"),
    Change("train.py", _NANO_WRAP, f"{_NANO_WRAP}    zcomm.install_ddp(model)\n"),
)
_NANO_ZERO = (
    _imports("train.py", "zero"),
    Change("train.py", _NANO_WRAP, "    optimizer = zero.ZeroOptimizer(model, optimizer, stage={stage})\n"),
    Change("train.py", "raw_model = model.module if ddp else model ", "raw_model = model "),
    Change(
        "train.py", "torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)",
        "optimizer.clip_grad_norm_(grad_clip)",
    ),
)  # fmt: skip
_MIN_TRAINER = "../../mingpt/trainer.py"
_MIN_OPTIMIZER = "        self.optimizer = model.configure_optimizers(config)\n"
_MIN_SEED = "    set_seed(config.system.seed)\n"
_MIN_EVERYWHERE = (
    Change("adder.py", _MIN_SEED, f"    torch.distributed.init_process_group('gloo')\n{_MIN_SEED}"),
    Change(
        _MIN_TRAINER, "num_samples=int(1e10)),",
        "num_samples=int(1e10), generator=torch.Generator().manual_seed(torch.distributed.get_rank())),",
    ),
)  # fmt: skip
_MIN_ZERO = (
    _imports(_MIN_TRAINER, "zero"),
    Change(
        _MIN_TRAINER, _MIN_OPTIMIZER,
        "        self.optimizer = zero.ZeroOptimizer(model, model.configure_optimizers(config), stage={stage})\n",
    ),
    Change(
        _MIN_TRAINER, "torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_norm_clip)",
        "self.optimizer.clip_grad_norm_(config.grad_norm_clip)",
    ),
)  # fmt: skip
_MIN_WRAP = f"{_MIN_OPTIMIZER}        model = torch.nn.parallel.DistributedDataParallel(model)\n"
_GPTS = (
    Case(
        "nanoGPT train.py, install_ddp", "nanoGPT", ".", "train.py", r"^iter \d+: loss ([0-9.]+)", _NANO,
        stages=("DDP",), material=(material.characters,), everywhere=_NANO_EVERYWHERE, changes=_NANO_INSTALL,
        uncompressed=_without_formats("train.py", "install_ddp"), beside="own",
    ),
    Case(
        "nanoGPT train.py, ZeroOptimizer", "nanoGPT", ".", "train.py", r"^iter \d+: loss ([0-9.]+)", _NANO,
        stages=(2,), material=(material.characters,), everywhere=_NANO_EVERYWHERE, changes=_NANO_ZERO,
        compressed=_with_formats("train.py"), beside="own", note="it evaluates on rank 0 alone: not for stage 3",
    ),
    Case(
        "minGPT projects/adder/adder.py, ZeroOptimizer", "minGPT", "projects/adder", "adder.py",
        r"train loss ([0-9.]+)", "--data.ndigit=1 --trainer.max_iters=121 --trainer.num_workers=0 "
        "--trainer.device=cpu --system.work_dir=\"'{out}'\"", environment={"PYTHONPATH": "{root}"},
        everywhere=_MIN_EVERYWHERE, changes=_MIN_ZERO,
        own_changes=(Change(_MIN_TRAINER, _MIN_OPTIMIZER, _MIN_WRAP),), compressed=_with_formats(_MIN_TRAINER),
        beside="own",
    ),
)  # fmt: skip

# pytorch/examples
_MNIST_SEED, _MNIST_MODEL = "    torch.manual_seed(args.seed)\n", "    model = Net().to(device)\n"
_MNIST_WRAP = "    model = nn.parallel.DistributedDataParallel(Net().to(device))\n"
_MNIST_OPTIMIZER = "optim.Adadelta(model.parameters(), lr=args.lr)"
_MNIST_EVERYWHERE = (
    Change("main.py", _MNIST_SEED, f"{_MNIST_SEED}    torch.distributed.init_process_group('gloo')\n"),
    Change(
        "main.py", "DataLoader(dataset1,**train_kwargs)",
        "DataLoader(dataset1, sampler=torch.utils.data.DistributedSampler(dataset1), **train_kwargs)",
    ),
)  # fmt: skip
_MNIST_ZERO = (
    _imports("main.py", "zero"),
    Change("main.py", _MNIST_OPTIMIZER, f"zero.ZeroOptimizer(model, {_MNIST_OPTIMIZER}, stage={{stage}})"),
)
_MNIST_INSTALL = (
    _imports("main.py", "zcomm"),
    Change("main.py", _MNIST_MODEL, f"{_MNIST_WRAP}    zcomm.install_ddp(model)\n"),
)


def _mnist(how: str, **others: Any) -> Case:
    return Case(
        f"pytorch/examples mnist/main.py, {how}", "examples", "mnist", "main.py", r"Loss: ([0-9.]+)",
        "--epochs 4 --batch-size 32 --log-interval 1 --no-accel", material=(material.torchvision,),
        everywhere=_MNIST_EVERYWHERE, own_changes=(Change("main.py", _MNIST_MODEL, _MNIST_WRAP),), beside="own",
        note="stand-in for torchvision", **others,
    )  # fmt: skip


_SERIES = "multigpu_torchrun.py"
_SERIES_WRAP = "        self.model = DDP(self.model, device_ids=None)\n"
_SERIES_EVERYWHERE = (
    Change(_SERIES, '    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n', ""),
    Change(_SERIES, 'backend="nccl"', 'backend="gloo"'),
    Change(_SERIES, "model.to(self.gpu_id)", "model"),
    Change(_SERIES, "device_ids=[self.gpu_id]", "device_ids=None"),
    Change(_SERIES, "source.to(self.gpu_id)", "source"),
    Change(_SERIES, "targets.to(self.gpu_id)", "targets"),
    Change(_SERIES, "        loss.backward()\n", '        loss.backward()\n        print("loss", loss.item())\n'),
)
_SERIES_INSTALL = (
    _imports(_SERIES, "zcomm"),
    Change(_SERIES, _SERIES_WRAP, f"{_SERIES_WRAP}        zcomm.install_ddp(self.model)\n"),
)
_FULLY_SHARD = "    fully_shard(model, **fsdp_kwargs)\n"
_FSDP2_LOSS = "        loss = model(x).sum()\n"
_FSDP2_EVERYWHERE = (
    Change("example.py", "return has_gpu and gpu_count >= min_gpus", "return True"),
    Change("example.py", "backend=backend, device_id=device", "backend=backend"),
    Change(
        "example.py", "        model.reset_parameters()\n",
        '        model.apply(lambda one: getattr(one, "reset_parameters", lambda: None)())\n',
    ),
    Change("example.py", _FSDP2_LOSS, f'{_FSDP2_LOSS}        print("loss", loss.item())\n'),
)  # fmt: skip
_FSDP2_INSTALL = (
    _imports("example.py", "zcomm"),
    Change("example.py", _FULLY_SHARD, f"{_FULLY_SHARD}    zcomm.install_fsdp2(model)\n"),
)
_EXAMPLES = (
    _mnist("ZeroOptimizer", changes=_MNIST_ZERO, compressed=_with_formats("main.py")),
    _mnist(
        "install_ddp", stages=("DDP",), changes=_MNIST_INSTALL, uncompressed=_without_formats("main.py", "install_ddp")
    ),
    Case(
        "pytorch/examples ddp-tutorial-series/multigpu_torchrun.py, install_ddp", "examples",
        "distributed/ddp-tutorial-series", _SERIES, r"^loss (-?[0-9.]+)", "2 1", stages=("DDP",),
        everywhere=_SERIES_EVERYWHERE, changes=_SERIES_INSTALL,
        uncompressed=_without_formats(_SERIES, "install_ddp", "self.model"), beside="own",
        falls=False, note="its loss, a cross entropy over one class, is always 0; 21 parameters, sent as they are",
    ),
    Case(
        "pytorch/examples FSDP2/example.py, install_fsdp2", "examples", "distributed/FSDP2", "example.py",
        r"^loss (-?[0-9.]+)", stages=("FSDP2",), everywhere=_FSDP2_EVERYWHERE, changes=_FSDP2_INSTALL,
        uncompressed=_without_formats("example.py", "install_fsdp2"), beside="own",
        note="its loss is a sum of logits; it leaves its layers without values",
    ),
)  # fmt: skip

# accelerate, and what uses it
_CPU = {"ACCELERATE_USE_CPU": "true"}
_PLUGIN = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "{config}"}
_JSON: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 8, "zero_allow_untested_optimizer": True, "zero_optimization": {},
}  # fmt: skip
_TRAIN = "    # Now we train the model\n"
_BACKWARD = "            accelerator.backward(loss)\n"
_PRINTED = f'            accelerator.print("loss", loss.item())\n{_BACKWARD}'
_ACCELERATOR = "mixed_precision=args.mixed_precision)"
_ONE_STEP = "mixed_precision=args.mixed_precision, step_scheduler_with_optimizer=False)"
"""Else a schedule advances by the number of ranks at each step, but not under DeepSpeed."""
_CV = (
    Change("cv_example.py", _ACCELERATOR, _ONE_STEP),
    Change(
        "cv_example.py",
        '"lr": 3e-2, "num_epochs": 3, "seed": 42, "batch_size": 64, "image_size": 224',
        '"lr": 3e-3, "num_epochs": 3, "seed": 42, "batch_size": 8, "image_size": 64',
    ),
    Change("cv_example.py", "pretrained=True", "pretrained=False"),
    Change("cv_example.py", _BACKWARD, _PRINTED),
)
_NLP = (Change("nlp_example.py", '"lr": 2e-5', '"lr": 1e-2'), Change("nlp_example.py", _BACKWARD, _PRINTED))


def _of_accelerate(name: str, everywhere: tuple[Change, ...], arguments: str, *made: Any) -> tuple[Case, Case]:
    """Through the door, and with install_ddp."""
    shared: dict[str, Any] = {
        "source": "accelerate", "folder": "examples", "script": name, "loss": r"^loss ([0-9.]+)", "beside": "own",
        "arguments": arguments, "material": made, "everywhere": everywhere, "own_environment": _CPU,
        "needs": ("timm",) if name == "cv_example.py" else ("evaluate",),
    }  # fmt: skip
    lines = (_imports(name, "zcomm"), Change(name, _TRAIN, f"    zcomm.install_ddp(model)\n{_TRAIN}"))
    return (
        Case(f"accelerate {name}", environment=_PLUGIN, config=_JSON, formats=_QUANTIZED, **shared),
        Case(
            f"accelerate {name}, install_ddp", environment=_CPU, stages=("DDP",), changes=lines,
            uncompressed=_without_formats(name, "install_ddp"), **shared,
        ),
    )  # fmt: skip


_LIBRARY = "denoising_diffusion_pytorch/denoising_diffusion_pytorch.py"
_PREPARE = "        self.model, self.opt = self.accelerator.prepare(self.model, self.opt)\n"
_README = "readme.py"
_FROM = "from denoising_diffusion_pytorch import"
_DIFFUSION: dict[str, Any] = {
    "source": "denoising-diffusion-pytorch", "folder": ".", "script": _README, "loss": r"loss: ([0-9.]+)",
    "material": (material.images, material.readme_trainer, material.torchvision_without_operators),
    "everywhere": (
        Change(_README, _FROM, f"import torch; torch.manual_seed(0)\n{_FROM}"),
        Change(_README, "dim = 64,", "dim = 8,"),
        Change(_README, "dim_mults = (1, 2, 4, 8)", "dim_mults = (1, 2)"),
        Change(_README, "image_size = 128", "image_size = 16"),
        Change(_README, "path/to/your/images", "photos"),
        Change(_README, "train_batch_size = 32", "train_batch_size = 16"),
        Change(_README, "train_lr = 8e-5", "train_lr = 3e-3"),
        Change(_README, "train_num_steps = 700000", "train_num_steps = 24"),
        Change(_README, "gradient_accumulate_every = 2", "gradient_accumulate_every = 1"),
        Change(_README, "amp = True", "amp = False"),
        Change(_README, "calculate_fid = True", "calculate_fid = False"),
    ),
    "beside": "own", "own_environment": _CPU, "needs": ("ema_pytorch",),
}  # fmt: skip
_OF_ACCELERATE = (
    *_of_accelerate("nlp_example.py", _NLP, "", material.bert_base_cased, material.mrpc),
    *_of_accelerate(
        "cv_example.py", _CV, "--data_dir photos", material.images, material.torchvision_without_operators
    ),
    Case(
        "denoising-diffusion-pytorch, its README's Trainer", environment=_PLUGIN, config=_JSON, formats=_QUANTIZED,
        **_DIFFUSION,
    ),
    Case(
        "denoising-diffusion-pytorch, its README's Trainer, install_ddp", environment=_CPU, stages=("DDP",),
        changes=(_imports(_LIBRARY, "zcomm"), Change(
            _LIBRARY, _PREPARE, f"{_PREPARE}        zcomm.install_ddp(self.model)\n"
        )),
        uncompressed=_without_formats(_LIBRARY, "install_ddp", "self.model"), **_DIFFUSION,
    ),
)  # fmt: skip

# timm, Lightning, TRL
_TIMM_WRAP = "broadcast_buffers=not args.no_ddp_bb)\n        model = task.get_trainable_module()\n"
_LIT_TRAINER = "L.Trainer(gradient_clip_val=0.25, max_epochs=2, accelerator='cpu', devices=2"
_LIT_LOG = '        self.log("train_loss", loss, prog_bar=True)\n'
_SFT = (
    "--model_name_or_path {folder}/gpt2 --dataset_name {folder}/sft --use_peft --lora_r 4 "
    "--lora_target_modules c_attn c_fc --learning_rate 1e-2 --per_device_train_batch_size 4 --max_steps 12 "
    "--logging_steps 1 --report_to none --save_strategy no --use_cpu True --bf16 False --max_length 32 "
    "--output_dir {out} "
)
_AUTO: dict[str, Any] = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "zero_allow_untested_optimizer": True, "zero_optimization": {},
}  # fmt: skip
_OTHERS = (
    Case(
        "timm train.py, install_ddp", "pytorch-image-models", ".", "train.py", r"Train: .*Loss: *([0-9.]+)",
        "--data-dir timm_photos --model test_vit --num-classes 3 --img-size 64 --batch-size 8 --epochs 2 --device cpu "
        "--no-prefetcher --workers 1 --opt adamw --lr 1e-3 --warmup-epochs 0 --log-interval 1 --output {out} --seed 1",
        stages=("DDP",), material=(material.images, material.torchvision_without_operators),
        everywhere=(Change("train.py", "device_ids=[device]", "device_ids=None"),),
        changes=(
            _imports("train.py", "zcomm"),
            Change("train.py", _TIMM_WRAP, f"{_TIMM_WRAP}        zcomm.install_ddp(model)\n"),
        ),
        uncompressed=_without_formats("train.py", "install_ddp"), beside="own",
    ),
    Case(
        "Lightning examples/pytorch/basics/transformer.py, ZeroStrategy", "pytorch-lightning",
        "examples/pytorch/basics", "transformer.py", r"^loss ([0-9.]+)", material=(material.words,),
        everywhere=(
            Change("transformer.py", "[n - 4000, 2000, 2000]", "[n - 80, 40, 40]"),
            Change("transformer.py", _LIT_LOG, f'{_LIT_LOG}        print("loss", loss.item())\n'),
            Change("transformer.py", "gradient_clip_val=0.25, max_epochs=20", _LIT_TRAINER.split("(")[1]),
        ),
        changes=(
            _imports("transformer.py", "zero"),
            Change("transformer.py", _LIT_TRAINER,
                   f"{_LIT_TRAINER}, strategy=zero.integrations.ZeroStrategy(stage={{stage}})"),
        ),
        own_changes=(Change("transformer.py", _LIT_TRAINER, f"{_LIT_TRAINER}, strategy='ddp'"),),
        compressed=_with_formats("transformer.py"), beside="own", needs=("lightning",),
    ),
    Case(
        "TRL scripts/sft.py with LoRA", "trl", "scripts", "sft.py", r"'loss': '?([0-9.]+)",
        _SFT + "--deepspeed {config}",
        material=(material.gpt2, material.sft), config=_AUTO,
        beside="own", own_arguments=_SFT, formats=_QUANTIZED, needs=("trl", "peft"),
    ),
)  # fmt: skip
CASES = (*_GPTS, *_EXAMPLES, *_OF_ACCELERATE, *_OTHERS)
