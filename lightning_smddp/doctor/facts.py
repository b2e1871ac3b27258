"""What can be read from one process: nothing is started, measured or sent."""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import os
import platform
import resource
import socket
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from lightning_smddp import __version__
from lightning_smddp.launchers.detection import detect
from lightning_smddp.launchers.sagemaker import network_variables

_PACKAGES = ("lightning", "pytorch-lightning", "deepspeed", "mpi4py", "sagemaker")
_SHARED_MEMORY = "/dev/shm"
_DRIVER = "/proc/driver/nvidia/version"
_EFA_DEVICES = "/sys/class/infiniband"


def look(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Plain values, as JSON carries them; what cannot be found out is None."""
    launch, problem = _launch(environ)
    return {
        "host": socket.gethostname(),
        "versions": _versions(),
        "launch": launch,
        "launch_problem": problem,
        "backends": _backends(),
        "accelerators": _accelerators(),
        "network": _network(launch, environ),
        "shared_memory": _shared_memory(),
        "processors": {
            "usable": _usable_processors(),
            "threads_of_a_rank": torch.get_num_threads(),
        },
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "sees_processes_end": _sees_processes_end(),
        "mpi_library": ctypes.util.find_library("mpi"),
    }


def _usable_processors() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _launch(environ: Mapping[str, str]) -> tuple[dict[str, Any] | None, str | None]:
    try:
        launch = detect(environ)
    except ValueError as error:
        return None, str(error)
    variables = network_variables(launch)
    told = {
        **asdict(launch),
        "sources": dict(launch.sources),
        "line": launch.describe(),
        "will_set": {name: value for name, value in variables.items() if name not in environ},
    }
    return told, None


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "lightning-smddp": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    for name in _PACKAGES:
        found[name] = _version(name)
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _backends() -> dict[str, bool]:
    """Which backends this build of torch has, by their names in ``torch.distributed``."""
    return {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }


def _accelerators() -> dict[str, Any]:
    count = 0
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
    names = [torch.cuda.get_device_name(i) for i in range(count)]
    return {"gpus": names, "torch_cuda": torch.version.cuda, "nvidia_driver": os.path.exists(_DRIVER)}


def _network(launch: Mapping[str, Any] | None, environ: Mapping[str, str]) -> dict[str, Any]:
    main_address = None
    if launch is not None and launch["main_address"] is not None:
        main_address = _resolved(str(launch["main_address"]))
    efa = []
    if os.path.isdir(_EFA_DEVICES):
        efa = os.listdir(_EFA_DEVICES)
    interfaces = [name for _, name in socket.if_nameindex()]
    problems = []
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = environ.get(variable, "")
        wanted = [name for name in value.removeprefix("=").split(",") if name and not value.startswith("^")]
        # NCCL takes beginnings of names, too.
        if wanted and not any(name.startswith(tuple(wanted)) for name in interfaces):
            problems.append(f"{variable}={value}: this machine has no such interface.")
    return {
        "interfaces": interfaces,
        "problems": problems,
        "own_name": _resolved(socket.gethostname()),
        "main_address": main_address,
        "rdma_devices": sorted(efa),
        "gloo_interface": environ.get("GLOO_SOCKET_IFNAME"),
    }


def _resolved(name: str) -> dict[str, Any]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return {"name": name, "addresses": [], "error": str(error)}
    numbers = {str(address[0]) for _, _, _, _, address in found}
    return {"name": name, "addresses": sorted(numbers), "error": None}


def _shared_memory() -> dict[str, int] | None:
    if not os.path.isdir(_SHARED_MEMORY):
        return None
    status = os.statvfs(_SHARED_MEMORY)
    return {"size": status.f_blocks * status.f_frsize, "free": status.f_bavail * status.f_frsize}


def _sees_processes_end() -> bool:
    """Whether the kernel has pidfds, by which the end of a rank is seen at once, and how it ended."""
    if not hasattr(os, "pidfd_open"):
        return False
    # The call is there wherever Python knows it, but kernels and sandboxes may refuse it.
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True
