"""Nodes of a job: what a machine of its own sees. Network, process ids, /proc and host name are the node's.

Each node's process 1 starts the program and reaps what is left behind. When it is killed, so is all of the node.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests import warm
from tests.multinode.namespaces import Node, two_nodes, write_hosts

PORT = 29511
BLINK_S = 1.0


class Nodes:
    """Nodes of a job, which may have ``names``; ``mains``: a process outside of each that ends with its code."""

    def __init__(self, nodes: Sequence[Node], where: Path, names: Sequence[str] = ()) -> None:
        self._nodes, self._where, self._names = nodes, where, names
        self.mains: list[int] = []

    def torchrun(self, index: int) -> list[str]:
        """Its arguments on node ``index``."""
        where = [f"--master-addr={self._nodes[0].address}", f"--master-port={PORT}"]
        return [f"--nnodes={len(self._nodes)}", f"--node-rank={index}", *where]

    def start(self, commands: Sequence[Sequence[str]]) -> None:
        """Run ``commands[i]``, as :func:`warm.fork` does, on node i."""
        for index, (node, command) in enumerate(zip(self._nodes, commands, strict=True)):
            environment = node.environment() | {"NODE_RANK": str(index), "MASTER_ADDR": self._nodes[0].address}
            environment["MASTER_PORT"] = str(PORT)
            main = os.fork()
            if main == 0:
                self.be(index, command, environment)
            self.mains.append(main)

    def act(self, kind: str, index: int) -> None:
        """``node``: kill all of node ``index``; ``cut`` and ``blink``: take it off the network, the latter briefly."""
        if kind in ("cut", "blink"):
            self._nodes[index].cut()
        if kind == "blink":
            time.sleep(BLINK_S)
            self._nodes[index].mend()
        elif kind == "node":
            os.kill(int((self._where / f"node-{index}").read_text()), signal.SIGKILL)

    def be(self, index: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Become the process outside of node ``index``, which runs ``command``; ends with its code."""
        code = 70
        (self._where / "proc").mkdir(exist_ok=True)
        try:
            self._nodes[index].enter(self._names[index] if self._names else f"node{index}")
            first = os.fork()
            if first == 0:
                self._be_first(index, command, environment)
            (self._where / f"node-{index}").write_text(str(first))
            code = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
        finally:
            os._exit(code if code >= 0 else 128 - code)

    def _be_first(self, index: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        code: int | None = None
        try:
            Node.mount_own_proc(self._where / "proc")
            if self._names:
                Node.mount_hosts(write_hosts(self._nodes, self._names, self._where / f"hosts-{index}"))
            main = warm.fork(command, environment)
            while True:
                pid, status = os.wait()
                if pid == main:
                    code = os.waitstatus_to_exitcode(status)
        except ChildProcessError:
            code = 70 if code is None else code
        finally:
            os._exit(70 if code is None else code if code >= 0 else 128 - code)

    def be_apart(self, index: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """:meth:`be` in a session of its own, where programs are forked; what they print goes to ``output-INDEX``."""
        os.setsid()
        file = os.open(self._where / f"output-{index}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for target in (1, 2):
            os.dup2(file, target)
        warm.fork_programs()
        self.be(index, command, environment)


@contextmanager
def nodes_of(where: Path) -> Iterator[Nodes]:
    """Two nodes for the job of this directory."""
    with two_nodes() as nodes:
        yield Nodes(nodes, where)
