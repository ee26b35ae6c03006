"""The contenders by name. The package of a contender is imported only when the contender is built."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from contenders.contender import Contender, ContenderSetup

__all__ = ["COMPARED", "DEFAULT", "ENTRIES", "INEXACT", "ONE_MACHINE", "Entry", "available", "build"]


class Entry(NamedTuple):
    """How to build a contender: its module and options, what it shards, the package it needs."""

    stage: int
    """ZeRO stage: what is sharded."""
    module: str
    options: dict[str, Any]
    needs: str = "torch"
    """The package that must be installed."""


ENTRIES = {
    **{f"zero stage {n}": Entry(n, "zero_optimizer", {"stage": n}) for n in (1, 2, 3)},
    "fsdp2 reshard=False": Entry(2, "fsdp2", {"reshard_after_forward": False}),
    "fsdp2 reshard=True": Entry(3, "fsdp2", {"reshard_after_forward": True}),
    "ddp": Entry(0, "ddp", {"gradient_as_bucket_view": False}),
    "ddp bucket views": Entry(0, "ddp", {"gradient_as_bucket_view": True}),
    **{f"deepspeed stage {n}": Entry(n, "deepspeed_engine", {"stage": n}, "deepspeed") for n in (1, 2, 3)},
}
ONE_MACHINE = tuple(ENTRIES)
"""Those without a network between nodes."""
ZEROPP = {"stage": 3, "quantized_weights": True, "quantized_gradients": True, "stays_in_node": True}
DELTA = {"stage": 3, "mode": "delta_hpz", "changes": "quantized"}
SMALL_PERSISTENT = {"stage": 3, "stage3_param_persistence_threshold": 100_000}
"""DeepSpeed's default persistence threshold: smaller parameters stay full. This library's default is 0."""
OFFLOADED = {"stage": 3, "offload": "cpu"}
BF16 = {"gradient_as_bucket_view": True, "sends": "bf16"}
TWO_HOPS = {"gradient_as_bucket_view": True, "sends": "bf16 two hops", "bucket_mib": 4}
"""Buckets of 4 MiB are as fast as those of 1 and faster than torch's 25: bench/results/compare_settings.md."""
KEPT = {"stage3_max_reuse_distance": 10**9}
"""Parameters stay full until the step. With ``has_no_sync`` gradients do, too, on each rank until the last batch."""
ENTRIES |= {
    "alone": Entry(0, "alone", {}),
    "alone x4": Entry(0, "alone", {"accumulation": 4}),
    "ddp bf16 gradients": Entry(0, "ddp", BF16),
    "ddp bf16 two hops": Entry(0, "ddp", TWO_HOPS),
    "ddp bf16 two hops x4": Entry(0, "ddp", TWO_HOPS | {"accumulation": 4}),
    "ddp x4": Entry(0, "ddp", {"gradient_as_bucket_view": True, "accumulation": 4}),
    "ddp bf16 gradients x4": Entry(0, "ddp", BF16 | {"accumulation": 4}),
    "zero redundancy": Entry(1, "zero_redundancy", {}),
    "fsdp2 reshard=False x4": Entry(2, "fsdp2", {"reshard_after_forward": False, "accumulation": 4}),
    **{
        f"hsdp reshard={reshard}{' x4' if count > 1 else ''}": Entry(
            3 if reshard else 2, "fsdp2", {"reshard_after_forward": reshard, "is_hybrid": True, "accumulation": count}
        )
        for count in (1, 4)
        for reshard in (False, True)
    },
    "deepspeed stage 1 x4": Entry(1, "deepspeed_engine", {"stage": 1, "accumulation": 4}, "deepspeed"),
    "deepspeed stage 3 x4": Entry(3, "deepspeed_engine", {"stage": 3, "accumulation": 4}, "deepspeed"),
    "deepspeed stage 3 offload": Entry(3, "deepspeed_engine", OFFLOADED, "deepspeed"),
    "deepspeed stage 3 offload cpu adam": Entry(3, "deepspeed_engine", OFFLOADED | {"has_cpu_adam": True}, "deepspeed"),
    "deepspeed stage 3 nvme": Entry(
        3, "deepspeed_engine", {"stage": 3, "offload": "nvme", "has_cpu_adam": True}, "deepspeed"
    ),
    "zero stage 1 x4": Entry(1, "zero_optimizer", {"stage": 1, "accumulation": 4}),
    "zero stage 2 no_sync x4": Entry(2, "zero_optimizer", {"stage": 2, "accumulation": 4, "has_no_sync": True}),
    "zero stage 2 bf16 gradients": Entry(2, "zero_optimizer", {"stage": 2, "gradient_format": "bf16"}),
    "deepspeed stage 1 bf16 gradients": Entry(
        1, "deepspeed_engine", {"stage": 1, "sections": {"communication_data_type": "bf16"}}, "deepspeed"
    ),
    "zero stage 3 small whole": Entry(3, "zero_optimizer", SMALL_PERSISTENT),
    "zero stage 3 offload": Entry(3, "zero_optimizer", OFFLOADED),
    "zero stage 3 offload small whole": Entry(3, "zero_optimizer", OFFLOADED | SMALL_PERSISTENT),
    "zero stage 3 nvme": Entry(3, "zero_optimizer", OFFLOADED | {"offload": "nvme"}),
    "zero stage 3 nvme small whole": Entry(3, "zero_optimizer", OFFLOADED | SMALL_PERSISTENT | {"offload": "nvme"}),
    "zero stage 3 nvme states small whole": Entry(
        3, "zero_optimizer", OFFLOADED | SMALL_PERSISTENT | {"offload": "states"}
    ),
    "zero++": Entry(3, "zero_optimizer", ZEROPP),
    "zero++ x4": Entry(3, "zero_optimizer", ZEROPP | {"accumulation": 4}),
    "delta-hpz": Entry(3, "zero_optimizer", DELTA),
    "delta-hpz x4": Entry(3, "zero_optimizer", DELTA | {"accumulation": 4}),
    "delta-hpz exact": Entry(3, "zero_optimizer", DELTA | {"changes": "exact"}),
    "delta-hpz exact coded": Entry(3, "zero_optimizer", DELTA | {"changes": "exact", "gradient_error": 0.15}),
    "zero++ reshard=False": Entry(3, "zero_optimizer", ZEROPP | KEPT),
    "zero++ no_sync x4": Entry(3, "zero_optimizer", ZEROPP | KEPT | {"accumulation": 4, "has_no_sync": True}),
    "delta-hpz reshard=False": Entry(3, "zero_optimizer", DELTA | KEPT),
    "delta-hpz exact reshard=False": Entry(3, "zero_optimizer", DELTA | KEPT | {"changes": "exact"}),
    "delta-hpz exact coded reshard=False": Entry(
        3, "zero_optimizer", DELTA | KEPT | {"changes": "exact", "gradient_error": 0.15}
    ),
    "delta-hpz no_sync x4": Entry(3, "zero_optimizer", DELTA | KEPT | {"accumulation": 4, "has_no_sync": True}),
}
ENTRIES |= {
    "zcomm ddp": Entry(0, "ddp", {"gradient_as_bucket_view": True, "recipe": "smallest"}),
    "zcomm fsdp2 reshard=False": Entry(2, "fsdp2", {"reshard_after_forward": False, "recipe": "zeropp"}),
    "zcomm hsdp reshard=False": Entry(
        2, "fsdp2", {"reshard_after_forward": False, "is_hybrid": True, "recipe": "zeropp"}
    ),
}
"""One line of this library under DDP and FSDP2."""


