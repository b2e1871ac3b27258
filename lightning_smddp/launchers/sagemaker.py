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
# Of the SDK's settings, to the keys of its `distribution=`; in the order in which the PyTorch container looks at them.
FLAGS = {
    "sagemaker_mpi_enabled": "mpi",
    "sagemaker_pytorch_ddp_enabled": "pytorchddp",
    "sagemaker_torch_distributed_enabled": "torch_distributed",
    "sagemaker_distributed_dataparallel_enabled": "smdistributed dataparallel",
    "sagemaker_pytorch_xla_multi_worker_enabled": "pytorchxla",
    "sagemaker_parameter_server_enabled": "parameter_server",
    "sagemaker_multi_worker_mirrored_strategy_enabled": "multi_worker_mirrored_strategy",
}

# Instance types with EFA, AWS's network adapter; of these, those on which it does not reach the GPUs' memory by itself.
_EFA = {
    "ml.g4dn.8xlarge", "ml.g4dn.12xlarge", "ml.g5.48xlarge", "ml.p3dn.24xlarge", "ml.p4d.24xlarge", "ml.p4de.24xlarge",
    "ml.p5.48xlarge", "ml.p5e.48xlarge", "ml.p5en.48xlarge", "ml.p6e-gb200.36xlarge", "ml.trn1.32xlarge",
}  # fmt: skip
_WITHOUT_RDMA = {"ml.g4dn.8xlarge", "ml.g4dn.12xlarge", "ml.g5.48xlarge", "ml.p3dn.24xlarge"}


@dataclass(frozen=True)
class Job:
    """A SageMaker training job, as one of its hosts sees it.

    Attributes:
        current_host: this host's name.
        hosts: names of the hosts that train, in the order of their node ranks but for the master; see
            :func:`node_order`.
        distribution: the key of the SDK's ``distribution=`` (SDK 2), the class given as ``distributed=`` (SDK 3), or
            ``"none"``.
        interface: name of the network interface.
        instance_type: of this host.
        source: where this was read.
    """

    current_host: str
    hosts: tuple[str, ...]
    distribution: str
    interface: str | None
    instance_type: str
    source: str


def base_directory(environ: Environ) -> Path:
    """``/opt/ml``, or what ``SAGEMAKER_BASE_DIR`` says."""
    return Path(environ.get("SAGEMAKER_BASE_DIR") or "/opt/ml")


def read_job(environ: Environ, base_dir: str | Path | None = None) -> Job | None:
    """The job that this process belongs to; None outside of SageMaker.

    Raises:
        ValueError: a file or a variable cannot be understood; the message names it.
    """
    resources, source = _resources(environ, base_dir)
    if resources is None:
        return None
    parameters = parameters_of(environ, base_dir)
    is_sdk3 = "SM_HOST_COUNT" in environ or "SM_DISTRIBUTED_CONFIG" in environ
    distribution = _distribution(environ, parameters)
    # Launchers of SDK 2 number the hosts in the order of the instance groups, everyone else in that of their names,
    # by which `algo-10` comes before `algo-2`.
    try:
        if distribution == "none" or is_sdk3:
            hosts = tuple(sorted(resources["hosts"]))
        else:
            hosts = _launched_hosts(resources, parameters)
        return Job(
            current_host=resources["current_host"],
            hosts=hosts,
            distribution=distribution,
            interface=resources.get("network_interface_name"),
            instance_type=resources.get("current_instance_type") or "local",
            source=source,
        )
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{source} lacks {error}: it should have current_host, hosts and instance_groups, as SageMaker writes them."
        ) from None


def _distribution(environ: Environ, parameters: Mapping[str, Any]) -> str:
    """``Job.distribution``: SDK 3 says it in a variable of its own, SDK 2 by one of the flags."""
    config = environ.get("SM_DISTRIBUTED_CONFIG")
    if config:
        return "MPI" if "mpi_additional_options" in config else "Torchrun"
    for flag, name in FLAGS.items():
        if is_on(parameters.get(flag)):
            return name
    return "none"


