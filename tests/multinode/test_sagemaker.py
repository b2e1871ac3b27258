"""A SageMaker job of two hosts, started as its training toolkit does, trains as one process does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multinode import job
from tests.multinode.machines import Machines, machines

pytestmark = [pytest.mark.multinode, pytest.mark.slow, pytest.mark.timeout(180)]
HOSTS = ["algo-1", "algo-2"]
GROUP = {"instance_group_name": "all", "instance_type": "ml.c5.large", "hosts": HOSTS[::-1]}


def start(there: Machines, host: str, distribution: str, master: str) -> subprocess.Popen[bytes]:
    """What the container of ``host`` does, with its ``/opt/ml``; the launcher's hosts are in the group's order."""
    config = there.where / host / "input" / "config"
    config.mkdir(parents=True)
    resources = {"current_host": host, "hosts": HOSTS, "network_interface_name": "eth0", "instance_groups": [GROUP]}
    resources |= {"current_group_name": "all", "current_instance_type": "ml.c5.large"}
    (config / "resourceconfig.json").write_text(json.dumps(resources))
    framework = {} if distribution == "none" else {f"sagemaker_{distribution}_enabled": True}
    variables = {"SAGEMAKER_BASE_DIR": str(there.where / host), "SM_FRAMEWORK_PARAMS": json.dumps(framework)}
    variables |= {"SM_HOSTS": json.dumps(HOSTS), "SM_CURRENT_HOST": host, "MASTER_ADDR": master, "MASTER_PORT": "7777"}
    command = [sys.executable, "-m"]
    if distribution == "torch_distributed":
        number = GROUP["hosts"].index(host)  # type: ignore[attr-defined]
        command += ["torch.distributed.run", "--nnodes=2", f"--node_rank={number}", "--nproc_per_node=1"]
        command += [f"--master_addr={master}", "--master_port=7777", "-m"]
    command += ["tests.multinode.job", str(there.where), "1", "2"]
    with (there.where / f"{host}.log").open("w") as file:
        environment = there.environment(variables)
        return subprocess.Popen(
            there.command(host, *command), env=environment, cwd=there.where, stdout=file, stderr=file
        )


@pytest.mark.parametrize(("distribution", "master"), [("torch_distributed", "algo-2"), ("none", "algo-1")])
def test_two_hosts(distribution: str, master: str, tmp_path: Path) -> None:
    with machines(HOSTS, tmp_path) as there:
        started = [start(there, host, distribution, master) for host in HOSTS]
        try:
            codes = [process.wait(140) for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
    output = "\n".join((tmp_path / f"{host}.log").read_text() for host in HOSTS)
    assert codes == [0, 0], output
    job.check(tmp_path, 1, 2, "sagemaker", output)
    launcher = {"torch_distributed": "torchrun", "none": "nobody"}[distribution]
    assert f"Started by {launcher} on SageMaker" in output, output
    assert f"rank 0 at {master} port 7777" in output, output
