"""Lightning's view of how this process was started, where its own is worse: under mpirun, on SageMaker, in a pod.

The same classes for both packages that Lightning is published as: ``lightning.py`` and ``lightning_fabric.py`` register
them with their ``ClusterEnvironment``. What is read, and from what, is in ``launchers/``.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only

from lightning_smddp.launchers.detection import detect
from lightning_smddp.launchers.launch import Launch
from lightning_smddp.launchers.mpi import DEFAULT_PORT, in_allocation_only
from lightning_smddp.launchers.sagemaker import network_variables

if TYPE_CHECKING:
    from lightning.fabric.plugins.environments import ClusterEnvironment as _Base
else:
    _Base = object


class LaunchEnvironment(_Base):
    """A ``ClusterEnvironment`` that says what :func:`~lightning_smddp.launchers.detection.detect` has found."""

    launch: Launch

    @classmethod
    def detect(cls) -> bool:
        """Whether it is the one that :func:`choose` takes."""
        return type(choose(object)) is cls

    def __init__(self) -> None:
        super().__init__()
        self.launch = detect()
        self._rank = self.launch.rank or 0
        self._world_size = self.launch.world_size or 1

    @property
    def creates_processes_externally(self) -> bool:
        """Whether the other ranks of this node are there already."""
        return self.launch.starts_ranks or "LOCAL_RANK" in os.environ

    @property
    def main_address(self) -> str:
        """Host name or address of global rank 0; this machine's loopback when the launcher names none."""
        return self.launch.main_address or "127.0.0.1"

    @property
    def main_port(self) -> int:
        """The port at which rank 0 waits for the others."""
        return self.launch.main_port or DEFAULT_PORT

    def world_size(self) -> int:
        """Ranks of the whole job: as the launcher says, or as Lightning does where it starts them itself."""
        return self._world_size

    def global_rank(self) -> int:
        """This process among all ranks: as the launcher says, or as Lightning does where it starts them itself."""
        return self._rank

    def local_rank(self) -> int:
        """Of this process on its node."""
        return self.launch.local_rank or 0 if self.launch.starts_ranks else int(os.environ.get("LOCAL_RANK", 0))

    def node_rank(self) -> int:
        """Number of this node, from 0; 0 where the launcher says nothing of nodes."""
        return self.launch.node_rank or 0

    def set_world_size(self, size: int) -> None:
        """Lightning's own count; a launcher's is not changed."""
        if not self.launch.starts_ranks:
            self._world_size = size

    def set_global_rank(self, rank: int) -> None:
        """Lightning's own count; a launcher's is not changed."""
        if not self.launch.starts_ranks:
            self._rank = rank
            setattr(rank_zero_only, "rank", rank)  # noqa: B010  mypy knows it as a function

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise ``ValueError``, with the cure, if the launcher started other ranks than were asked for."""
        self.launch.check(num_devices, num_nodes)

    def teardown(self) -> None:
        """Leave nothing to the next run that Lightning's own environment would not."""
        if not self.launch.starts_ranks:
            os.environ.pop("WORLD_SIZE", None)


class MPIRunEnvironment(LaunchEnvironment):
    """Ranks that ``mpirun`` of Open MPI, MPICH or Intel MPI started, without mpi4py.

    ``MASTER_ADDR`` and ``MASTER_PORT`` are kept where they are given. Else the ranks of one node meet on the loopback
    interface; for several nodes ``MASTER_ADDR`` has to be given.
    """


class SageMakerEnvironment(LaunchEnvironment):
    """A SageMaker training job, with any ``distribution=``."""


class PodEnvironment(LaunchEnvironment):
    """A pod of Kubeflow's PyTorchJob with one process, which Lightning has to be told about."""


def choose(alone: type[Any]) -> Any | None:
    """The cluster environment for this process, where Lightning's own choice is worse; else None.

    Args:
        alone: Lightning's class for a script that no launcher has started.
    """
    launch = detect()
    if launch.platform:
        return SageMakerEnvironment()
    if launch.launcher == "mpirun":
        return MPIRunEnvironment()
    if launch.launcher == "kubeflow":
        return PodEnvironment()
    return alone() if launch.launcher == "lightning" and in_allocation_only(os.environ) else None


def before_start(strategy: Any, verbose: bool) -> None:
    """What belongs before the first collective: say what was read, and prepare the network.

    Raises:
        ValueError: what the launcher has set cannot work; the message has the cure.
    """
    environment = strategy.cluster_environment
    launch = getattr(environment, "launch", None) or detect()
    given = any(cls.__name__ == "LightningEnvironment" for cls in type(environment).__mro__)  # asks no launcher
    if environment.creates_processes_externally and launch.starts_ranks and not given and launch.problems:
        raise ValueError(launch.problems[0])
    if verbose and not given and (launch.starts_ranks or launch.platform):
        rank_zero_info(launch.describe())
    # gloo and NCCL would fail with an interface that SageMaker's files name, and this host does not have.
    interfaces = [name for _, name in socket.if_nameindex()]
    for variable, value in network_variables(launch).items():
        if value in interfaces:
            os.environ.setdefault(variable, value)
