"""Nodes of a test: network namespaces of this machine, joined by a pair of virtual Ethernet devices."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """One namespace: its name, and its end of the link."""

    namespace: str
    interface: str
    address: str

    def command(self, *words: str) -> list[str]:
        """``words`` as a command inside this node."""
        return ["ip", "netns", "exec", self.namespace, *words]

    def environment(self) -> dict[str, str]:
        """Environment for a process of this node: gloo has to be told the interface."""
        return {**os.environ, "GLOO_SOCKET_IFNAME": self.interface}


@contextmanager
def two_nodes(rate: str = "1gbit") -> Iterator[tuple[Node, Node]]:
    """Two nodes with a link of ``rate`` each way; everything is gone afterwards."""
    tag = secrets.token_hex(3)
    nodes = tuple(Node(f"n{i}{tag}", f"v{i}{tag}", f"10.77.0.{i + 1}") for i in range(2))
    try:
        for node in nodes:
            _run("ip", "netns", "add", node.namespace)
        _run("ip", "link", "add", nodes[0].interface, "type", "veth", "peer", "name", nodes[1].interface)
        for node in nodes:
            _run("ip", "link", "set", node.interface, "netns", node.namespace)
            _run(*node.command("ip", "address", "add", f"{node.address}/24", "dev", node.interface))
            _run(*node.command("ip", "link", "set", node.interface, "up"))
            _run(*node.command("ip", "link", "set", "lo", "up"))
            shape = ["root", "tbf", "rate", rate, "burst", "128kb", "latency", "20ms"]
            _run(*node.command("tc", "qdisc", "add", "dev", node.interface, *shape))
        yield nodes
    finally:
        for node in nodes:
            subprocess.run(["ip", "netns", "delete", node.namespace], capture_output=True)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)
