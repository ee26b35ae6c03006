"""``deepspeed.accelerator``: the device of this process, by torch's modules for it."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch

from zcomm import ConfigError
from zero.compat.resident_memory import ResidentMemory


class DeepSpeedAccelerator:
    """GPUs of CUDA, or the CPU. What it does not define is torch.cuda's, or torch.cpu's and torch's tensor types."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._module: Any = torch.cuda if name == "cuda" else torch.cpu
        self._host = ResidentMemory()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name.endswith("Tensor") and not self._is_gpu:
            return getattr(torch, name)
        return getattr(self._module, name)

    @property
    def _is_gpu(self) -> bool:
        return self._name == "cuda"

    def device_name(self, device_index: int | None = None) -> str:
        """``"cuda"``, ``"cuda:1"`` or ``"cpu"``."""
        return self._name if device_index is None or not self._is_gpu else f"{self._name}:{device_index}"

    def current_device(self) -> Any:
        """The number of the current GPU, or ``"cpu"``."""
        return torch.cuda.current_device() if self._is_gpu else "cpu"

    def current_device_name(self) -> str:
        """The current device with its number."""
        return self.device_name(torch.cuda.current_device() if self._is_gpu else None)

    def device(self, device_index: int | None = None) -> Any:
        """A context manager for a GPU, or the CPU's device."""
        return torch.cuda.device(device_index) if self._is_gpu else torch.device("cpu")

    def set_device(self, device_index: int) -> None:
        """Use a GPU; nothing on a CPU."""
        if self._is_gpu:
            torch.cuda.set_device(device_index)

    def device_count(self) -> int:
        """GPUs; on a CPU the processes of this node (LOCAL_SIZE), or its cores."""
        if self._is_gpu:
            return torch.cuda.device_count()
        return int(os.environ.get("LOCAL_SIZE", "0")) or os.cpu_count() or 1

    def is_available(self) -> bool:
        """True."""
        return True

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for a GPU; nothing on a CPU."""
        if self._is_gpu:
            torch.cuda.synchronize(device_index)

    def is_synchronized_device(self) -> bool:
        """Whether operations are complete when they return."""
        return not self._is_gpu

    def communication_backend_name(self) -> str:
        """torch.distributed's backend for this device."""
        return "nccl" if self._is_gpu else "gloo"

    def is_bf16_supported(self) -> bool:
        """Whether bfloat16 is supported."""
        return torch.cuda.is_bf16_supported() if self._is_gpu else True

    def is_fp16_supported(self) -> bool:
        """Whether float16 is supported."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """The dtypes to train in."""
        return [torch.float, torch.half, torch.bfloat16]

    def manual_seed(self, seed: int) -> None:
        """Seed the current device's generator."""
        if self._is_gpu:
            torch.cuda.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices."""
        torch.manual_seed(seed)

    def random(self) -> Any:
        """torch's module of random numbers."""
        return torch.random

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """The state of the device's generator."""
        if not self._is_gpu:
            return torch.get_rng_state()
        return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Set the state of the device's generator."""
        if self._is_gpu:
            torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)
        else:
            torch.set_rng_state(new_state)

    def empty_cache(self) -> None:
        """Return cached GPU memory."""
        if self._is_gpu:
            torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes of tensors on the GPU; on a CPU, of this process."""
        return torch.cuda.memory_allocated(device_index) if self._is_gpu else self._host.now()

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most of these bytes since :meth:`reset_peak_memory_stats`."""
        return torch.cuda.max_memory_allocated(device_index) if self._is_gpu else self._host.peak()

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Bytes that torch holds on the GPU; on a CPU, of this process."""
        return torch.cuda.memory_reserved(device_index) if self._is_gpu else self._host.now()

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """The most of these bytes since :meth:`reset_peak_memory_stats`."""
        return torch.cuda.max_memory_reserved(device_index) if self._is_gpu else self._host.peak()

    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """torch.cuda's; on a CPU the bytes of this process, now and at most."""
        if self._is_gpu:
            return torch.cuda.memory_stats(device_index)
        return {"allocated_bytes.all.current": self._host.now(), "allocated_bytes.all.peak": self._host.peak()}

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Start counting the most bytes anew."""
        if self._is_gpu:
            torch.cuda.reset_peak_memory_stats(device_index)
        else:
            self._host.reset()

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the GPU's memory, or of this machine's."""
        return torch.cuda.mem_get_info(device_index)[1] if self._is_gpu else self._host.total()

    def available_memory(self, device_index: int | None = None) -> int:
        """Free bytes of the GPU's memory, or of this machine's."""
        return torch.cuda.mem_get_info(device_index)[0] if self._is_gpu else self._host.free()

    def initial_seed(self) -> int:
        """What the device's generator was seeded with."""
        return torch.cuda.initial_seed() if self._is_gpu else torch.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        """The device's generator."""
        return torch.cuda.default_generators[device_index] if self._is_gpu else torch.default_generator

    def range_push(self, msg: str) -> None:
        """Begin a range of NVTX; nothing on a CPU."""
        if self._is_gpu:
            torch.cuda.nvtx.range_push(msg)  # type: ignore[no-untyped-call]

    def range_pop(self) -> None:
        """End it."""
        if self._is_gpu:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is in pinned memory."""
        return self._is_gpu and tensor.is_pinned()

    def is_triton_supported(self) -> bool:
        """Whether Triton has this device."""
        return self._is_gpu

    def pin_memory(self, tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """``tensor`` in pinned memory; itself on a CPU."""
        return tensor.pin_memory() if self._is_gpu else tensor

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is on such a device."""
        return tensor.device.type == self._name

    def get_compile_backend(self) -> str:
        """torch.compile's default."""
        return "inductor"


@cache
def get_accelerator() -> DeepSpeedAccelerator:
    """The device type of this process."""
    return DeepSpeedAccelerator("cuda" if torch.cuda.is_available() else "cpu")


def set_accelerator(accel_obj: DeepSpeedAccelerator) -> None:
    """Accept the device that this process has.

    Raises:
        ConfigError: Another one.
    """
    if accel_obj._name != get_accelerator()._name:
        raise ConfigError(f"the accelerator of this process is {get_accelerator()._name}, not {accel_obj._name}")


def is_current_accelerator_supported() -> bool:
    """True."""
    return True