def _with(name: str, **options: Any) -> Entry:
    """The contender ``name`` with other options."""
    return ENTRIES[name]._replace(options=ENTRIES[name].options | options)


FSDP2, HSDP = [tuple(f"{kind} reshard={reshard}" for reshard in (False, True)) for kind in ("fsdp2", "hsdp")]


def _fsdp2(*settings: str, names: tuple[str, ...]) -> dict[str, Entry]:
    """The contenders ``names`` with these settings, which end their names."""
    return {" ".join((name, *settings)): _with(name, settings=settings) for name in names}


ENTRIES |= _fsdp2("bf16 gradients", names=(HSDP[0],))
NO_NORM = {"zero_optimization": {"compute_grad_norm": False}, "bf16": {"check_grad_overflow": False}}
"""DeepSpeed neither computes the norm of gradients nor checks that they are finite."""
TO_OWNERS = NO_NORM | {"zero_optimization": NO_NORM["zero_optimization"] | {"use_multi_rank_bucket_allreduce": False}}
"""It also reduces each rank's gradients to that rank alone, not to all in one exchange."""
OTHER_SETTINGS = {
    "ddp bf16 gradients 4 MiB": Entry(0, "ddp", BF16 | {"bucket_mib": 4}),
    **{f"ddp bf16 two hops {count} MiB": Entry(0, "ddp", TWO_HOPS | {"bucket_mib": count}) for count in (1, 25)},
    **_fsdp2("prefetch", names=(*FSDP2, HSDP[0])),
    **_fsdp2("all-to-all", names=(*FSDP2, *HSDP)),
    **_fsdp2("one group", names=(FSDP2[0], HSDP[0])),
    **_fsdp2("one group", "all-to-all", names=(FSDP2[0], HSDP[0])),
    **_fsdp2("all-to-all", "prefetch", names=(FSDP2[0],)),
    "deepspeed stage 3 hpz": _with("deepspeed stage 3", stays_in_node=True),
    "zero redundancy views": _with("zero redundancy", has_parameter_views=True),
}
OTHER_SETTINGS |= {
    f"deepspeed stage {n} {name}": _with(f"deepspeed stage {n}", sections=sections)
    for n in (1, 2)
    for name, sections in (("no norm", NO_NORM), ("to owners", TO_OWNERS))
}
"""Other settings of peers, compared once: compare_settings.md, compare_more_peers.md and compare_best_settings.md."""
ENTRIES |= OTHER_SETTINGS
POWERSGD = {f"ddp powersgd {rank}": {"gradient_as_bucket_view": True, "powersgd_rank": rank} for rank in (4, 16)}
POWERSGD |= {f"{name} bf16": options | {"sends": "bf16"} for name, options in POWERSGD.items()}
ENTRIES |= {name: Entry(0, "ddp", options) for name, options in POWERSGD.items()}
ENTRIES |= {f"diloco x{n}": Entry(0, "diloco", {"accumulation": n}, "torchft") for n in (10, 50)}
INEXACT = (*POWERSGD, "diloco x10", "diloco x50")
"""They train to another loss in as many steps: bench/to_loss.py compares the times until a loss."""
ENTRIES |= {
    f"{name} muon": ENTRIES[name]._replace(options=ENTRIES[name].options | {"has_muon": True})
    for name in (
        "alone", "ddp bf16 gradients", "fsdp2 reshard=False", "fsdp2 reshard=True", "hsdp reshard=False",
        "hsdp reshard=True", "deepspeed stage 1", "deepspeed stage 2",
        "deepspeed stage 3", "zero stage 1", "zero stage 2", "zero stage 3", "delta-hpz",
    )
}  # fmt: skip
FLOAT32_ONLY = ("zero stage 2 bf16 gradients", "hsdp reshard=False bf16 gradients", "deepspeed stage 1 bf16 gradients")
"""With bfloat16 parameters they send bf16 gradients anyway."""
ENTRIES |= {
    f"{name} divided muon": _with(f"{name} muon", settings=("divided muon",))._replace(needs="muon_fsdp2")
    for name in FSDP2
}
COMPARED = (
    "alone", "alone x4", "ddp", "ddp bucket views", "ddp bf16 gradients", "ddp bf16 two hops",
    "ddp x4", "ddp bf16 gradients x4", "ddp bf16 two hops x4", "zero redundancy",
    "fsdp2 reshard=False", "fsdp2 reshard=True", "fsdp2 reshard=False x4",
    "hsdp reshard=False", "hsdp reshard=True", "hsdp reshard=False x4", "hsdp reshard=True x4",
    "deepspeed stage 1", "deepspeed stage 2", "deepspeed stage 3", "deepspeed stage 3 offload",
    "deepspeed stage 3 offload cpu adam", "deepspeed stage 3 nvme", "deepspeed stage 1 x4", "deepspeed stage 3 x4",
    "zero stage 1", "zero stage 1 x4", "zero stage 2", "zero stage 2 no_sync x4", *FLOAT32_ONLY,
    "zero stage 3", "zero stage 3 small whole", "zero stage 3 offload",
    "zero stage 3 offload small whole", "zero stage 3 nvme", "zero stage 3 nvme small whole",
    "zero stage 3 nvme states small whole",
    "zero++", "zero++ reshard=False", "zero++ x4", "zero++ no_sync x4",
    "delta-hpz", "delta-hpz reshard=False", "delta-hpz exact", "delta-hpz exact reshard=False",
    "delta-hpz exact coded", "delta-hpz exact coded reshard=False", "delta-hpz x4", "delta-hpz no_sync x4",
    *(name for name in ENTRIES if name.startswith("zcomm ") or name.endswith(" muon")), *INEXACT, *OTHER_SETTINGS,
)  # fmt: skip
"""The contenders in the tables of compare.py."""
COMPILED = ("deepspeed stage 3 offload cpu adam", "deepspeed stage 3 nvme")
"""DeepSpeed compiles parts of these when they are first used, and needs ninja; files need libaio's headers, too."""
OPTIONAL = (*INEXACT, *FLOAT32_ONLY, *OTHER_SETTINGS, *COMPILED, "zero stage 3 nvme states small whole")
DEFAULT = tuple(name for name in COMPARED if not name.endswith(" muon") and name not in OPTIONAL)
"""Those that it measures unless others are asked for."""


def available(names: tuple[str, ...] = ONE_MACHINE) -> list[str]:
    """Return those of ``names`` whose package is installed."""
    return [name for name in names if find_spec(ENTRIES[name].needs) is not None]


def build(name: str, setup: ContenderSetup) -> Contender:
    """Import the contender's package and build it. Collective."""
    entry = ENTRIES[name]
    contender: Contender = import_module(f"contenders.{entry.module}").build(setup, **entry.options)
    return contender
