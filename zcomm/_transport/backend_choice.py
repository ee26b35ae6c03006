"""Which backend carries the collectives of a Topology, and which kernels encode and decode for them.

torch    torch's process groups, with Triton's kernels between them on a GPU: any device, any format
nccl     CUDA tensors: quantize, transfer and decode of a message pipelined in chunks, without Python between them
auto     torch, until the other is measured to be faster

All backends and all kernels give the same bits. A call that a backend cannot serve is refused, with the reason, never
handed to the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Literal, get_args

from zcomm._base.arguments import check_choice
from zcomm._kernels import kernels, native_calls, on_cuda, on_triton
from zcomm._kernels.on_cuda import driver_unavailable_reason
from zcomm._transport.nccl_library import is_emulated, nccl_library
from zcomm._transport.store_exchange import meet
from zcomm.errors import BackendUnavailableError, ConfigError

BackendName = Literal["torch", "nccl"]
BackendWish = Literal["auto", "torch", "nccl"]
KernelsName = Literal["auto", "native", "triton", "cuda", "reference"]
AUTO: BackendName = "torch"
"""What ``backend="auto"`` is."""


def check_names(backend: object, kernels: object) -> None:
    """Raise ConfigError unless there are such a backend and such kernels."""
    check_choice("backend", backend, get_args(BackendWish), ConfigError)
    check_choice("kernels", kernels, get_args(KernelsName), ConfigError)


def resolved(name: BackendWish) -> BackendName:
    """What ``name`` is, of those that there are."""
    return AUTO if name == "auto" else name


def chosen_backend(name: BackendName | None, owned: BackendName | None) -> BackendName:
    """The backend of a call that was given ``backend=name``; None: the one that its Topology has, ``owned``, or "auto".

    Raises:
        ConfigError: There is no such backend.
    """
    if name is None:
        return owned or AUTO
    check_choice("backend", name, get_args(BackendName), ConfigError)
    return name


def nccl_unavailable_reason() -> str:
    """Why the communicator over NCCL cannot be used in this process; empty if it can."""
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
    """Why this process cannot have them, whatever the device; empty if it can."""
    if backend == "nccl" and (reason := nccl_unavailable_reason()):
        return f"backend='nccl' cannot be used: {reason}"
    reasons = {
        "native": native_calls.unavailable_reason,
        "cuda": on_cuda.unavailable_reason,
        "triton": lambda chosen: on_triton.unavailable_reason("cuda", chosen),
    }
    reason = reasons[chosen](chosen) if chosen in reasons else ""
    return f"kernels={chosen!r} cannot be used: {reason}" if reason else ""


def agree_on_carrier(
    backend: BackendWish, chosen: KernelsName, ranks: Sequence[int], timeout: timedelta | None
) -> None:
    """Raise BackendUnavailableError on every one of ``ranks`` unless all of them can have both.

    Collective, through torch.distributed's store, but where what was asked for is always there. All ask for the same.
    """
    if backend != "nccl" and chosen in ("auto", "reference"):
        return
    reason = unavailable_reason(backend, chosen)
    found = meet(ranks, reason, lane="carrier", timeout=timeout) if len(ranks) > 1 else [reason]
    if reason and len(set(found)) == 1:
        raise BackendUnavailableError(reason)
    lines = [f"  rank {rank}: {text}" for rank, text in enumerate(found) if text]
    if lines:
        raise BackendUnavailableError("not every rank can have what was asked for:\n" + "\n".join(lines))


def unserved_reason(chosen: KernelsName, device_type: str) -> str:
    """Why ``kernels=chosen`` do not encode tensors on devices of this type; empty if they do."""
    if chosen == "triton":
        return on_triton.unavailable_reason(device_type, chosen)
    wanted = {"cuda": "cuda", "native": "cpu"}.get(chosen, device_type)
    return "" if wanted == device_type else f"they take tensors in {'GPU' if wanted == 'cuda' else 'host'} memory"
