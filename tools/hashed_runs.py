"""The short runs that hash_modes.py hashes: stages, modes, storage tiers, drop-ins, checkpoints and collectives."""

from __future__ import annotations

import hashlib
import json
import random
import re
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

import zcomm
import zero

WORLD_SIZE, RANKS_PER_NODE, STEPS = 4, 2, 4
VOCABULARY, WIDTH, LENGTH, BATCH = 61, 48, 8, 2
LEARNING_RATE = 1e-2
TIMEOUT_S = 120
PARTS = ("losses", "weights", "states", "wire", "control")
BF16 = torch.bfloat16


class Block(nn.Module):
    """A residual MLP behind a norm; with dropout if that is not 0."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    """Embedding, two blocks, a norm, and a head tied to the embedding. Called, it is the loss."""

    def __init__(self, *, dropout: float = 0, calls: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.calls = calls

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # noqa: D102
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x) if self.calls is None else self.calls(block, x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


class Result(NamedTuple):
    """What a rank's run comes to."""

    digests: dict[str, str]
    num_bytes: int
    numbers: list[float]


class Hashes:
    """Hashes of one rank's run, by part."""

    def __init__(self) -> None:
        self._of = {part: hashlib.sha256() for part in PARTS}
        self._num_bytes = 0
        self.numbers: list[float] = []
        """What is compared between devices, whose bits differ: losses, and the norms of weights and of results."""

    def add(self, part: str, value: Any) -> None:
        """Hash ``value``: tensors by their bits, mappings by key; None and empty values of a mapping are skipped."""
        _feed(self._of[part], value)
        if part in ("losses", "weights"):
            self.numbers += _numbers(value)

    @contextmanager
    def traffic(self) -> Iterator[None]:
        """Hash the traffic of this block."""
        with zcomm.traffic() as sent:
            yield
        for key, count in sent:
            self.add("control" if key.operation == "control" else "wire", (*key, *count))
        self._num_bytes += sent.bytes()

    def result(self) -> Result:
        """Return the digests, the bytes sent and the numbers."""
        return Result({part: digest.hexdigest() for part, digest in self._of.items()}, self._num_bytes, self.numbers)


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous().flatten()
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        digest.update(plain.view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for name in sorted(value, key=str):
            if value[name] is not None and not (isinstance(value[name], (Mapping, list, tuple)) and not value[name]):
                digest.update(f"{name}:".encode())
                _feed(digest, value[name])
    elif isinstance(value, (list, tuple)):
        digest.update(f"[{len(value)}".encode())
        for item in value:
            _feed(digest, item)
    elif isinstance(value, float):
        digest.update(struct.pack("<d", value))
    elif isinstance(value, (str, int, bytes, torch.dtype)) or value is None:
        digest.update(f"{value!r};".encode())
    else:
        raise TypeError(f"no bits of a {type(value).__name__}")


def _numbers(value: Any) -> Iterator[float]:
    """The floats in ``value``, and the norms of its tensors of floats."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value.detach().cpu().double().norm().item()
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(item)
    elif isinstance(value, float):
        yield value


class Place(NamedTuple):
    """A rank's surroundings: its number, the topology, a folder that all ranks share, and the device of models."""

    rank: int
    topology: zcomm.Topology
    folder: str
    device: torch.device = torch.device("cpu")


Run = Callable[[Place, Hashes], None]


class Then(NamedTuple):
    """A mode of consecutive jobs that share a folder, each with its number of ranks."""

    jobs: tuple[tuple[int, Run], ...]


def seed(number: int) -> None:
    """Seed every random generator that a checkpoint holds."""
    random.seed(number)
    torch.manual_seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number)


def new_model(place: Place, dtype: torch.dtype = torch.float32, *, has_frozen: bool = False, **options: Any) -> Model:
    """Build the same model on every rank and device, with different states of the generators."""
    seed(0)
    model = Model(**options).to(place.device, dtype)
    if has_frozen:
        model.blocks[0].requires_grad_(False)
    seed(100 + place.rank)
    return model


