"""Machines with names, on which launchers start interpreters of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.multinode.namespaces import Node, nodes_at_a_switch, write_hosts

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Machines:
    """Nodes with names that they know each other by.

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
