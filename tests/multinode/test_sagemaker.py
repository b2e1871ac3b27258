"""SageMaker's training toolkit on two hosts, which train as one process does. In a container it is what starts jobs.

``SAGEMAKER_TRAINING_PYTHON`` is a Python with sagemaker_pytorch_training, of this interpreter's version.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.multinode import job
from tests.multinode.machines import Machines, machines

TOOLKIT = os.environ.get("SAGEMAKER_TRAINING_PYTHON")
pytestmark = [
    pytest.mark.multinode,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(TOOLKIT is None, reason="SAGEMAKER_TRAINING_PYTHON names no Python with SageMaker's toolkit"),
]
SCRIPT = """
import sys

from tests.multinode.job import main

values = dict(zip(sys.argv[1::2], sys.argv[2::2]))
main(values["--where"], values["--devices"], values["--nodes"])
"""


def prepare(there: Machines, flag: str, devices: int) -> None:
    """Lay out ``/opt/ml`` for each host; the launcher's order of hosts is not that of their names."""
    where = there.where
    (where / "code").mkdir()
    (where / "code" / "train.py").write_text(SCRIPT)
    (where / "bin").mkdir()
    lister = where / "bin" / "nvidia-smi"  # the toolkit starts as many ranks as it lists
    lister.write_text("#!/bin/sh\n" + "echo GPU\n" * devices)
    lister.chmod(0o755)
    group = {"instance_group_name": "all", "instance_type": "ml.c5.large", "hosts": ["algo-2", "algo-1"]}
    parameters = {
        "sagemaker_program": "train.py", "sagemaker_submit_directory": str(where / "code"), flag: True,
        "sagemaker_mpi_num_of_processes_per_host": devices, "sagemaker_mpi_custom_mpi_options": "",
        "sagemaker_instance_type": "ml.c5.large", "where": str(where), "devices": devices, "nodes": 2,
    }  # fmt: skip
    for host in there.names:
        config = where / host / "input" / "config"
        config.mkdir(parents=True)
        resources = {
            "current_host": host, "hosts": ["algo-1", "algo-2"], "network_interface_name": "eth0",
            "current_group_name": "all", "current_instance_type": "ml.c5.large", "instance_groups": [group],
        }  # fmt: skip
        texts = {name: json.dumps(value) for name, value in parameters.items()}
        for name, content in {"resourceconfig": resources, "hyperparameters": texts, "inputdataconfig": {}}.items():
            (config / f"{name}.json").write_text(json.dumps(content))


def start(there: Machines, host: str) -> subprocess.Popen[bytes]:
    """What the container of ``host`` does when it starts."""
    train = str(Path(str(TOOLKIT)).with_name("train"))
    environment = there.environment(host, {"SAGEMAKER_BASE_DIR": str(there.where / host)})
    environment |= {"SAGEMAKER_TRAINING_MODULE": "sagemaker_pytorch_container.training:main"}
    environment |= {"PATH": f"{there.where / 'bin'}:{environment['PATH']}", "AWS_DEFAULT_REGION": "us-east-1"}
    with (there.where / f"{host}.log").open("w") as file:
        command = there.command(host, train)
        return subprocess.Popen(command, env=environment, cwd=there.where, stdout=file, stderr=file)


def run(there: Machines) -> str:
    """Both hosts to their ends; what they printed."""
    started = [start(there, host) for host in there.names]
    try:
        codes = [process.wait(140) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    output = "\n".join((there.where / f"{host}.log").read_text() for host in there.names)
    assert codes == [0, 0], output
    return output


MORE = pytest.mark.exhaustive
CASES = [
    pytest.param("torch_distributed", 1, "algo-2"),
    pytest.param("torch_distributed", 2, "algo-2", marks=MORE),
    pytest.param("none", 1, "algo-1"),
    pytest.param("none", 2, "algo-1", marks=MORE),
]


@pytest.mark.parametrize(("distribution", "devices", "master"), CASES)
def test_without_mpi(distribution: str, devices: int, master: str, tmp_path: Path) -> None:
    with machines(["algo-1", "algo-2"], tmp_path) as there:
        prepare(there, f"sagemaker_{distribution}_enabled", devices)
        output = run(there)
    job.check(tmp_path, devices, 2, "sagemaker", output)
    assert f"on SageMaker (distribution {distribution}, host {master})" in output, output