def batch(place: Place, step: int, micro: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a rank's micro-batch."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + place.rank)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator).to(place.device)
    return tokens[:, :-1], tokens[:, 1:]


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two parameter groups: weight decay for matrices, another learning rate for all others."""
    params = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in params if param.ndim > 1], "weight_decay": 0.1},
        {"params": [param for param in params if param.ndim == 1], "weight_decay": 0.0, "lr": LEARNING_RATE / 3},
    ]


def zero_optimizer(model: nn.Module, place: Place, inner: Any = torch.optim.AdamW, **options: Any) -> Any:
    """A ZeroOptimizer over two parameter groups; ``"FOLDER"`` in an option is the shared folder."""
    options = json.loads(json.dumps(options).replace("FOLDER", place.folder))
    options.setdefault("stage", 3)
    return zero.ZeroOptimizer(model, inner(groups_of(model), lr=LEARNING_RATE), topology=place.topology, **options)


def take_step(
    model: nn.Module,
    optimizer: Any,
    place: Place,
    hashes: Hashes,
    step: int,
    *,
    num_micro: int = 1,
    max_norm: float | None = None,
    overflows_at: int | None = None,
) -> None:
    """Take one step as a user's loop does; in step ``overflows_at`` gradients overflow on rank 1."""
    scale = getattr(optimizer, "scale", lambda loss: loss)
    for micro in range(num_micro):
        loss = model(*batch(place, step, micro)) / num_micro
        hashes.add("losses", loss.item())
        scale(loss * (float("inf") if (step, place.rank) == (overflows_at, 1) else 1)).backward()
    if max_norm is not None:
        hashes.add("losses", optimizer.clip_grad_norm_(max_norm).item())
    optimizer.step()
    optimizer.zero_grad()
    if getattr(optimizer, "loss_scale", None) is not None:
        hashes.add("losses", (optimizer.loss_scale.scale, optimizer.was_step_applied))


def collect(model: nn.Module, optimizer: Any, hashes: Hashes) -> None:
    """Hash the parameters, masters and states of a ZeroOptimizer."""
    saved = optimizer.state_dict()  # with what a delayed update has not published yet
    wanted = ("layout", "masters", "loss_scale", "delayed", "node")
    hashes.add("states", {name: saved[name] for name in wanted} | {"states": saved["optimizer"]["state"]})
    optimizer.finish_update()
    for name, param in model.named_parameters():
        hashes.add("states", (name, zero.utils.safe_get_full_fp32_param(param)))
        for moment in ("exp_avg", "exp_avg_sq") if param.requires_grad else ():
            hashes.add("states", zero.utils.safe_get_full_optimizer_state(param, moment))
    with zero.GatheredParameters(list(model.parameters())):
        hashes.add("weights", {name: param.detach().clone() for name, param in model.named_parameters()})
    hashes.add("weights", model.state_dict())


def train(
    place: Place,
    hashes: Hashes,
    *,
    model: Mapping[str, Any] | None = None,
    loop: Mapping[str, Any] | None = None,
    inner: Any = torch.optim.AdamW,
    ends_with_forward: bool = False,
    **options: Any,
) -> None:
    """Train with a ZeroOptimizer and ``options``.

    ``ends_with_forward``: it waits for the last exchanges. Exact changes start a second one when the first is there.
    """
    built, loop = new_model(place, **(model or {})), loop or {}
    with hashes.traffic():
        optimizer = zero_optimizer(built, place, inner, gradient_accumulation_steps=loop.get("num_micro", 1), **options)
        for step in range(STEPS):
            take_step(built, optimizer, place, hashes, step, **loop)
        if ends_with_forward:
            with torch.no_grad():
                hashes.add("losses", built(*batch(place, STEPS)).item())
    collect(built, optimizer, hashes)
    optimizer.close()


def train_built_sharded(place: Place, hashes: Hashes) -> None:
    """Train a model that zero.Init shards as it is built, with loaded weights, evaluated between steps."""
    weights = new_model(place).state_dict()
    with hashes.traffic():
        with zero.Init(dtype=BF16, ranks_per_node=RANKS_PER_NODE, remote_device=place.device):
            seed(place.rank)
            model = Model()
        zero.load_pretrained(model, weights if place.rank == 0 else None)
        optimizer = zero_optimizer(model, place)
        for step in range(STEPS):
            take_step(model, optimizer, place, hashes, step)
            with torch.no_grad(), zero.gathered_for_generation(model):
                hashes.add("losses", model(*batch(place, step, 9)).item())
    collect(model, optimizer, hashes)
    optimizer.close()


def train_engine(place: Place, hashes: Hashes, **config: Any) -> None:
    """Train with zero.initialize() and a DeepSpeed configuration."""
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": LEARNING_RATE, "warmup_num_steps": 3}},
        "zcomm": {"ranks_per_node": RANKS_PER_NODE},
        **config,
    }
    with hashes.traffic():
        engine, optimizer, *_ = zero.initialize(model=new_model(place), config=config)
        for micro in range(STEPS * config["gradient_accumulation_steps"]):
            loss = engine(*batch(place, micro))
            hashes.add("losses", loss.item())
            engine.backward(loss)
            engine.step()
    hashes.add("losses", [group["lr"] for group in optimizer.param_groups])
    collect(engine.module, optimizer, hashes)
    engine.destroy()


