"""The hardware that ``zero plan`` plans for: nodes, memory, rates and latencies; and known clusters by name."""

from __future__ import annotations

from dataclasses import dataclass

from zcomm import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal nodes of equal devices. GB is 10^9 bytes, GiB 2^30 bytes, Gbit 10^9 bits. All rates are peak rates.

    Default latencies are those of NCCL's own model for its ring and protocol "Simple": 8.4 us, and 3.4 us a step on
    NVLink or 9.6 us on a network (``src/graph/tuning.cc``). An exchange counts as one step, whatever the number of
    ranks, because its messages are in flight at the same time.
    """

    num_nodes: int = 1
    ranks_per_node: int = 8
    device_gib: float = 80.0
    """Memory of a device."""
    device_gbps: float = 2000.0
    """GB/s of the device's memory, reading and writing together."""
    tflops: float = 312.0
    """TFLOP/s of a device, in the precision of the matrix products."""
    within_gbps: float = 300.0
    """GB/s that a device can send to others of its node."""
    between_gbit: float = 800.0
    """Gbit/s that a node can send to other nodes."""
    within_us: float = 11.8
    """Latency of an exchange inside the node, in microseconds."""
    between_us: float = 18.0
    """Latency of an exchange between nodes, in microseconds."""
    host_gib: float = 1024.0
    """Host memory of a node."""
    host_gbps: float = 200.0
    """GB/s of a node's host memory, reading and writing together."""
    pcie_gbps: float = 12.0
    """GB/s between a device and its host, each way, while all devices copy."""
    nvme_gib: float = 8192.0
    """NVMe storage of a node."""
    nvme_read_gbps: float = 10.0
    """GB/s of all disks of a node together."""
    nvme_write_gbps: float = 5.0
    ranks_per_processor: float = 1.0
    """Ranks that share a processor: one computes while messages of the others are in flight."""

    def __post_init__(self) -> None:
        """Raise ConfigError for values that are too small."""
        for name in self.__slots__:
            value = getattr(self, name)
            least = 1 if name in ("num_nodes", "ranks_per_node", "ranks_per_processor") else 0
            if not value >= least:
                raise ConfigError(f"{name} must be at least {least}: {name}={value}")

    @property
    def world_size(self) -> int:
        """Number of ranks, one for each device."""
        return self.num_nodes * self.ranks_per_node


def _dgx2(num_nodes: int, between_gbit: float = 800.0) -> Cluster:
    """Nodes of 16 V100 with 32 GB, as in ZeRO-Infinity, section 8, and ZeRO++, section 4.1."""
    return Cluster(
        num_nodes=num_nodes,
        ranks_per_node=16,
        device_gib=32,
        device_gbps=900,
        tflops=125,
        within_gbps=150,
        between_gbit=between_gbit,
        host_gib=1536,
        host_gbps=200,
        pcie_gbps=3.0,
        nvme_gib=28e12 / 2**30,
        nvme_read_gbps=25.6,
        nvme_write_gbps=25.6,
    )


CLUSTERS = {
    "8xa100": Cluster(),
    "8xh100": Cluster(device_gbps=3350, tflops=989, within_gbps=450, between_gbit=3200, host_gib=2048, pcie_gbps=50),
    "dgx2": _dgx2(1),
    "24xdgx2-100gbit": _dgx2(24, 100),
    "24xdgx2-400gbit": _dgx2(24, 400),
    "24xdgx2": _dgx2(24),
    "32xdgx2": _dgx2(32),
    "8xv100": Cluster(device_gib=32, device_gbps=900, tflops=125, within_gbps=150, between_gbit=100, host_gib=768),
}
"""Clusters by name; the command's options change their numbers of nodes and rates."""
