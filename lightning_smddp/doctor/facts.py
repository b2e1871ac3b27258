"""What can be read from one process: nothing is started, measured or sent."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from lightning_smddp import __version__
from lightning_smddp.launchers.detection import detect
from lightning_smddp.launchers.sagemaker import network_variables

LIGHTNINGS = ("lightning", "pytorch-lightning", "lightning-fabric")  # the packages that it is published as
_PACKAGES = (*LIGHTNINGS, "deepspeed", "sagemaker")
_SHARED_MEMORY = "/dev/shm"
_DRIVER = "/proc/driver/nvidia/version"
_RDMA_DEVICES = "/sys/class/infiniband"


def look(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Plain values, as JSON carries them; what cannot be found out is None."""
    launch, problem = _launch(environ)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "host": socket.gethostname(),
        "versions": _versions(),
        "launch": launch,
        "launch_problem": problem,
        "backends": {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()},
        "accelerators": {
            "gpus": [torch.cuda.get_device_name(index) for index in range(gpus)],
            "torch_cuda": torch.version.cuda,
            "nvidia_driver": os.path.exists(_DRIVER),
        },
        "network": _network(launch, environ),
        "shared_memory": _shared_memory(),
        "processors": {"usable": len(os.sched_getaffinity(0)), "threads_of_a_rank": torch.get_num_threads()},
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }


def _launch(environ: Mapping[str, str]) -> tuple[dict[str, Any] | None, str | None]:
    try:
        launch = detect(environ)
    except ValueError as error:
        return None, str(error)
    variables = network_variables(launch)
    will_set = {name: value for name, value in variables.items() if name not in environ}
    return {**asdict(launch), "line": launch.describe(), "will_set": will_set}, None


def _versions() -> dict[str, str]:
    found = {"lightning-smddp": __version__, "torch": torch.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _network(launch: Mapping[str, Any] | None, environ: Mapping[str, str]) -> dict[str, Any]:
    main_address = None
    if launch is not None and launch["main_address"] is not None:
        main_address = _resolved(str(launch["main_address"]))
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
        "rdma_devices": sorted(os.listdir(_RDMA_DEVICES)) if os.path.isdir(_RDMA_DEVICES) else [],
        "gloo_interface": environ.get("GLOO_SOCKET_IFNAME"),
    }


def _resolved(name: str) -> dict[str, Any]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return {"name": name, "addresses": [], "error": str(error)}
    return {"name": name, "addresses": sorted({str(address[0]) for *_, address in found}), "error": None}


def _shared_memory() -> dict[str, int] | None:
    if not os.path.isdir(_SHARED_MEMORY):
        return None
    status = os.statvfs(_SHARED_MEMORY)
    return {"size": status.f_blocks * status.f_frsize, "free": status.f_bavail * status.f_frsize}