def save(place: Place, hashes: Hashes, **options: Any) -> None:
    """Train two steps, save, train two more."""
    model = new_model(place, BF16)
    optimizer = zero_optimizer(model, place, **options)
    for step in range(STEPS):
        take_step(model, optimizer, place, hashes, step)
        if step == 1:
            zero.save_checkpoint(optimizer, place.folder, "tag")
            hashes.add("states", dict(tensors_in(Path(place.folder))))
    collect(model, optimizer, hashes)
    optimizer.close()


def resume(place: Place, hashes: Hashes, **options: Any) -> None:
    """Load the files of :func:`save` and train two steps."""
    model = new_model(place, BF16)
    with hashes.traffic():
        optimizer = zero_optimizer(model, place, **options)
        zero.load_checkpoint(optimizer, place.folder)
        for step in (2, 3):
            take_step(model, optimizer, place, hashes, step)
    collect(model, optimizer, hashes)
    optimizer.close()


def tensors_in(folder: Path) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Dtype, shape and bytes of every tensor in the safetensors files below ``folder``, by file and name.

    Each save has a random number of 8 digits in the names of its files.
    """
    paths = {re.sub(r"[0-9a-f]{8}", "ID", path.name): path for path in folder.rglob("*.safetensors")}
    for file, path in sorted(paths.items()):
        content = path.read_bytes()
        (size,) = struct.unpack("<Q", content[:8])
        for name, entry in json.loads(content[8 : 8 + size]).items():
            if name != "__metadata__":
                start, stop = (8 + size + offset for offset in entry["data_offsets"])
                digest = hashlib.sha256(content[start:stop]).hexdigest()
                yield f"{file} {name}", (entry["dtype"], entry["shape"], digest)


def train_drop_in(place: Place, hashes: Hashes, *, kind: str, recipe: str | zcomm.Recipe, num_micro: int = 1) -> None:
    """Train under DDP or FSDP2 with a recipe."""
    plain = new_model(place)
    with hashes.traffic():
        if kind == "ddp":
            model: Any = DistributedDataParallel(plain)
            installed = zcomm.install_ddp(model, recipe, topology=place.topology)
        else:
            mesh = init_device_mesh(place.device.type, (WORLD_SIZE,))
            for block in plain.blocks:
                fully_shard(block, mesh=mesh)
            model = fully_shard(plain, mesh=mesh)
            installed = zcomm.install_fsdp2(model, recipe, topology=place.topology)
        optimizer = torch.optim.AdamW(groups_of(model), lr=LEARNING_RATE)
        for step in range(STEPS):
            take_step(model, optimizer, place, hashes, step, num_micro=num_micro)
    hashes.add("states", {name: _plain(value) for name, value in installed.state_dict().items()})
    hashes.add("states", _plain(optimizer.state_dict()["state"]))
    hashes.add("weights", {name: _whole(value) for name, value in model.state_dict().items()})
    installed.uninstall()


def _whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _plain(value: Any) -> Any:
    """Replace every DTensor by this rank's shard."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return value.to_local() if hasattr(value, "to_local") else value


FORMATS = [*zcomm.FORMATS, "int8:asym", "int4/64:hadamard", "int8:stochastic", "int4:asym:stochastic"]
NUMEL = 1000


def exchange(place: Place, hashes: Hashes, *, operation: str) -> None:
    """Run one collective in every format, with float32 and bf16, over two hops and over one."""
    whole = (torch.randn(WORLD_SIZE * NUMEL, generator=torch.Generator().manual_seed(place.rank)) ** 3).to(place.device)
    for number, (name, dtype) in enumerate((name, dtype) for name in FORMATS for dtype in (torch.float32, BF16)):
        given = {"format": name}
        if zcomm.get_format(name).is_random:
            given["random"] = zcomm.RandomKey(seed=3, tensor=number, step=place.topology.world_size)
        for group in (place.topology, None):
            source = whole.to(dtype, copy=True)
            with hashes.traffic():
                hashes.add("weights", (name, _exchanged(operation, source, group, given)))