def _resources(environ: Environ, base_dir: str | Path | None) -> tuple[dict[str, Any] | None, str]:
    """The hosts of the job, as its file or its variables have them, and where that was read; None outside of one."""
    file = _config_file("resourceconfig.json", environ, base_dir)
    if file.is_file():
        return parse_json(file.read_text(), str(file)), str(file)
    if environ.get("SM_HOSTS") and environ.get("SM_CURRENT_HOST"):
        resources = {
            "hosts": parse_json(environ["SM_HOSTS"], "SM_HOSTS", list),
            "current_host": environ["SM_CURRENT_HOST"],
            "current_instance_type": environ.get("SM_CURRENT_INSTANCE_TYPE"),
            "network_interface_name": environ.get("SM_NETWORK_INTERFACE_NAME"),
        }
        return resources, "SM_HOSTS"
    return None, ""


def parameters_of(environ: Environ, base_dir: str | Path | None = None) -> dict[str, Any]:
    """The SDK's own ``sagemaker_...`` settings: a variable, or on hosts where mpirun forgot it, hyperparameters."""
    text = environ.get("SM_FRAMEWORK_PARAMS")
    found = parse_json(text, "SM_FRAMEWORK_PARAMS") if text else hyperparameters(environ, base_dir)
    return {name: value for name, value in found.items() if name.startswith("sagemaker_")}


def hyperparameters(environ: Environ, base_dir: str | Path | None = None) -> dict[str, Any]:
    """What the job's file has: texts that hold JSON. Empty if there is none."""
    file = _config_file("hyperparameters.json", environ, base_dir)
    return dict(parse_json(file.read_text(), str(file))) if file.is_file() else {}


def _config_file(name: str, environ: Environ, base_dir: str | Path | None) -> Path:
    return Path(base_dir or base_directory(environ)) / "input" / "config" / name


def parse_json(text: str, source: str, kind: type = dict) -> Any:
    """What ``text`` holds, which has to be of this kind; raises ``ValueError`` with its ``source``."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source} is not valid JSON: {error}. SageMaker writes it; do not change it.") from None
    if not isinstance(value, kind):
        found = type(value).__name__
        raise ValueError(f"{source} holds {found}, not {kind.__name__}. SageMaker writes it.")
    return value


def is_on(value: Any) -> bool:
    """Hyperparameters are texts that hold JSON; the variable holds the values themselves."""
    return str(value).strip().strip('"').lower() == "true"


def _launched_hosts(resources: Mapping[str, Any], parameters: Mapping[str, Any]) -> tuple[str, ...]:
    """The hosts on which a launcher of SDK 2 starts processes, in its order, which is not that of ``hosts``."""
    groups = resources.get("instance_groups")
    if not groups:  # local mode
        return tuple(resources["hosts"])
    # The instance groups that train, as the user has named them; else this host's own.
    wanted = parameters.get("sagemaker_distribution_instance_groups") or []
    if isinstance(wanted, str):
        wanted = parse_json(wanted, "sagemaker_distribution_instance_groups", list)
    names = wanted or [resources.get("current_group_name", "homogeneousCluster")]
    return tuple(host for group in groups if group["instance_group_name"] in names for host in group["hosts"])


def node_order(job: Job, master: str | None) -> tuple[str, ...]:
    """The job's hosts by node rank: ``master``, which has to be node 0 as it serves the store, then the others."""
    return tuple(sorted(job.hosts, key=lambda host: host != master))


