"""Nodes of a test: network namespaces of this machine, joined by virtual Ethernet devices; and machines with names."""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWPID, CLONE_NEWNET = 0x20000, 0x4000000, 0x20000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
# The first process of a machine: its children end when it is killed.
FIRST = 'hostname "$0" && mount --bind "$1" /etc/hosts && eval "$2" && shift 2 && "$@"; exit $?'


@dataclass(frozen=True)
class Node:
    """One namespace: its name, and its end of the link."""

    namespace: str
    interface: str
    address: str

    def command(self, *words: str) -> list[str]:
        """``words`` as a command inside this node."""
        return ["ip", "netns", "exec", self.namespace, *words]

    def machine(self, host: str, hosts: Path, *words: str, prepare: str = ":") -> list[str]:
        """``words`` as a command on a machine of its own here, which goes down when the command's process is killed.

        Host name, process ids, /proc and mounts are its own, and so is ``/etc/hosts``, which is the file ``hosts``.
        ``prepare``: shell commands that come first, such as more mounts.
        """
        new = ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        inside = ["nsenter", f"--net=/run/netns/{self.namespace}", *new]
        return [*inside, "sh", "-c", FIRST, host, str(hosts), prepare, *words]

    def environment(self) -> dict[str, str]:
        """Environment for a process of this node: gloo has to be told the interface."""
        return {**os.environ, "GLOO_SOCKET_IFNAME": self.interface}

    def cut(self) -> None:
        """Take it off the network, in which nobody is told: packets get lost, both ways."""
        _run(*self.command("ip", "link", "set", self.interface, "down"))

    def mend(self) -> None:
        """The reverse."""
        _run(*self.command("ip", "link", "set", self.interface, "up"))

    def enter(self, host: str) -> None:
        """Move this process here, under another host name. Children get process ids of their own, from 1."""
        with open(f"/run/netns/{self.namespace}") as file:
            _system("setns", file.fileno(), CLONE_NEWNET)
        _system("unshare", CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWPID)
        socket.sethostname(host)

    @staticmethod
    def mount_own_proc(outer: Path) -> None:
        """For the first child of a process that has entered: /proc with the new ids; the old one is at ``outer``."""
        _system("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
        _system("mount", b"/proc", bytes(outer), None, MS_BIND | MS_REC, None)
        _system("mount", b"proc", b"/proc", b"proc", 0, None)

    @staticmethod
    def mount_hosts(hosts: Path) -> None:
        """And after that: this file instead of ``/etc/hosts``."""
        _system("mount", bytes(hosts), b"/etc/hosts", None, MS_BIND, None)


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
            _set_up(node)
            shape = ["root", "tbf", "rate", rate, "burst", "128kb", "latency", "20ms"]
            _run(*node.command("tc", "qdisc", "add", "dev", node.interface, *shape))
        yield nodes
    finally:
        _delete(*(node.namespace for node in nodes))


@contextmanager
def nodes_at_a_switch(count: int) -> Iterator[tuple[Node, ...]]:
    """``count`` nodes, each with a link to a bridge in one more namespace; everything is gone afterwards."""
    tag = secrets.token_hex(3)
    nodes = tuple(Node(f"n{i}{tag}", "eth0", f"10.77.0.{i + 1}") for i in range(count))
    switch = ["-n", f"s{tag}"]
    try:
        _run("ip", "netns", "add", f"s{tag}")
        _run("ip", *switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", *switch, "link", "set", "bridge", "up")
        for index, node in enumerate(nodes):
            _run("ip", "netns", "add", node.namespace)
            peer = ["peer", "name", f"p{index}", "netns", f"s{tag}"]
            _run("ip", "-n", node.namespace, "link", "add", node.interface, "type", "veth", *peer)
            _run("ip", *switch, "link", "set", f"p{index}", "master", "bridge", "up")
            _set_up(node)
        yield nodes
    finally:
        _delete(*(node.namespace for node in nodes), f"s{tag}")


def write_hosts(nodes: Sequence[Node], names: Sequence[str], path: Path) -> Path:
    """An ``/etc/hosts`` in which each node has its name."""
    lines = [f"{node.address} {name}" for node, name in zip(nodes, names, strict=True)]
    path.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    return path


@dataclass(frozen=True)
class Machines:
    """Nodes with names that they know each other by, on which launchers start interpreters of their own.

    Attributes:
        names: of the nodes.
        nodes: their networks.
        where: a directory that all see.
    """

    names: Sequence[str]
    nodes: Sequence[Node]
    where: Path

    def command(self, name: str, *words: str, prepare: str = ":") -> list[str]:
        """``words`` as a command on machine ``name``; each command has process ids and mounts of its own."""
        return self.nodes[self.names.index(name)].machine(name, self.where / "hosts", *words, prepare=prepare)

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """For a command of a machine. Nobody is told which network interface is the right one."""
        skipped = ("PYTEST_", "GLOO_", "SLURM_", "MASTER_", "OMPI_")
        own = {key: text for key, text in os.environ.items() if not key.startswith(skipped)}
        path = f"{Path(sys.executable).parent}:{own['PATH']}:/usr/sbin"
        ours = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": path}
        return {**own, **ours, **(more or {})}

    def run(
        self, name: str, words: Sequence[str], environment: Mapping[str, str] | None = None, timeout: float = 100.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on machine ``name`` to its end; stdout has stderr too."""
        return subprocess.run(
            self.command(name, *words), env=self.environment(environment), cwd=self.where, timeout=timeout,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip


@contextmanager
def machines(names: Sequence[str], where: Path) -> Iterator[Machines]:
    """Machines of these names; everything is gone afterwards but what still runs."""
    with nodes_at_a_switch(len(names)) as nodes:
        write_hosts(nodes, names, where / "hosts")
        yield Machines(names, nodes, where)


def _set_up(node: Node) -> None:
    _run(*node.command("ip", "address", "add", f"{node.address}/24", "dev", node.interface))
    _run(*node.command("ip", "link", "set", node.interface, "up"))
    _run(*node.command("ip", "link", "set", "lo", "up"))


def _delete(*namespaces: str) -> None:
    for namespace in namespaces:
        subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)


def _system(name: str, *arguments: int | bytes | None) -> None:
    """A function of the C library that Python has not, or not before 3.12."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}{arguments}: {os.strerror(ctypes.get_errno())}")


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)
