"""What ``examples/sagemaker`` sends to SageMaker, and what SageMaker then runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smddp.sagemaker import translate
from tests.programs import run_program
from tests.sagemaker.sdk_requests import HERE as TESTS

ROOT = TESTS.parent.parent
RECIPES = ROOT / "examples" / "sagemaker"
FIXTURES = {sdk: json.loads((TESTS / "fixtures" / f"{sdk}.json").read_text()) for sdk in ("sdk2", "sdk3")}
RESOURCES = {
    "current_host": "localhost",
    "hosts": ["localhost"],
    "network_interface_name": "lo",
    "current_group_name": "homogeneousCluster",
    "current_instance_type": "ml.c5.large",
    "instance_groups": [
        {"instance_group_name": "homogeneousCluster", "instance_type": "ml.c5.large", "hosts": ["localhost"]}
    ],
}
CASES = [(sdk, mode) for sdk, modes in FIXTURES.items() for mode in modes]
# Where the SDKs are installed, if not here: they do not go with the tested set.
PYTHON_OF = {"sdk2": "SAGEMAKER_SDK2_PYTHON", "sdk3": "SAGEMAKER_SDK3_PYTHON"}


def python_with(sdk: str) -> str:
    """A Python that has this line of the SDK; skips the test if none is known."""
    given = os.environ.get(PYTHON_OF[sdk])
    if given:
        return given
    try:
        installed = metadata.version("sagemaker")
    except metadata.PackageNotFoundError:
        installed = ""
    if installed.startswith(sdk[-1] + "."):
        return sys.executable
    pytest.skip(f"{PYTHON_OF[sdk]} names no Python with SDK {sdk[-1]}, and this one has {installed or 'none'}")


@pytest.mark.slow
@pytest.mark.parametrize("sdk", FIXTURES)
def test_the_sdk_builds_the_recorded_requests(sdk: str) -> None:
    result = subprocess.run(
        [python_with(sdk), str(TESTS / "sdk_requests.py"), sdk],
        capture_output=True, text=True, timeout=110, check=False, env={**os.environ, "HOME": "/nonexistent"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    found = next(line for line in result.stdout.splitlines() if line.startswith("requests:"))
    assert json.loads(found.removeprefix("requests:")) == FIXTURES[sdk]


# ---- what a job makes of the request ----


def hyperparameters(sdk: str, mode: str) -> dict[str, Any]:
    """As the job's file has them, decoded."""
    return {name: json.loads(value) for name, value in FIXTURES[sdk][mode]["HyperParameters"].items()}


def job_environment(sdk: str, mode: str) -> dict[str, str]:
    """The variables that the toolkit (SDK 2) or the driver (SDK 3) makes of the request, for one host."""
    request, values = FIXTURES[sdk][mode], hyperparameters(sdk, mode)
    framework = {name: value for name, value in values.items() if name.startswith("sagemaker_")}
    own = {name: value for name, value in values.items() if name not in framework}
    variables: dict[str, Any] = {f"SM_HP_{name.upper()}": value for name, value in own.items()}
    variables |= {"SM_HPS": own, "SM_HOSTS": ["localhost"], "SM_CURRENT_HOST": "localhost"}
    if sdk == "sdk2":
        variables["SM_FRAMEWORK_PARAMS"] = framework
    else:
        variables["SM_DISTRIBUTED_CONFIG"] = request["distributed.json"]
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in variables.items()}


@pytest.mark.parametrize(("sdk", "mode"), CASES)
def test_the_job_reads_what_was_asked_for(sdk: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in job_environment(sdk, mode).items():
        monkeypatch.setenv(name, value)
    found = translate()
    if mode == "smp":
        expected = {"pipeline_parallel_size": 2, "num_microbatches": 8, "schedule": "1f1b"}
        expected |= {"partition": {"placement": "cluster"}}
        assert (found.strategy, found.options) == ("smddp_pipeline", expected)
    else:
        assert (found.strategy, found.options) == ("smddp", {})


@pytest.mark.parametrize(("sdk", "mode"), CASES)
def test_the_script_knows_its_hyperparameters(sdk: str, mode: str) -> None:
    options = set(re.findall(r'add_argument\("--(\w+)"', (RECIPES / "train.py").read_text()))
    sent = {name for name in hyperparameters(sdk, mode) if not name.startswith("sagemaker_")}
    assert sent <= options | {"mp_parameters"}
    assert ("stages" in sent) == (mode == "pipeline")


def test_requirements_are_the_packages() -> None:
    listed = (ROOT / "pyproject.toml").read_text().split("\ndependencies = [")[1].split("\n]")[0]
    lines = (RECIPES / "requirements.txt").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == re.findall(r'^    "(.+)",$', listed, re.MULTILINE)


# ---- the script, as a job would run it ----


def prepare(folder: Path) -> None:
    """Lay out ``/opt/ml`` in ``folder``, as SageMaker does before a container starts."""
    for name in ("input/config", "input/data/train", "model", "output/data"):
        (folder / name).mkdir(parents=True)
    shutil.copy(ROOT / "LICENSE", folder / "input/data/train" / "text.txt")  # which nobody edits
    (folder / "input/config/resourceconfig.json").write_text(json.dumps(RESOURCES))
    channel = {"train": {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated"}}
    (folder / "input/config/inputdataconfig.json").write_text(json.dumps(channel))


def start(folder: Path, mode: str, steps: int) -> str:
    """Start what the request of ``mode`` starts, as the toolkit does; returns what was printed."""
    shutil.rmtree(folder / "code", ignore_errors=True)  # each start of a container has it anew
    sys.path.insert(0, str(RECIPES))
    from source import stage  # type: ignore[import-not-found]

    sys.path.remove(str(RECIPES))
    (folder / "code").mkdir()
    stage(folder / "code")
    values = {**FIXTURES["sdk2"][mode]["HyperParameters"], "steps": str(steps), "width": "32"}
    own = {name: value for name, value in sorted(values.items()) if not name.startswith("sagemaker_")}
    arguments = [word for name, value in own.items() for word in (f"--{name}", value)]
    environment = job_environment("sdk2", mode) | {"MASTER_ADDR": "localhost", "MASTER_PORT": "7777"}
    environment |= {"SAGEMAKER_BASE_DIR": str(folder), "PET_STANDALONE": "1", "COLUMNS": "100"}
    environment |= {"SM_CHANNEL_TRAIN": str(folder / "input/data/train"), "SM_MODEL_DIR": str(folder / "model")}
    environment |= {"SM_OUTPUT_DATA_DIR": str(folder / "output/data"), "NCCL_SOCKET_IFNAME": "lo"}
    torchrun = ["-m", "torch.distributed.run", "--nnodes", "1", "--nproc_per_node", "2"]
    result = run_program([*torchrun, "train.py", *arguments], folder / "code", environment)
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.timeout(220)
def test_the_job_trains_and_goes_on_after_an_interruption(tmp_path: Path) -> None:
    """As a pipeline, then in data parallelism from its checkpoint."""
    prepare(tmp_path)
    first = start(tmp_path, "pipeline", 10)
    assert "stage 1 on rank 1" in first
    second = start(tmp_path, "dp", 30)
    assert "gradient communication over 20 steps" in second  # 30 less 10
    losses = [float(re.findall(r"^train loss (\d+\.\d+)", text, re.MULTILINE)[0]) for text in (first, second)]
    assert losses[1] < losses[0] < 5.0
    weights = torch.load(tmp_path / "model" / "model.ckpt", weights_only=True)
    assert weights["global_step"] == 30
    assert (tmp_path / "checkpoints" / "newest").read_text().strip().endswith(".ckpt")
