"""What a SageMaker training job says, in files below ``/opt/ml`` and in variables.

Sources: aws/sagemaker-training-toolkit (``environment.py``, ``mpi.py``, ``torch_distributed.py``),
aws/sagemaker-pytorch-training-toolkit (``training.py``), aws/sagemaker-python-sdk 3 (``container_drivers``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_smddp.launchers.launch import Environ, Launch, Launcher, Notes

PORT = 7777  # of both SDKs
# Of SDK 2's settings, to the keys of its `distribution=`.
_FLAGS = {
    "sagemaker_mpi_enabled": "mpi",
    "sagemaker_pytorch_ddp_enabled": "pytorchddp",
    "sagemaker_torch_distributed_enabled": "torch_distributed",
    "sagemaker_distributed_dataparallel_enabled": "smdistributed dataparallel",
    "sagemaker_pytorch_xla_multi_worker_enabled": "pytorchxla",
    "sagemaker_parameter_server_enabled": "parameter_server",
    "sagemaker_multi_worker_mirrored_strategy_enabled": "multi_worker_mirrored_strategy",
}


@dataclass(frozen=True)
class Job:
    """A SageMaker training job, as one of its hosts sees it.

    Attributes:
        current_host: this host's name.
        hosts: names of the hosts that train, in the order of their node ranks but for the master, which is node 0.
        interface: name of the network interface.
    """

    current_host: str
    hosts: tuple[str, ...]
    interface: str | None


def base_directory(environ: Environ) -> Path:
    """``/opt/ml``, or what ``SAGEMAKER_BASE_DIR`` says."""
    return Path(environ.get("SAGEMAKER_BASE_DIR") or "/opt/ml")


def read_job(environ: Environ) -> Job | None:
    """The job that this process belongs to; None outside of SageMaker.

    Raises:
        ValueError: a file or a variable cannot be understood; the message names it.
    """
    resources = _config("resourceconfig.json", environ)
    if resources is None:
        if not environ.get("SM_HOSTS") or not environ.get("SM_CURRENT_HOST"):
            return None
        resources = {
            "hosts": parse_json(environ["SM_HOSTS"], "SM_HOSTS"),
            "current_host": environ["SM_CURRENT_HOST"],
            "network_interface_name": environ.get("SM_NETWORK_INTERFACE_NAME"),
        }
    is_sdk3 = "SM_HOST_COUNT" in environ or "SM_DISTRIBUTED_CONFIG" in environ
    # Launchers of SDK 2 number the hosts in the order of the instance groups, everyone else in that of their names,
    # by which `algo-10` comes before `algo-2`.
    hosts = tuple(sorted(resources["hosts"]))
    if launched_by(environ) and not is_sdk3:
        hosts = _launched_hosts(resources, environ)
    return Job(resources["current_host"], hosts, resources.get("network_interface_name"))


def launched_by(environ: Environ) -> list[str]:
    """The keys of SDK 2's ``distribution=`` that the job was started with."""
    parameters = _parameters(environ)
    # Hyperparameters are texts that hold JSON; the variable holds the values themselves.
    return [name for flag, name in _FLAGS.items() if str(parameters.get(flag)).strip('" ').lower() == "true"]


def _parameters(environ: Environ) -> dict[str, Any]:
    """The SDK's own ``sagemaker_...`` settings: a variable, or on hosts where mpirun forgot it, hyperparameters."""
    text = environ.get("SM_FRAMEWORK_PARAMS")
    found: dict[str, Any] = parse_json(text, "SM_FRAMEWORK_PARAMS") if text else hyperparameters(environ)
    return found


def hyperparameters(environ: Environ) -> dict[str, Any]:
    """What the job's file has: texts that hold JSON. Empty if there is none."""
    return {**(_config("hyperparameters.json", environ) or {})}


def _config(name: str, environ: Environ) -> Any:
    """What a file of SageMaker's has; None where it is not there."""
    file = base_directory(environ) / "input" / "config" / name
    return parse_json(file.read_text(), str(file)) if file.is_file() else None


def parse_json(text: str, source: str) -> Any:
    """What ``text`` holds; raises ``ValueError`` with its ``source``."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source} is not valid JSON: {error}. SageMaker writes it; do not change it.") from None


def _launched_hosts(resources: Mapping[str, Any], environ: Environ) -> tuple[str, ...]:
    """The hosts on which a launcher of SDK 2 starts processes, in its order, which is not that of ``hosts``."""
    groups = resources.get("instance_groups")
    if not groups:  # local mode
        return tuple(resources["hosts"])
    # The instance groups that train, as the user has named them; else this host's own.
    wanted = _parameters(environ).get("sagemaker_distribution_instance_groups")
    if isinstance(wanted, str):
        wanted = parse_json(wanted, "sagemaker_distribution_instance_groups")
    names = wanted or [resources.get("current_group_name", "homogeneousCluster")]
    return tuple(host for group in groups if group["instance_group_name"] in names for host in group["hosts"])


def add(notes: Notes, launcher: Launcher, job: Job) -> None:
    """Note what the job says beyond the launcher: nodes, the meeting place, the network, and what contradicts."""
    # What is noted first counts, so what was given and what the launcher has said stay as they are.
    # By node rank: the master has to be node 0, as it serves the store.
    master = notes["main_address"] or notes.environ.get("SM_MASTER_ADDR")
    order = tuple(sorted(job.hosts, key=lambda host: host != master))
    notes.put("hosts", order)
    notes.put("interface", job.interface)
    notes.put("platform", "SageMaker")
    if launcher in ("lightning", "mpirun"):  # the others set address and port
        notes.put("main_address", order[0] if len(order) > 1 else "127.0.0.1")
        notes.numbers(main_port="SM_MASTER_PORT")
        notes.put("main_port", PORT)
    if job.current_host not in order:
        notes.problems.append(
            f"Host {job.current_host} is in none of the instance groups that train ({', '.join(order)}). "
            "Train on those groups only, or name this host's group in distribution={'instance_groups': ...} too.",
        )
    elif launcher == "lightning":  # one process a host: its node rank is all that has to be known
        notes.put("node_rank", order.index(job.current_host))
        notes.put("num_nodes", len(order))


def network_variables(launch: Launch) -> dict[str, str]:
    """What to set, where it is not set yet, before NCCL or gloo start. Empty elsewhere than on SageMaker."""
    if not launch.interface:
        return {}
    return {"NCCL_SOCKET_IFNAME": launch.interface, "GLOO_SOCKET_IFNAME": launch.interface}