def _exchanged(operation: str, source: Tensor, group: Any, given: dict[str, Any]) -> Tensor:
    if operation == "all_reduce":
        zcomm.all_reduce(source, "avg", group, **given)
        return source
    output = torch.empty_like(source[:NUMEL] if operation == "reduce_scatter" else source)
    if operation == "reduce_scatter":
        zcomm.reduce_scatter_single(output, source, "avg", group=group, **given)
    elif operation == "all_gather":
        zcomm.all_gather_single(output, source[:NUMEL], group, **given)
    else:
        zcomm.all_to_all_single(output, source, group, **given)
    return output


def exchange_with_state(place: Place, hashes: Hashes) -> None:
    """Run reductions with a residual, and gathers of deltas."""
    topology, numel = place.topology, WORLD_SIZE * 512
    residual = zcomm.Residual(topology, [("a", 0, numel)], numel, beta=0.9, reset_interval=3)
    generator = torch.Generator().manual_seed(place.rank)
    for _ in range(STEPS):
        source, output = torch.randn(numel, generator=generator).to(place.device), torch.empty(512, device=place.device)
        with hashes.traffic():
            zcomm.reduce_scatter_single(
                output, source, "avg", group=topology, format=("int8", "nf4"), residual=residual
            )
        residual.commit()
        hashes.add("weights", output)
        hashes.add("states", residual.state_dict())


def _offload(device: str, **more: Any) -> dict[str, Any]:
    return {"device": device, **({"nvme_path": "FOLDER"} if device == "nvme" else {}), **more}


def modes() -> dict[str, Run | Then]:
    """All modes by name."""
    found: dict[str, Run | Then] = {}
    for part in (_stages, _compressed, _tiers, _others):
        for name, run in part():
            assert name not in found, name
            found[name] = run
    return found


def _stages() -> Iterable[tuple[str, Run | Then]]:
    bf16 = {"dtype": BF16}
    for stage in range(4):
        yield f"stage{stage}-float32", partial(train, stage=stage)
        yield f"stage{stage}-bf16", partial(train, stage=stage, model=bf16)
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 1}
    for stage in (2, 3):
        yield f"stage{stage}-fp16-dynamic-scale", partial(train, stage=stage, fp16=fp16, loop={"overflows_at": 1})
    for stage in (1, 3):
        yield f"stage{stage}-accumulation2", partial(train, stage=stage, loop={"num_micro": 2})
        yield f"stage{stage}-clipping", partial(train, stage=stage, model=bf16, loop={"max_norm": 0.1})
    yield (
        "stage2-configured-clipping-accumulation2",
        partial(train, stage=2, gradient_clipping=0.1, loop={"num_micro": 2}),
    )
    small = {"reduce_bucket_size": 3000, "allgather_bucket_size": 3000}
    yield "stage2-small-buckets", partial(train, stage=2, **small)
    yield "stage3-small-buckets-persistent", partial(train, stage3_param_persistence_threshold=100, **small)
    yield "stage3-init-load-generate", train_built_sharded


def _compressed() -> Iterable[tuple[str, Run | Then]]:
    bf16 = {"dtype": BF16}
    plus = partial(train, model=bf16)
    weights, gradients, node = {"quantized_weights": True}, {"quantized_gradients": True}, {"hpz_partition_size": 2}
    yield "zeropp-weights", partial(plus, **weights)
    yield "zeropp-gradients", partial(plus, **gradients)
    yield "zeropp-hpz", partial(plus, **node)
    yield "zeropp-all", partial(plus, **weights, **gradients, **node)
    yield (
        "zeropp-all-accumulation2-hpz-cpu",
        partial(plus, **weights, **gradients, **node, hpz_secondary_device="cpu", loop={"num_micro": 2}),
    )
    yield (
        "zeropp-frozen",
        partial(train, model={**bf16, "has_frozen": True}, quantized_nontrainable_weights=True, **weights),
    )
    for name in ("int8", "int4", "nf4", "fp8_e4m3"):
        yield f"format-stage3-{name}", partial(plus, weight_format=name, gradient_format=("int8", name))
    yield "format-stage1-int8-int4", partial(plus, stage=1, **weights, **gradients)
    delta, hpz = ({"mode": mode, "changes": "quantized"} for mode in ("delta", "delta_hpz"))
    for stage in (1, 2):
        yield f"delta-stage{stage}", partial(plus, stage=stage, **delta, gradient_format="int4")
    for stage, mode in ((1, "delta"), (3, "delta_hpz")):
        exact = {"mode": mode, "changes": "exact", "ends_with_forward": True}
        yield f"exact-changes-stage{stage}", partial(plus, stage=stage, **exact)
    yield "delta_hpz", partial(plus, **hpz)
    yield "delta_hpz-gradient_error", partial(plus, **hpz, gradient_error=0.15)
    yield "delta_hpz-accumulation2", partial(plus, **hpz, loop={"num_micro": 2})
    yield (
        "delta_hpz-damped-residual-clipping",
        partial(plus, **hpz, residual_beta=0.9, residual_reset_interval=3, loop={"max_norm": 0.1}),
    )


