"""Emulated nodes: network namespaces of this machine, joined by a bridge, each with a link of limited rate.

    namespace node0            namespace switch            namespace node1
    eth0 10.77.0.1 <--veth-->  port0   bridge   port1  <--veth--> eth0 10.77.0.2

A process in a node has its own host name and hosts file (no DNS), and reaches the other nodes over real TCP. ``tc tbf``
at the node's end of its link limits the rate at which it sends. The machine's own network is not changed. This needs
Linux, root and iproute2: :func:`unavailable_reason` says what is missing.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUBNET = "10.77.0"
INTERFACE = "eth0"
STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


@dataclass(frozen=True)
class Node:
    """One emulated machine."""

    name: str
    """Its host name, which every node can look up."""
    namespace: str
    address: str

    def command(self, arguments: list[str]) -> list[str]:
        """Return the command that runs ``arguments`` inside this node."""
        rename = 'hostname "$0" && exec "$@"'
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", rename, self.name, *arguments]

    def environment(self) -> dict[str, str]:
        """Return this process's environment, with the network interface that gloo and NCCL must use."""
        return os.environ | {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE}


def unavailable_reason() -> str | None:
    """Return why nodes cannot be emulated here, or None if they can."""
    for tool in ("ip", "tc", "unshare", "hostname"):
        if shutil.which(tool) is None:
            return f"emulated nodes need the program {tool!r} (Debian: iproute2, util-linux, hostname)"
    if os.geteuid() != 0:
        return "emulated nodes need root, for network namespaces"
    probe = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, text=True, check=False)
    return f"network namespaces are not allowed here: {probe.stderr.strip()}" if probe.returncode else None


@contextmanager
def emulated_nodes(num_nodes: int, *, rate: str | None = None) -> Iterator[list[Node]]:
    """Make ``num_nodes`` nodes, and at the end kill what still runs in them and remove them.

    Args:
        num_nodes: 1 to 250.
        rate: Rate at which each node can send, as ``tc`` writes it (``200mbit``); None: no limit.

    Raises:
        ValueError: ``num_nodes`` is out of range.
        subprocess.CalledProcessError: ``ip`` or ``tc`` failed; whatever was made before is removed.
    """
    if not 1 <= num_nodes <= 250:
        raise ValueError(f"num_nodes must be 1 to 250: num_nodes={num_nodes}")
    prefix = f"zcomm{os.getpid()}"  # unique: several jobs of one machine may emulate nodes at a time
    switch = f"{prefix}switch"
    nodes = [Node(f"node{i}", f"{prefix}node{i}", f"{SUBNET}.{i + 1}") for i in range(num_nodes)]
    _remove_stale()
    stack = ExitStack()
    try:
        _add_namespace(stack, switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for index, node in enumerate(nodes):
            _write_name_service(stack, node, nodes)
            _add_namespace(stack, node.namespace)
            _connect(node, switch, f"port{index}")
            if rate is not None:
                _run("tc", "-n", node.namespace, "qdisc", "add", "dev", INTERFACE, "root", "tbf",
                     "rate", rate, "burst", "256kb", "latency", "200ms")  # fmt: skip
        yield nodes
    finally:
        with signals_deferred():  # or Ctrl-C during the removal would leave namespaces behind
            stack.close()


def _remove_stale() -> None:
    """Remove namespaces whose processes were killed (SIGKILL) before they could remove them."""
    for name in _namespaces():
        owner = re.match(r"zcomm(\d+)(node|switch)", name)
        if owner is not None and not Path("/proc", owner[1]).exists():
            _remove_namespace(name)
            _remove_name_service(Path("/etc/netns") / name)


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list", check=False).splitlines() if line.strip()]


def _run(*command: str, check: bool = True) -> str:
    """Return what ``command`` prints. It runs in its own session: a terminal's Ctrl-C would stop it half-way."""
    with signals_deferred():
        done = subprocess.run(command, check=check, capture_output=True, text=True, start_new_session=True)
    return done.stdout


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Defer signal handlers to the end of the block.

    Otherwise a handler could raise between the start of a process and the assignment of its handle, and nobody would
    ever stop that process. Blocking the signals is not enough: another thread may receive one, and Python then calls
    the handler in the main thread.
    """
    received: list[int] = []
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # Python runs handlers in this one only
        handlers = {number: signal.signal(number, lambda n, _: received.append(n)) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for number in dict.fromkeys(received):
            signal.raise_signal(number)


def _add_namespace(stack: ExitStack, name: str) -> None:
    stack.callback(_remove_namespace, name)  # before it is made: a signal in between would leave it behind
    _run("ip", "netns", "add", name)


def _remove_namespace(name: str) -> None:
    for pid in _run("ip", "netns", "pids", name, check=False).split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _run("ip", "netns", "delete", name, check=False)


def _write_name_service(stack: ExitStack, node: Node, nodes: list[Node]) -> None:
    """Write the node's /etc/hosts and /etc/nsswitch.conf; ``ip netns exec`` mounts them over the machine's."""
    folder = Path("/etc/netns") / node.namespace
    stack.callback(_remove_name_service, folder)
    folder.mkdir(parents=True)
    lines = ["127.0.0.1 localhost", *(f"{other.address} {other.name}" for other in nodes)]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    (folder / "nsswitch.conf").write_text("hosts: files\n")


def _remove_name_service(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # not empty: another job uses it
        folder.parent.rmdir()


def _connect(node: Node, switch: str, port: str) -> None:
    """Connect ``eth0`` of ``node`` to a port of the bridge."""
    inside = ("ip", "-n", node.namespace)
    _run(*inside, "link", "add", INTERFACE, "type", "veth", "peer", "name", port, "netns", switch)
    _run(*inside, "address", "add", f"{node.address}/24", "dev", INTERFACE)
    for interface in ("lo", INTERFACE):
        _run(*inside, "link", "set", interface, "up")
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
