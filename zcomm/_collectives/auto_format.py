"""``format="auto"``: what ``zcomm probe`` found fastest on these links for this collective and size, else ``none``.

    probe file                 {"version": 1, "topologies": {"2x2 on 2 hosts": {"device": "cpu", "choices": {...}}}}
    choices                    {"all_gather": [[65536, "none", 2], [1048576, "int8", 2], ...], ...}
                               from so many bytes of the full tensor: formats (inside+between), hops

Without a probe of this shape of nodes, over a ProcessGroup, below the smallest probed size, and on another kind of
device, ``auto`` is ``none``: nothing is known of the links there, and rounding without a gain would be a loss. Below
the smallest probed size the hops are those of ``none`` there, if that was found fastest.

Invariants:
    A1  The first rank reads the file, once for a Topology, at the first use; the others get its table. So all ranks
        choose alike, whatever files they have.
    A2  What cannot be read is the same error on every rank.
    A3  Nothing is chosen but what the probe was allowed to try (its ``--formats``) for that collective, and ``none``;
        never stochastic rounding, for which a caller of ``auto`` gives no random numbers.
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
VERSION = 1
MOST_KNOWN = 4096
"""Calls of other sizes than these are rare; each takes a few hundred bytes."""


class ProbedChoice(NamedTuple):
    """The formats inside nodes and between them, and the hops."""

    inside: Format
    between: Format
    num_hops: int

    @classmethod
    def parse(cls, wire: str, num_hops: int) -> ProbedChoice:
        """``wire`` as ``int8``, or ``int8+int4`` for (inside, between)."""
        inside, _, between = wire.partition("+")
        if num_hops not in (1, 2):
            raise ConfigError(f"hops must be 1 or 2: hops={num_hops!r}")
        choice = cls(get_format(inside), get_format(between or inside), num_hops)
        if choice.inside.is_random or choice.between.is_random:
            raise ConfigError(f'format="auto" has no random numbers and never rounds stochastically: {wire}')
        return choice


NONE = ProbedChoice.parse("none", 2)


class Resolved(NamedTuple):
    """Formats for :func:`zcomm._transport.route.find_route`."""

    format: Any
    num_hops: int


@dataclass(frozen=True)
class Table:
    """The choices for the links of one Topology."""

    device: str = ""
    choices: dict[str, list[tuple[int, ProbedChoice]]] = field(default_factory=dict)
    """By operation, ascending in the bytes of the full tensor from which they hold."""
    links: tuple[Link, ...] = ()
    """Inside nodes and between them, as far as there are any."""
    known: dict[tuple[Any, ...], Resolved] = field(default_factory=dict, compare=False, repr=False)
    """What calls have been told before."""

    @property
    def has_one_hop(self) -> bool:
        """Whether any choice runs over all ranks at once."""
        return any(choice.num_hops == 1 for rows in self.choices.values() for _, choice in rows)

    def choose(self, operation: str, nbytes: int, device: torch.device) -> ProbedChoice:
        """For a full tensor of ``nbytes`` bytes, uncompressed."""
        rows = self.choices.get(operation, [])
        if not rows or device.type != self.device:
            return NONE
        index = bisect_right([smallest for smallest, _ in rows], nbytes) - 1
        found = rows[max(index, 0)][1]
        return found if index >= 0 or (found.inside, found.between) == (NONE.inside, NONE.between) else NONE

    @classmethod
    def parse(cls, path: str, text: str, *, shape: str) -> Table:
        """The table for nodes of ``shape`` in the ``text`` of a probe file; an empty one if they were not probed."""
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
                f"{path} is not what `zcomm probe` writes: {error!r} in {text[:100]!r}; delete it or probe again"
            ) from error


def _link(found: Mapping[str, Any]) -> Link:
    link = Link(float(found["latency_us"]) * 1e-6, float(found["bandwidth_gbps"]) * 1e9)
    if not (0 <= link.latency_s < math.inf and 0 < link.bytes_per_s < math.inf):
        raise ConfigError(f"latency_us and bandwidth_gbps must be finite, and a bandwidth positive: {dict(found)}")
    return link


def probe_path() -> Path:
    """``ZCOMM_PROBE``, or ``zcomm/probe.json`` in the user's cache folder."""
    if chosen := env.value("ZCOMM_PROBE"):
        return Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "zcomm" / "probe.json"


def shape_of(topology: Topology) -> str:
    """What tables are kept by: nodes, ranks per node, and on how many machines they are. Collective."""
    host = torch.tensor([zlib.crc32(socket.gethostname().encode())], dtype=torch.float64)
    hosts = len(set(control.gather_float64(host, topology).flatten().tolist()))
    return f"{topology.num_nodes}x{topology.ranks_per_node} on {hosts} host{'s' if hosts > 1 else ''}"


def table_of(topology: Topology) -> Table:
    """The table that all ranks of ``topology`` use; at the first use collective.

    Raises:
        ConfigError: The first rank's probe file is not one. The same on every rank.
    """
    if topology.auto_table is None:
        found = _from_first_rank(_read(probe_path()) if topology.rank == 0 else "", topology)
        shape = shape_of(topology)
        table = Table.parse(*found.split("\n", 1), shape=shape) if found else Table()
        topology.auto_table, topology.uses_world = table, table.has_one_hop
        topology.queue.links = table.links
    assert isinstance(topology.auto_table, Table), "auto_table is set here only"
    return topology.auto_table


def _read(path: Path) -> str:
    """The path, a new line and the content; empty if there is no such file."""
    try:
        return f"{path}\n{path.read_text()}"
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        return f"{path}\n{error}"  # no JSON: the same error on every rank


def _from_first_rank(text: str, topology: Topology) -> str:
    content = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
    length = torch.tensor([content.numel()])
    control.broadcast_(length, 0, topology)
    if topology.rank != 0:
        content = torch.empty(int(length), dtype=torch.uint8)
    control.broadcast_(content, 0, topology)
    return bytes(content.tolist()).decode().strip("\0")


def resolve(
    format: Any,
    operation: str,
    group: Any,
    tensor: Tensor,
    numel: int,
    *,
    first: Literal["intra", "inter"],
    numbering: Numbering = "rank",
) -> Resolved:
    """``format`` itself, or for ``"auto"`` the choice for a full tensor of ``numel`` elements like ``tensor``'s.

    The order of the formats is that of the hops, of which ``first`` is the first. Rows numbered local need two hops.
    """
    if not isinstance(format, str) or format != AUTO:
        return Resolved(format, 2)
    if not isinstance(group, Topology):
        return Resolved("none", 2)
    known, call = table_of(group).known, (operation, numel, tensor.dtype, tensor.device.type, first, numbering)
    found = known.get(call)
    if found is None:
        if len(known) >= MOST_KNOWN:
            known.clear()
        choice = table_of(group).choose(operation, numel * tensor.element_size(), tensor.device)
        pair = (choice.inside, choice.between) if first == "intra" else (choice.between, choice.inside)
        found = known[call] = Resolved(pair, choice.num_hops if numbering == "rank" else 2)
    return found