def _tiers() -> Iterable[tuple[str, Run | Then]]:
    on_host = partial(train, model={"dtype": BF16}, offload_optimizer=_offload("cpu"))
    in_files = partial(train, model={"dtype": BF16}, inner=zero.CPUAdam, sub_group_size=5000)
    for stage in (1, 2, 3):
        yield f"offload-stage{stage}-CPUAdam", partial(on_host, stage=stage, inner=zero.CPUAdam)
        yield f"offload-stage{stage}-AdamW", partial(on_host, stage=stage, zero_force_ds_cpu_optimizer=False)
    yield "offload-stage3-ratio", partial(on_host, offload_optimizer=_offload("cpu", ratio=0.5))
    yield "offload-params-cpu", partial(on_host, offload_param=_offload("cpu"))
    ahead = {"pipeline_read": True, "pipeline_write": True}
    yield "nvme-states-stage2", partial(in_files, stage=2, offload_optimizer=_offload("nvme", **ahead))
    yield "nvme-states-stage3", partial(in_files, offload_optimizer=_offload("nvme"))
    params = _offload("nvme", max_in_cpu=0, buffer_size=5000)
    # zero.CPUAdam updates host memory; with a GPU the masters are there.
    yield "nvme-params", partial(in_files, inner=torch.optim.AdamW, offload_param=params)
    yield "nvme-states-params-zeropp", partial(
        in_files, offload_optimizer=_offload("nvme", **ahead), offload_param=params,
        quantized_weights=True, quantized_gradients=True, loop={"num_micro": 2},
    )  # fmt: skip
    delayed = partial(on_host, inner=zero.CPUAdam, delayed_update=True, delay_start=1)
    yield "delayed-update-stage2-clipping", partial(delayed, stage=2, gradient_clipping=0.1)
    yield "delayed-update-stage3", delayed
    section = {"cpu_checkpointing": True, "contiguous_memory_optimization": True, "number_checkpoints": 2}
    yield (
        "activation-checkpointing-cpu",
        partial(train, model={"dropout": 0.1, "calls": zero.checkpoint}, activation_checkpointing=section),
    )


def _others() -> Iterable[tuple[str, Run | Then]]:
    plus = {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": 2}
    yield (
        "initialize-stage2-fp16",
        partial(train_engine, zero_optimization={"stage": 2}, gradient_accumulation_steps=2, fp16={"enabled": True}),
    )
    yield (
        "initialize-zeropp-bf16",
        partial(
            train_engine,
            zero_optimization=plus,
            gradient_accumulation_steps=1,
            bf16={"enabled": True},
            gradient_clipping=0.1,
        ),
    )
    stochastic = zcomm.Recipe(gradients=("int4:stochastic", "int4:stochastic"), reduced="int8", seed=7)
    for kind in ("ddp", "fsdp2"):
        yield f"{kind}-zeropp", partial(train_drop_in, kind=kind, recipe="zeropp")
        yield f"{kind}-residual-accumulation2", partial(train_drop_in, kind=kind, recipe="accurate", num_micro=2)
        yield f"{kind}-stochastic", partial(train_drop_in, kind=kind, recipe=stochastic)
    for before, after, world_size in ((3, 1, 2), (1, 3, 2), (2, 2, 4)):
        jobs = (WORLD_SIZE, partial(save, stage=before)), (world_size, partial(resume, stage=after))
        yield f"checkpoint-stage{before}-to-{after}-on-{world_size}-ranks", Then(jobs)
    delta = {"mode": "delta_hpz", "changes": "quantized"}
    yield "checkpoint-delta_hpz", Then(((WORLD_SIZE, partial(save, **delta)), (WORLD_SIZE, partial(resume, **delta))))
    for operation in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
        yield f"collective-{operation}", partial(exchange, operation=operation)
    yield "collective-residual", exchange_with_state
