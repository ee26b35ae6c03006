"""The NVIDIA driver of this machine, asked of libcuda itself: nothing of CUDA is linked, so all imports without one.

A program that was built with CUDA m.n runs on a driver of CUDA m.0 or later; an older one fails every call.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

__all__ = ["driver_cuda", "driver_description", "driver_unavailable_reason"]

LIBRARY = "libcuda.so.1"
FIRST_DRIVERS = {11: 450, 12: 525, 13: 580}
"""Major version of CUDA -> the first driver of it on Linux."""


@cache
def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA that the driver serves, (13, 0); None without a driver."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    version = ctypes.c_int(0)
    if library.cuDriverGetVersion(ctypes.byref(version)) != 0 or version.value <= 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def driver_description() -> str:
    """The driver and its CUDA, or that there is none."""
    cuda = driver_cuda()
    if cuda is None:
        return f"none: there is no {LIBRARY}"
    return f"of CUDA {cuda[0]}.{cuda[1]}{_release()}"


def _release() -> str:
    """Of the driver itself, as far as the kernel module tells it."""
    file = Path("/proc/driver/nvidia/version")
    words = file.read_text().split() if file.is_file() else []
    numbers = [word for word in words if word[:1].isdecimal() and "." in word]
    return f", release {numbers[0]}" if numbers else ""


def driver_unavailable_reason(built: str) -> str:
    """Why CUDA code built with version ``built`` ("13.0.88") cannot run here, with the remedy; empty if it can."""
    major = int(built.partition(".")[0]) if built else 0
    cuda = driver_cuda()
    if not built or (cuda is not None and cuda[0] >= major):
        return ""
    number = FIRST_DRIVERS.get(major)
    wanted = f"driver {number} or later" if number else f"a driver of CUDA {major}.0 or later"
    command = f" (Ubuntu: sudo apt install nvidia-driver-{number})" if number else ""
    if cuda is None:
        return f"there is no NVIDIA driver ({LIBRARY}): install {wanted}{command}"
    return (
        f"the NVIDIA driver is too old: {driver_description()}, and the CUDA kernels are built with CUDA "
        f"{'.'.join(built.split('.')[:2])}. Install {wanted}{command}, or compile them with CUDA {cuda[0]}: "
        "ZCOMM_CUDA=ON pip install . in a checkout; Triton's kernels run on this driver"
    )
