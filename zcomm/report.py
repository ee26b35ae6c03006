"""The environment report of ``zcomm env``: what is available on this machine, and why something is not.

Nothing here communicates, starts a process or uses the network. Every fact is a line; a section is a table.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import platform
import re
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from zcomm._base import env
from zcomm._kernels import kernels, native_calls, on_cuda, on_triton
from zcomm._transport.nccl_library import nccl_description
from zcomm.errors import BackendUnavailableError, ConfigError

__all__ = ["Report", "collect", "table"]

Report = dict[str, dict[str, str]]
"""Section -> name -> value."""

TORCHRUN_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "NCCL_DEBUG",
    "CUDA_VISIBLE_DEVICES",
)
TESTED_TORCH = ((2, 11), (2, 13))
SIOCGIFADDR = 0x8915


def collect() -> Report:
    """All facts, by section."""
    return {
        "versions": _versions(),
        "available": _available(),
        "kernels": _kernels(),
        "torch": _torch(),
        "machine": _machine(),
        "network interfaces": _interfaces(),
        "environment": _environment(),
    }


def table(report: Report) -> str:
    """The report as text, one fact per line."""
    width = max(len(name) for section in report.values() for name in section) + 2
    lines: list[str] = []
    for title, section in report.items():
        lines.append(f"{title}:")
        lines += [f"  {name:<{width}}{value}" for name, value in section.items()]
    return "\n".join(lines)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _versions() -> dict[str, str]:
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    is_tested = TESTED_TORCH[0] <= release <= TESTED_TORCH[1]
    tested = f"{TESTED_TORCH[0][0]}.{TESTED_TORCH[0][1]} to {TESTED_TORCH[1][0]}.{TESTED_TORCH[1][1]}"
    return {
        "zcomm-zero": _version("zcomm-zero"),
        "python": platform.python_version(),
        "torch": torch.__version__ if is_tested else f"{torch.__version__} (outside the tested range {tested})",
        "numpy": _version("numpy"),
        "deepspeed": _version("deepspeed"),
        "triton": _version("triton"),
    }


def _available() -> dict[str, str]:
    """What can be used here, or what is missing and the command that installs it."""
    return {
        "native": _described(native_calls.unavailable_reason, kernels.native_description),
        "Triton": _described(lambda: on_triton.unavailable_reason("cuda"), lambda: _version("triton")),
        "CUDA": _described(
            _cuda_unavailable_reason, lambda: f"built with {kernels.native().build_info()['cuda']}; {_cuda()}"
        ),
        'NCCL of backend="nccl"': nccl_description(),
    }


def _described(reason: Callable[[], str], description: Callable[[], str]) -> str:
    found = _text_of(reason)
    return f"none: {found}" if found else description()


def _text_of(reason: Callable[[], str]) -> str:
    """The reason, or the error of an invalid setting, which must not prevent the report on it."""
    try:
        return reason()
    except (BackendUnavailableError, ConfigError) as error:
        return str(error)


def _cuda_unavailable_reason() -> str:
    """Why CUDA kernels and the NCCL communicator cannot run, whatever ZCOMM_KERNELS says; empty if they can."""
    built = kernels.native().build_info()["cuda"]
    if not built:
        return "the native module is built without CUDA; from source, where nvcc is: ZCOMM_CUDA=ON pip install ."
    if reason := on_cuda.driver_unavailable_reason(built):
        return reason
    if torch.version.cuda is None:
        return "this torch is built without CUDA: pip install --force-reinstall torch, from an index with CUDA builds"
    return "" if torch.cuda.is_available() else f"torch {torch.__version__} finds no GPU"


def _kernels() -> dict[str, str]:
    reason = _text_of(native_calls.unavailable_reason)
    native = f"PyTorch reference: {reason}" if reason else f"native ({kernels.native_description()})"
    return {
        "CPU tensors": _triton("cpu") if _text_of(lambda: env.value("ZCOMM_KERNELS")) == "triton" else native,
        "float64": "PyTorch reference: no other kernels support float64",
        "CUDA tensors": _cuda_tensors(),
        "files": _files(),
    }


def _files() -> str:
    try:
        return str(kernels.file_queue(1, 4096).engine)
    except (ConfigError, BackendUnavailableError) as error:
        return f"none: {error}"


def _cuda_tensors() -> str:
    try:
        reason, is_wanted = on_cuda.unavailable_reason(), env.value("ZCOMM_KERNELS") == "cuda"
    except ConfigError as error:
        return f"PyTorch reference: {error}"
    if is_wanted and reason:
        return f"none: ZCOMM_KERNELS=cuda, but {reason}"
    return f"{_triton('cuda')}; not CUDA: {reason}" if reason else "CUDA"


def _triton(device_type: str) -> str:
    if reason := _text_of(lambda: on_triton.unavailable_reason(device_type)):
        return f"PyTorch reference: {reason}" if device_type == "cuda" else f"none: {reason}"
    return f"Triton {_version('triton')}" + (", interpreted" if device_type == "cpu" else "")


def _torch() -> dict[str, str]:
    return {
        "CUDA": _cuda(),
        "NCCL": _nccl(),
        "gloo": "available" if dist.is_gloo_available() else "not in this build of torch",
        "process group": dist.get_backend() if dist.is_initialized() else "not initialized",
        "threads": str(torch.get_num_threads()),
    }


def _cuda() -> str:
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if not torch.cuda.is_available():
        return f"{torch.version.cuda}, but torch finds no usable GPU or driver"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"{torch.version.cuda}, {len(names)} x {', '.join(sorted(set(names)))}"


def _nccl() -> str:
    if not dist.is_nccl_available():
        return "not in this build of torch"
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _machine() -> dict[str, str]:
    usable = len(os.sched_getaffinity(0))
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "CPU": f"{_cpu_model()}, {os.cpu_count()} cores, {usable} usable",
        "memory": _memory(),
        "NVIDIA driver": on_cuda.driver_description(),
    }


def _first_field(path: str, name: str) -> str:
    file = Path(path)
    text = file.read_text(errors="replace") if file.is_file() else ""
    found = re.search(rf"^{name}\s*:(.*)", text, re.MULTILINE)
    return "" if found is None else found[1].strip()


def _cpu_model() -> str:
    return _first_field("/proc/cpuinfo", "model name") or platform.processor() or "unknown CPU"


def _memory() -> str:
    text = _first_field("/proc/meminfo", "MemTotal").removesuffix("kB").strip()
    return f"{int(text) / 2**20:.1f} GiB" if text.isdecimal() else "unknown"


def _interfaces() -> dict[str, str]:
    return {name: _interface(name) for _, name in socket.if_nameindex()} or {"none": "no network interface"}


def _interface(name: str) -> str:
    folder = Path("/sys/class/net") / name
    facts = [_ipv4_address(name), *_ipv6_addresses(name)]
    for file, unit in (("operstate", ""), ("speed", " Mbit/s")):
        try:
            value = (folder / file).read_text().strip()
        except OSError:  # a virtual interface has no speed
            continue
        if value and value != "-1":
            facts.append(value + unit)
    return ", ".join(facts)


def _ipv4_address(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
        except OSError:
            return "no IPv4 address"
    return socket.inet_ntoa(answer[20:24])


def _ipv6_addresses(name: str) -> list[str]:
    file = Path("/proc/net/if_inet6")
    rows = [line.split() for line in file.read_text().splitlines()] if file.is_file() else []
    return [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0])) for row in rows if row[-1] == name]


def _environment() -> dict[str, str]:
    ours = {name: os.environ.get(name, f"unset (default {v.default or 'none'!s})") for name, v in env.VARIABLES.items()}
    return ours | {name: os.environ[name] for name in TORCHRUN_VARIABLES if name in os.environ}
