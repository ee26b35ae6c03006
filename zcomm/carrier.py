"""Which backend carries the collectives: torch's process groups, or the communicator over NCCL in C++.

torch    the default: any device, any format
nccl     CUDA tensors: quantize, transfer and decode of a message pipelined in chunks, without Python between them

Both give the same bits. A call that a backend cannot serve is refused, with the reason, never handed to the other.
"""

from __future__ import annotations

from typing import Literal, get_args

from zcomm import kernels
from zcomm.errors import BackendUnavailableError, ConfigError
from zcomm.nccl_library import is_emulated, nccl_library

__all__ = ["BackendName", "chosen_backend", "nccl_unavailable_reason", "use_backend"]

BackendName = Literal["torch", "nccl"]

_CHOSEN: list[BackendName] = ["torch"]


def use_backend(name: BackendName) -> None:
    """Let every collective of this process that is not told otherwise by ``backend=`` go over ``name``.

    Call it on all ranks alike. With ``"nccl"`` these go over NCCL: ``all_gather_single``, ``reduce_scatter_single``,
    ``all_reduce`` and ``all_to_all_single``, and what is built of them. What ranks agree on goes over torch's groups
    all the same.

    Raises:
        ConfigError: There is no such backend.
        BackendUnavailableError: It cannot be used here; with the reason and the remedy.
    """
    if chosen_backend(name) == "nccl" and (reason := nccl_unavailable_reason()):
        raise BackendUnavailableError(f"backend='nccl' cannot be used: {reason}")
    _CHOSEN[0] = name


def chosen_backend(name: BackendName | None) -> BackendName:
    """``name`` itself, or what :func:`use_backend` has set."""
    if name is not None and name not in get_args(BackendName):
        raise ConfigError(f"backend must be 'torch' or 'nccl': backend={name!r}")
    return _CHOSEN[0] if name is None else name


def nccl_unavailable_reason() -> str:
    """Why the communicator over NCCL cannot be used in this process; empty if it can."""
    try:
        if not is_emulated() and not kernels.native().build_info()["cuda"]:
            return (
                "the native module was built without CUDA: build it where nvcc is found, "
                "with ZCOMM_CUDA=ON pip install --no-build-isolation ."
            )
        nccl_library()
    except BackendUnavailableError as error:
        return str(error)
    return ""
