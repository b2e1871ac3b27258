"""What one process sees of its machine and its job, and what is wrong there; nothing is started, measured or sent."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import torch

from lightning_smddp import __version__
from lightning_smddp.launchers.detection import detect
from lightning_smddp.launchers.launch import Launch, processors
from lightning_smddp.launchers.sagemaker import network_variables

_PACKAGES = ("lightning", "pytorch-lightning", "lightning-fabric", "deepspeed", "sagemaker")
_LEAST_SHARED_MEMORY = 2**30  # bytes
_DRIVER = "/proc/driver/nvidia/version"


@dataclass(frozen=True)
class Facts:
    """Of a process.

    Attributes:
        host: its name.
        launch: who has started it.
        will_set: variables of the network that a strategy sets, as they are not set yet.
        versions: of packages.
        gpus: their names.
        has_driver: NVIDIA's.
        interfaces: of the network.
        shared_memory: bytes of /dev/shm, and those that are free; None without it.
        processors: that this process may use.
        threads: that torch uses.
    """

    host: str
    launch: Launch
    will_set: dict[str, str]
    versions: dict[str, str]
    gpus: list[str]
    has_driver: bool
    interfaces: list[str]
    shared_memory: tuple[int, int] | None
    processors: int
    threads: int


@dataclass(frozen=True, order=True)
class Finding:
    """Something that is wrong; errors come first.

    Attributes:
        level: ``"error"``: training does not start or gives nothing; ``"warning"``: it is slower, or fragile.
        text: what it is, and what to do.
    """

    level: Literal["error", "warning"]
    text: str


def look(environ: Mapping[str, str] = os.environ) -> Facts:
    """The facts of this process."""
    try:
        launch = detect(environ)
    except ValueError as error:
        launch = Launch("lightning", problems=(f"{error} Start the job as docs/launchers.md shows.",))
    variables = network_variables(launch)
    shared_memory = None
    with suppress(FileNotFoundError):
        usage = shutil.disk_usage("/dev/shm")
        shared_memory = (usage.total, usage.free)
    return Facts(
        host=socket.gethostname(),
        launch=launch,
        will_set={name: value for name, value in variables.items() if name not in environ},
        versions=_versions(),
        gpus=[torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        has_driver=os.path.exists(_DRIVER),
        interfaces=[name for _, name in socket.if_nameindex()],
        shared_memory=shared_memory,
        processors=processors(),
        threads=torch.get_num_threads(),
    )


def _versions() -> dict[str, str]:
    found = {"lightning-smddp": __version__, "torch": torch.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def find(facts: Facts) -> list[Finding]:
    """What is wrong by these facts, errors first."""
    errors = [Finding("error", text) for text in facts.launch.problems]
    return errors + [Finding("warning", text) for text in _warnings(facts)]


def _warnings(facts: Facts) -> Iterator[str]:
    """What is wrong, and its cure."""
    ranks = facts.launch.local_world_size or 1
    gpus = len(facts.gpus)
    if facts.has_driver and not gpus:
        yield (
            f"NVIDIA's driver is there, but torch {facts.versions['torch']} sees no GPU. "
            "Look at `nvidia-smi` and CUDA_VISIBLE_DEVICES; without CUDA install another build of torch."
        )
    if 0 < gpus < ranks:
        yield (
            f"{ranks} ranks of this node, but {gpus} GPU(s) visible: measured on CPU. "
            "Let each rank see all GPUs of the node: it takes that of its local rank."
        )
    if sys.platform != "linux":
        yield f"Shared memory needs Linux, this is {sys.platform}: ranks of a node average over sockets."
    elif facts.shared_memory is None:
        yield "There is no /dev/shm: ranks of a node average over sockets. Mount a tmpfs at /dev/shm."
    elif facts.shared_memory[0] < _LEAST_SHARED_MEMORY:
        yield (
            f"/dev/shm holds {facts.shared_memory[0] / 2**20:.0f} MiB: too little for gradients and loaders. "
            "docker run --shm-size=8g, or an emptyDir of medium Memory at /dev/shm in Kubernetes."
        )
    # One thread each is the least that ranks can have.
    if facts.threads > 1 and ranks > 1 and ranks * facts.threads > facts.processors:
        yield (
            f"{ranks} ranks of {facts.threads} threads share {facts.processors} processors. "
            f"export OMP_NUM_THREADS={max(1, facts.processors // ranks)}"
        )
