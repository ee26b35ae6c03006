"""Who logs what is the same on every rank: one rank of a job.

The data-parallel groups of a model that is split over tensor- or pipeline-parallel ranks each have a first rank, so
``topology.rank == 0`` is not enough there: ``Runtime.speaks`` is true on one rank of them all. What happens on one rank
alone (a backward that an exception ended there, a wait that was given up) is logged by that rank.
"""

from __future__ import annotations

import torch.distributed as dist

__all__ = ["is_first_of_job"]


def is_first_of_job() -> bool:
    """Whether this process has rank 0, or is the only one. For what belongs to no group of ranks."""
    return not dist.is_initialized() or dist.get_rank() == 0
