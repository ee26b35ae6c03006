"""Defines every fault of a job and its expected effects; the table in bench/results/faults.md is made from this."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

__all__ = ["CONFIGS", "FAULTS", "SAVE_EVERY", "STEPS", "TIMEOUT_S", "Config", "Fault", "draw_spec"]

STEPS, SAVE_EVERY = 6, 2
TIMEOUT_S = 8
"""The timeout of the process groups, in seconds."""
ANY = ".*"
LOST_PEER = "CommunicationError|DivergedError|CheckpointError: (CommunicationError|DivergedError)"
"""Errors that docs/guarantees.md names for a rank whose peer has died or stopped; the last ones occur in a save."""


@dataclass(frozen=True)
class Fault:
    """One kind of fault."""

    what: str
    """What is done, on one rank, at a random moment."""
    must: str
    """What must follow, besides: no rank hangs, and a restart resumes the last complete checkpoint with equal bits."""
    survivors: str = ""
    """A pattern for the start of every other rank's error, its class and text; empty: there is no error."""
    victim: str | None = None
    """The same for the faulty rank; None: it reports no error."""
    text: str = ANY
    """A pattern that every error's text must contain."""
    is_same: bool = False
    """Whether class and text of the error are the same on every rank."""
    may_miss: bool = False
    """Whether the run may also end without an error, with the right bits."""
    goes_on: bool = False
    """Whether the training completes in the same run."""
    only: str = ""
    """A pattern for the configurations to which this fault applies."""
    modes: tuple[str, ...] = ("forked", "torchrun")

    @property
    def is_felt_by_peers(self) -> bool:
        """Whether the other ranks only observe that a rank is gone."""
        return self.survivors == LOST_PEER


DIFFERS = "the same ConfigError on every rank, with what differs"
FAULTS: dict[str, Fault] = {
    "SIGKILL": Fault("killed", "an error on every survivor", LOST_PEER),
    "SIGTERM": Fault("terminated", "an error on every survivor", LOST_PEER),
    "SIGSTOP": Fault("stopped for longer than the timeout", "an error on every survivor within the timeout", LOST_PEER),
    "disk full, checkpoint": Fault(
        "no room on the file system of the checkpoints", "the same CheckpointError on every rank", "CheckpointError",
        "CheckpointError", "could not be written|cannot be made|No space left", is_same=True, modes=("forked",),
    ),
    "disk full, NVMe": Fault(
        "no room on the file system of the states", "an error on every rank before training, with the bytes needed",
        "OSError", "OSError", "are needed and .* free|No space left", only="NVMe",
        modes=("forked",),
    ),
    "bit in a message": Fault(
        "one bit of one message flipped, ZCOMM_CHECK=1", "the same DamagedError on every rank",
        "DamagedError", "DamagedError", r"a message was damaged on the way", is_same=True,
    ),
    "bit in an NVMe file": Fault(
        "one bit of a file of states or parameters flipped", "IntegrityError on every rank, or the bit is never read",
        "IntegrityError", "IntegrityError", only="NVMe", may_miss=True,
    ),
    "bit in a checkpoint": Fault(
        "one bit of any file of the newest checkpoint flipped",
        "the same CheckpointError on every rank at the next start; the checkpoint before loads",
        "CheckpointError", "CheckpointError", is_same=True, modes=("forked",),
    ),
    "NaN": Fault("a NaN in a gradient", "every rank skips the step; training goes on", goes_on=True),
    "infinity": Fault("an infinity in a gradient", "every rank skips the step; training goes on", goes_on=True),
    "huge value": Fault("1e30 in a gradient", "training goes on, all ranks finite and equal", goes_on=True),
    "another model": Fault("one layer wider", "the same LayoutError on every rank", "LayoutError", "LayoutError",
                           "model given to ZeroOptimizer must be the same"),
    "another dtype": Fault("parameters in float64", "the same error on every rank", "LayoutError|ConfigError",
                           "LayoutError|ConfigError", "must be|float64"),
    "another batch shape": Fault("longer sequences than the model takes", "its own error; an error on every survivor",
                                 LOST_PEER, ANY),
    "another configuration": Fault("another learning rate", DIFFERS, "ConfigError", "ConfigError",
                                   r"lr is .* on rank", is_same=True),
    "another library": Fault("another version of zcomm-zero", DIFFERS, "ConfigError", "ConfigError",
                             r"zcomm-zero is .* on rank", is_same=True),
    "out of memory": Fault("an allocation fails", "its own error; an error on every survivor",
                           rf"{LOST_PEER}|StateError: rank \d+: MemoryError", ANY),  # the second where ranks agree
    "interface down": Fault("the network interface of one machine goes down", "an error on every rank", LOST_PEER,
                            LOST_PEER, modes=("network",)),
    "rate zero": Fault("the network of one machine drops everything", "an error on every rank within the timeout",
                       LOST_PEER, LOST_PEER, modes=("network",)),
}  # fmt: skip


