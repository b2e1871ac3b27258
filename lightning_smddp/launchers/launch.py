"""What is known of a process's start: :class:`Launch`, and :class:`Notes`, with which it is put together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Environ = Mapping[str, str]
"""The environment of a process, such as ``os.environ``."""

Launcher = Literal["torchrun", "jsrun", "mpirun", "srun", "kubeflow", "lightning"]


@dataclass(frozen=True)
class Launch:
    """Who started this process, and what it said. Values are None where nobody said anything.

    Attributes:
        launcher: ``"lightning"`` is nobody: Lightning starts the other ranks of this node itself.
        rank: global rank.
        local_rank: rank inside the node.
        world_size: number of ranks.
        local_world_size: number of ranks on this node.
        node_rank: number of this node.
        num_nodes: number of nodes.
        main_address: name or address of rank 0's node.
        main_port: TCP port on it at which the ranks meet.
        interface: name of the network interface to use.
        hosts: names of the nodes, in the order of node ranks.
        platform: ``"SageMaker"``, or empty.
        problems: what cannot work, each with its cure.
    """

    launcher: Launcher
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    num_nodes: int | None = None
    main_address: str | None = None
    main_port: int | None = None
    interface: str | None = None
    hosts: tuple[str, ...] = ()
    platform: str = ""
    problems: tuple[str, ...] = ()

    @property
    def starts_ranks(self) -> bool:
        """Whether the launcher has started one process for each rank."""
        return self.launcher != "lightning"

    def check(self, num_devices: int, num_nodes: int) -> None:
        """Raise ``ValueError`` for what cannot work, with the values and the cure.

        Args:
            num_devices: ranks of a node that the Trainer (or Fabric) was asked for.
            num_nodes: nodes that it was asked for.
        """
        # What is wrong with the start itself comes alone: the numbers below follow from it.
        if self.problems:
            raise ValueError("\n".join(self.problems))
        if not self.starts_ranks:
            if self.num_nodes in (None, num_nodes):  # SageMaker alone says how many there are
                return
            raise ValueError(
                f"This SageMaker job has {self.num_nodes} nodes ({', '.join(self.hosts)}), but num_nodes={num_nodes}. "
                f"Set num_nodes={self.num_nodes}; for a training of its own on each node, give the plugin "
                "LightningEnvironment()."
            )
        asked = num_devices * num_nodes
        if self.world_size == asked and self.local_world_size in (None, num_devices):
            return
        here = "" if self.local_world_size is None else f", {self.local_world_size} of them on this node"
        raise ValueError(
            f"{self.launcher} started {self.world_size} ranks{here}, but num_nodes={num_nodes} and "
            f"devices={num_devices} ask for {asked}. Set num_nodes={self.num_nodes or '...'} and "
            f"devices={self.local_world_size or '...'}, or start as many as asked for."
        )

    def describe(self) -> str:
        """One line for the log, of what is known."""
        known = (
            ("rank {} of {}", self.rank, self.world_size),
            ("local rank {} of {}", self.local_rank, self.local_world_size),
            ("node {} of {}", self.node_rank, self.num_nodes),
            ("rank 0 at {} port {}", self.main_address, self.main_port),
            ("interface {}", self.interface, None),
        )
        parts = [text.format(value, total or "?") for text, value, total in known if value is not None]
        place = f" on {self.platform}" if self.platform else ""
        who = f"{self.launcher}{place}"
        if not self.starts_ranks:
            who = f"nobody{place}, so Lightning starts the ranks of a node"
        found = f": {'; '.join(parts)}" if parts else ""
        return f"Started by {who}{found}."


def processors() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Notes:
    """Values, as they are found: of two for one name the one noted first counts."""

    def __init__(self, environ: Environ) -> None:
        self.environ = environ
        self.values: dict[str, Any] = {}
        self.problems: list[str] = []  # what cannot work, each with its cure

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name)

    def put(self, name: str, value: Any) -> None:
        """Note a value, unless there is one already."""
        if value is not None:
            self.values.setdefault(name, value)

    def numbers(self, **variables: str) -> None:
        """Note the values of variables that are set. Raises ``ValueError`` for what is no number."""
        for name, variable in variables.items():
            value = self.environ.get(variable)
            if not value:
                continue
            if not value.strip().isdecimal():
                raise ValueError(f"{variable}={value!r} is not a number. Let the launcher set {variable}, or unset it.")
            self.put(name, int(value))
