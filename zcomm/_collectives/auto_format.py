"""``format="auto"``: the format that ``zcomm probe`` measured as fastest for a collective, size and topology.

    probe file                 {"version": 1, "topologies": {"2x2 on 2 hosts": {"device": "cpu", "choices": {...}}}}
    choices                    {"all_gather": [[65536, "none", 2], [1048576, "int8", 2], ...], ...}
                               bytes of the full tensor from which the row holds, formats (intra+inter), hops

``auto`` means ``none`` if this topology was not probed, over a ProcessGroup, below the smallest probed size, and on
another type of device: nothing is known of the links there, and rounding without a gain would be a loss. Below the
smallest probed size the number of hops is that of the smallest, if ``none`` was fastest there.

Invariants:
    A1  The first rank reads the file, once for each Topology at its first use, and the others get its table. So all
        ranks choose alike, whatever files they have; different choices would deadlock.
    A2  A file that cannot be read raises the same error on every rank.
    A3  Only formats that the probe was allowed to try (its ``--formats``) and ``none`` are chosen; never stochastic
        rounding, for which a caller of ``auto`` passes no random numbers.
"""

from __future__ import annotations

import json
import math
import os
import socket
import zlib
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from zcomm import control
from zcomm._base import env
from zcomm._formats.formats import Format, get_format
from zcomm._transport.topology import Numbering, Topology
from zcomm._transport.work import Link
from zcomm.errors import ConfigError, ZcommError

AUTO = "auto"
First = Literal["intra", "inter"]
"""The first hop, if there are two."""
VERSION = 1
MAX_CACHED_CALLS = 4096
"""Choices that a table caches. Each takes a few hundred bytes; training makes far fewer different calls."""


class ProbedChoice(NamedTuple):
    """One row of the table: the formats on each link class, and the number of hops."""

    inside: Format
    between: Format
    num_hops: int

    @classmethod
    def parse(cls, wire: str, num_hops: int) -> ProbedChoice:
        """``wire`` is ``int8``, or ``int8+int4`` for (inside the node, between nodes)."""
        inside, _, between = wire.partition("+")
        if num_hops not in (1, 2):
            raise ConfigError(f"hops must be 1 or 2: hops={num_hops!r}")
        choice = cls(get_format(inside), get_format(between or inside), num_hops)
        if choice.inside.is_random or choice.between.is_random:
            raise ConfigError(
                f'format="auto" must not round stochastically, since it has no random numbers: format={wire}'
            )
        return choice


NONE = ProbedChoice.parse("none", 2)


class Resolved(NamedTuple):
    """Arguments for :func:`zcomm._transport.route.find_route`."""

    format: Any
    num_hops: int