@dataclass(frozen=True)
class Config:
    """The configuration of a job."""

    options: dict[str, Any]
    """Arguments of ZeroOptimizer, without the folders."""
    nodes: int = 1
    ranks_per_node: int = 2
    micro_batches: int = 1
    """Micro-batches of a step."""
    defers: bool = False
    """Whether gradients are accumulated in ``no_sync()`` and reduced at the last micro-batch only."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


SMALL = {"reduce_bucket_size": 3000, "allgather_bucket_size": 3000, "bf16": {"enabled": True}}
QUANTIZED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
STATES = {"offload_optimizer": {"device": "nvme"}, "sub_group_size": 1601}
PARAMETERS = {"offload_param": {"device": "nvme", "max_in_cpu": 0, "buffer_size": 600}}
HOST = {"offload_optimizer": {"device": "cpu"}}
INT4 = {"changes": "quantized"}
CONFIGS: dict[str, Config] = {
    "stage 1": Config({"stage": 1, **SMALL}),
    "stage 1, accumulation": Config({"stage": 1, **SMALL}, micro_batches=3, defers=True),
    "stage 2, NVMe": Config({"stage": 2, **SMALL, **STATES}),
    "stage 2, delayed": Config({"stage": 2, **SMALL, **HOST, "delayed_update": True}),
    "stage 3, ZeRO++": Config({"stage": 3, **SMALL, **QUANTIZED}),
    "stage 3, NVMe": Config({"stage": 3, **SMALL, **STATES, **PARAMETERS}),
    "stage 3, NVMe, delayed": Config({"stage": 3, **SMALL, **STATES, **PARAMETERS, "delayed_update": True}),
    "stage 3, host, 4 ranks": Config({"stage": 3, **SMALL, **HOST}, ranks_per_node=4, micro_batches=2, defers=True),
    "delta, 2 x 2": Config({"stage": 2, **SMALL, "mode": "delta"}, nodes=2),
    "ZeRO++, 2 x 2": Config({"stage": 3, **SMALL, **QUANTIZED}, nodes=2),
    "hpZ, 2 x 2": Config({"stage": 3, **SMALL, **QUANTIZED, "zero_hpz_partition_size": 2}, nodes=2, micro_batches=2),
    "hpZ, 2 x 2, NVMe": Config(
        {"stage": 3, **SMALL, **QUANTIZED, "zero_hpz_partition_size": 2, **STATES, **PARAMETERS}, nodes=2
    ),
    "delta-hpZ, 2 x 2": Config({"stage": 3, **SMALL, **INT4, "mode": "delta_hpz"}, nodes=2, micro_batches=2),
    "delta-hpZ, 2 x 2, NVMe": Config({"stage": 3, **SMALL, "mode": "delta_hpz", **STATES}, nodes=2),
}
"""Ranks of one machine stand in for nodes; in the mode "network" there are two emulated machines."""


def draw_spec(seed: int, mode: str) -> dict[str, Any]:
    """Draw run ``seed`` of a mode: faults and their configurations in turn, everything else at random."""
    draw = random.Random(f"{mode} {seed}")
    kinds = [name for name, fault in FAULTS.items() if mode in fault.modes]
    lap, place = divmod(seed, len(kinds))
    fitting = [name for name in CONFIGS if re.search(FAULTS[kinds[place]].only, name)]
    name = fitting[(lap + place * len(fitting) // len(kinds)) % len(fitting)]
    return {
        "seed": seed, "mode": mode, "fault": kinds[place], "config": name,
        "victim": draw.randrange(CONFIGS[name].ranks), "step": draw.randrange(STEPS),
        "micro": draw.randrange(CONFIGS[name].micro_batches), "delay_s": draw.random() * 0.12, "draw": draw.random(),
        "async": draw.random() < 0.5,
    }  # fmt: skip