def add(notes: Notes, launcher: Launcher, job: Job) -> None:
    """Note what the job says beyond the launcher: nodes, the meeting place, the network, and what contradicts."""
    # What is noted first counts, so what the launcher has said stays as it is.
    master = notes.environ.get("MASTER_ADDR") or notes.environ.get("SM_MASTER_ADDR")
    order = node_order(job, master)
    notes.put("hosts", order, job.source)
    notes.put("interface", job.interface, job.source)
    notes.put("instance_type", job.instance_type, job.source)
    platform = f"SageMaker (distribution {job.distribution}, host {job.current_host})"
    notes.put("platform", platform, job.source)
    if launcher in ("lightning", "mpirun"):
        _add_meeting_place(notes, job, order)
    if job.current_host not in order:
        hosts = ", ".join(order)
        notes.problem(
            f"Host {job.current_host} is in none of the instance groups that train ({hosts}).",
            "Train on those groups only, or name this host's group in distribution={'instance_groups': ...} too.",
        )
    elif launcher == "mpirun":
        _check_mpirun(notes, job, order)
    elif launcher == "lightning":
        _add_nodes(notes, job, order)


def _add_meeting_place(notes: Notes, job: Job, order: tuple[str, ...]) -> None:
    """Address and port of rank 0, for launchers that do not set them themselves."""
    notes.text("main_address", "MASTER_ADDR")
    if len(order) > 1:
        given = notes.environ.get("SM_MASTER_ADDR") == order[0]
        source = "SM_MASTER_ADDR" if given else f"first host of {job.source}"
        notes.put("main_address", order[0], source)
    notes.put("main_address", "127.0.0.1", "one host")
    notes.numbers(main_port="MASTER_PORT")
    notes.numbers(main_port="SM_MASTER_PORT")
    notes.put("main_port", PORT, "SageMaker's default")


def _add_nodes(notes: Notes, job: Job, order: tuple[str, ...]) -> None:
    """One process a host: its node rank is all that has to be known."""
    node_rank = order.index(job.current_host)
    notes.put("node_rank", node_rank, f"{job.current_host} in {job.source}")
    notes.put("num_nodes", len(order), job.source)
    address = notes["main_address"]
    if len(order) > 1 and address not in order:
        hosts = ", ".join(order)
        notes.problem(
            f"MASTER_ADDR={address} is none of this job's hosts ({hosts}), so no host knows whether it is node 0.",
            "Leave MASTER_ADDR as SageMaker sets it, or set it to a host's name.",
        )


def _check_mpirun(notes: Notes, job: Job, order: tuple[str, ...]) -> None:
    """Whether mpirun started ranks on every host, with rank 0 where the others look for it."""
    # Fewer ranks than hosts times those of this host: mpirun has filled some hosts, and the others run nothing.
    ranks = notes["world_size"]
    here = notes["local_world_size"]
    hosts = len(order)
    if here and ranks < hosts * here:
        reached = max(ranks // here, 1)
        notes.problem(
            f"mpirun started {ranks} ranks, all of them on {reached} of this job's {hosts} hosts.",
            "With SDK 3, which gives mpirun the number of ranks of one host as that of the job, use Torchrun(), or "
            f"MPI(mpi_additional_options=['-np', '{hosts * here}']): the last -np counts. With SDK 2 leave -np and "
            "--host out of custom_mpi_options.",
        )
        return
    address = notes["main_address"]
    if notes["rank"] == 0 and address in order and address != job.current_host:
        notes.problem(
            f"Rank 0 is on host {job.current_host}, but the others look for it at {address} "
            f"({notes.sources['main_address']}).",
            f"Give mpirun -x MASTER_ADDR={job.current_host} (custom_mpi_options, or mpi_additional_options in SDK 3).",
        )


def network_variables(launch: Launch) -> dict[str, str]:
    """What to set, where it is not set yet, before NCCL or gloo start. Empty elsewhere than on SageMaker."""
    found: dict[str, str] = {}
    if launch.interface:
        found["NCCL_SOCKET_IFNAME"] = launch.interface
        found["GLOO_SOCKET_IFNAME"] = launch.interface
    if launch.instance_type in _EFA:
        found["FI_PROVIDER"] = "efa"
        found["NCCL_PROTO"] = "simple"
        found["RDMAV_FORK_SAFE"] = "1"
        if launch.instance_type not in _WITHOUT_RDMA:
            found["FI_EFA_USE_DEVICE_RDMA"] = "1"
    return found
