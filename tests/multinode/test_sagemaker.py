"""A SageMaker job of two hosts, started as its training toolkit does, trains as one process does."""

from __future__ import annotations

import json
import os
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from tests.faults.nodes import Nodes
from tests.multinode import job
from tests.multinode.namespaces import nodes_at_a_switch
from tests.rank_processes import forked, kill_session

pytestmark = [pytest.mark.multinode, pytest.mark.slow, pytest.mark.timeout(180)]
HOSTS = ["algo-1", "algo-2"]
LIMIT_S = 140.0
GROUP = {"instance_group_name": "all", "instance_type": "ml.c5.large", "hosts": HOSTS[::-1]}


def start(nodes: Nodes, where: Path, host: str, distribution: str, master: str) -> ForkServerProcess:
    """What the container of ``host`` does, with its ``/opt/ml``; the launcher's hosts are in the group's order.

    Nobody is told which network interface is the right one.
    """
    config = where / host / "input" / "config"
    config.mkdir(parents=True)
    resources = {"current_host": host, "hosts": HOSTS, "network_interface_name": "eth0", "instance_groups": [GROUP]}
    resources |= {"current_group_name": "all", "current_instance_type": "ml.c5.large"}
    (config / "resourceconfig.json").write_text(json.dumps(resources))
    framework = {} if distribution == "none" else {f"sagemaker_{distribution}_enabled": True}
    variables = {"SAGEMAKER_BASE_DIR": str(where / host), "SM_FRAMEWORK_PARAMS": json.dumps(framework)}
    variables |= {"SM_HOSTS": json.dumps(HOSTS), "SM_CURRENT_HOST": host, "MASTER_ADDR": master, "MASTER_PORT": "7777"}
    command = ["python", "-m"]
    if distribution == "torch_distributed":
        number = GROUP["hosts"].index(host)  # type: ignore[attr-defined]
        command += ["torch.distributed.run", "--nnodes=2", f"--node_rank={number}", "--nproc_per_node=1"]
        command += [f"--master_addr={master}", "--master_port=7777", "-m"]
    command += ["tests.multinode.job", str(where), "1", "2"]
    own = {name: text for name, text in os.environ.items() if not name.startswith(("PYTEST_", "GLOO_", "MASTER_"))}
    return forked(nodes.be_apart, HOSTS.index(host), command, own | variables)


@pytest.mark.parametrize(("distribution", "master"), [("torch_distributed", "algo-2"), ("none", "algo-1")])
def test_two_hosts(distribution: str, master: str, tmp_path: Path) -> None:
    with nodes_at_a_switch(len(HOSTS)) as places:
        nodes, deadline = Nodes(places, tmp_path, HOSTS), time.monotonic() + LIMIT_S
        started = [start(nodes, tmp_path, host, distribution, master) for host in HOSTS]
        for process in started:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in started]
        for process in started:
            kill_session(process)
    output = "\n".join(path.read_text() for path in sorted(tmp_path.glob("output-*")))
    assert codes == [0, 0], output
    job.check(tmp_path, 1, 2, "sagemaker", output)
    launcher = {"torch_distributed": "torchrun", "none": "nobody"}[distribution]
    assert f"Started by {launcher} on SageMaker" in output, output
    assert f"rank 0 at {master} port 7777" in output, output