@dataclass(frozen=True)
class FormatTable:
    device: str = ""
    choices: dict[str, list[tuple[int, ProbedChoice]]] = field(default_factory=dict)
    """By operation: (bytes of the full tensor from which it holds, choice), ascending."""
    links: tuple[Link, ...] = ()
    """The measured links: intra-node, inter-node, if the topology has them."""
    cache: dict[tuple[Any, ...], Resolved] = field(default_factory=dict, compare=False, repr=False)
    """Choices of earlier calls, by their arguments."""

    @property
    def has_one_hop(self) -> bool:
        """Whether any choice is one hop over all ranks."""
        return any(choice.num_hops == 1 for rows in self.choices.values() for _, choice in rows)

    def choose(self, operation: str, nbytes: int, device: torch.device) -> ProbedChoice:
        """The choice for a full tensor of ``nbytes`` bytes before encoding."""
        rows = self.choices.get(operation, [])
        if not rows or device.type != self.device:
            return NONE
        index = bisect_right([smallest for smallest, _ in rows], nbytes) - 1
        found = rows[max(index, 0)][1]
        return found if index >= 0 or (found.inside, found.between) == (NONE.inside, NONE.between) else NONE

    @classmethod
    def parse(cls, path: str, text: str, *, shape: str) -> FormatTable:
        """The table for topologies of ``shape`` in the ``text`` of a probe file; empty if that shape was not probed."""
        try:
            facts: dict[str, Any] = json.loads(text)
            if facts["version"] != VERSION:
                raise ConfigError(f"version must be {VERSION}: version={facts['version']}")
            found = facts["topologies"].get(shape)
            if found is None:
                return cls()
            rows = {
                operation: sorted((int(nbytes), ProbedChoice.parse(wire, hops)) for nbytes, wire, hops in choices)
                for operation, choices in found["choices"].items()
            }
            links = tuple(_link(link) for link in found.get("links", {}).values())
            return cls(str(found["device"]), rows, links)
        except (ZcommError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
            raise ConfigError(
                f"{path} is not a file of `zcomm probe`: {error!r} in {text[:100]!r}; delete it or probe again"
            ) from error


def _link(found: Mapping[str, Any]) -> Link:
    link = Link(float(found["latency_us"]) * 1e-6, float(found["bandwidth_gbps"]) * 1e9)
    if not (0 <= link.latency_s < math.inf and 0 < link.bytes_per_s < math.inf):
        raise ConfigError(f"latency_us and bandwidth_gbps must be finite, and bandwidth_gbps positive: {dict(found)}")
    return link


def probe_path() -> Path:
    """``ZCOMM_PROBE``, or ``zcomm/probe.json`` in the user's cache folder."""
    if chosen := env.value("ZCOMM_PROBE"):
        return Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "zcomm" / "probe.json"


def shape_of(topology: Topology) -> str:
    """The key of a table in the probe file: nodes, ranks per node, and the number of machines. Collective."""
    host = torch.tensor([zlib.crc32(socket.gethostname().encode())], dtype=torch.float64)
    hosts = len(set(control.gather_float64(host, topology).flatten().tolist()))
    return f"{topology.num_nodes}x{topology.ranks_per_node} on {hosts} host{'s' if hosts > 1 else ''}"


def table_of(topology: Topology) -> FormatTable:
    """The table that all ranks of ``topology`` use. The first use is collective.

    Raises:
        ConfigError: The first rank's file is not a probe file. The same on every rank (A2).
    """
    if topology.auto_table is None:
        # An error on the first rank alone would leave the others in the broadcast: it is sent as text, too (A2).
        found = _from_first_rank(_read(probe_path()) if topology.rank == 0 else "", topology)
        shape = shape_of(topology)
        table = FormatTable.parse(*found.split("\n", 1), shape=shape) if found else FormatTable()
        topology.auto_table = table
        topology.uses_world |= table.has_one_hop
        topology.queue.links = table.links
    assert isinstance(topology.auto_table, FormatTable), "auto_table is set here only"
    return topology.auto_table


def _read(path: Path) -> str:
    """The path, a newline and the file's content; empty if there is no such file."""
    try:
        return f"{path}\n{path.read_text()}"
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        return f"{path}\n{error}"  # not JSON, so that parsing it raises on every rank


def _from_first_rank(text: str, topology: Topology) -> str:
    content = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
    length = torch.tensor([content.numel()])
    control.broadcast_(length, 0, topology)
    if topology.rank != 0:
        content = torch.empty(int(length), dtype=torch.uint8)
    control.broadcast_(content, 0, topology)
    return bytes(content.tolist()).decode().strip("\0")


def is_auto(format: object) -> bool:
    return isinstance(format, str) and format == AUTO


def resolve(
    format: Any, operation: str, group: Any, tensor: Tensor, numel: int, *, first: First, numbering: Numbering = "rank"
) -> Resolved:
    """Replace ``"auto"`` by the choice for a full tensor of ``numel`` elements of ``tensor``'s dtype and device.

    The formats are in the order of the hops; ``first`` names the first hop. Rows numbered local need two hops. Formats
    other than ``"auto"`` are returned as they are.
    """
    if not is_auto(format):
        return Resolved(format, 2)
    if not isinstance(group, Topology):
        return Resolved("none", 2)
    cache, call = table_of(group).cache, (operation, numel, tensor.dtype, tensor.device.type, first, numbering)
    found = cache.get(call)
    if found is None:
        if len(cache) >= MAX_CACHED_CALLS:
            cache.clear()
        choice = table_of(group).choose(operation, numel * tensor.element_size(), tensor.device)
        pair = (choice.inside, choice.between) if first == "intra" else (choice.between, choice.inside)
        found = cache[call] = Resolved(pair, choice.num_hops if numbering == "rank" else 2)
    return found
