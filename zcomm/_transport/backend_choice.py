"""Choosing the backend that carries a Topology's collectives and the kernels that encode and decode their messages.

torch    torch's process groups, with Triton kernels on a GPU: any device, any format
nccl     CUDA tensors: quantize, transfer and decode pipelined in chunks, in C++
auto     torch, until nccl is measured to be faster

All backends and all kernels give the same bits. There is no silent fallback: a call that a backend does not support
raises an error with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Literal, get_args

from zcomm._base.arguments import check_choice
from zcomm._kernels import kernels, native_calls, on_cuda, on_triton
from zcomm._kernels.on_cuda import driver_unavailable_reason
from zcomm._transport.nccl_library import is_emulated, nccl_library
from zcomm._transport.store_exchange import exchange_texts
from zcomm.errors import BackendUnavailableError, ConfigError

BackendName = Literal["torch", "nccl"]
BackendWish = Literal["auto", "torch", "nccl"]
KernelsName = Literal["auto", "native", "triton", "cuda", "reference"]
AUTO: BackendName = "torch"
"""What ``backend="auto"`` is."""


def check_names(backend: object, kernels: object) -> None:
    check_choice("backend", backend, get_args(BackendWish), ConfigError)
    check_choice("kernels", kernels, get_args(KernelsName), ConfigError)


def resolved(name: BackendWish) -> BackendName:
    return AUTO if name == "auto" else name


def chosen_backend(name: BackendName | None, owned: BackendName | None) -> BackendName:
    """The backend of a call with ``backend=name``. None means ``owned``, the Topology's, or else "auto".

    Raises:
        ConfigError: ``name`` is not a backend.
    """
    if name is None:
        return owned or AUTO
    check_choice("backend", name, get_args(BackendName), ConfigError)
    return name


def nccl_unavailable_reason() -> str:
    """Why ``backend="nccl"`` is unavailable in this process; empty if it is available."""
    try:
        native = kernels.native()
        if is_emulated():
            return ""
        if not native.build_info()["cuda"]:
            return (
                "the native module was built without CUDA: build it where nvcc is found, "
                "with ZCOMM_CUDA=ON pip install --no-build-isolation ."
            )
        if reason := driver_unavailable_reason(native.build_info()["cuda"]):
            return reason
        nccl_library()
    except BackendUnavailableError as error:
        return str(error)
    return ""


def unavailable_reason(backend: BackendWish, chosen: KernelsName) -> str:
    """Why the backend or the kernels are unavailable in this process, on any device; empty if they are available."""
    if backend == "nccl" and (reason := nccl_unavailable_reason()):
        return f"backend='nccl' cannot be used: {reason}"
    reasons = {
        "native": native_calls.unavailable_reason,
        "cuda": on_cuda.unavailable_reason,
        "triton": lambda chosen: on_triton.unavailable_reason("cuda", chosen),
    }
    reason = reasons[chosen](chosen) if chosen in reasons else ""
    return f"kernels={chosen!r} cannot be used: {reason}" if reason else ""


def agree_on_backend(
    backend: BackendWish, chosen: KernelsName, ranks: Sequence[int], timeout: timedelta | None
) -> None:
    """Raise BackendUnavailableError on all ``ranks`` unless backend and kernels are available on all of them.

    Every rank passes the same names. Collective, through torch.distributed's store; for choices that are always
    available it returns at once.
    """
    if backend != "nccl" and chosen in ("auto", "reference"):
        return
    reason = unavailable_reason(backend, chosen)
    found = exchange_texts(ranks, reason, lane="carrier", timeout=timeout) if len(ranks) > 1 else [reason]
    if reason and len(set(found)) == 1:
        raise BackendUnavailableError(reason)
    lines = [f"  rank {rank}: {text}" for rank, text in enumerate(found) if text]
    if lines:
        raise BackendUnavailableError("backend and kernels must be available on every rank:\n" + "\n".join(lines))


def unserved_reason(chosen: KernelsName, device_type: str) -> str:
    """Why ``kernels=chosen`` do not support tensors on ``device_type``; empty if they do."""
    if chosen == "triton":
        return on_triton.unavailable_reason(device_type, chosen)
    wanted = {"cuda": "cuda", "native": "cpu"}.get(chosen, device_type)
    return "" if wanted == device_type else f"they take tensors in {'GPU' if wanted == 'cuda' else 'host'} memory"
