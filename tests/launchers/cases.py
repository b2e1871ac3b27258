"""The environments of ``fixtures/``: one directory for each way to be started, with what a process sees there.

``env.json`` are the variables, ``opt_ml`` SageMaker's files. Those of Open MPI, MPICH, Intel MPI and torchrun were
recorded from real processes, on one node and (Open MPI 4) two; the others follow the documents and sources that
``lightning_smddp/launchers`` names.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_smddp.launchers.detection import detect
from lightning_smddp.launchers.launch import Launch

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = sorted(path.name for path in FIXTURES.iterdir())


def environ(case: str) -> dict[str, str]:
    variables: dict[str, str] = json.loads((FIXTURES / case / "env.json").read_text())
    return variables


def detected(case: str, **changes: str | None) -> Launch:
    """What is detected in ``case``, with some variables changed, or removed by None."""
    variables = {name: value for name, value in {**environ(case), **changes}.items() if value is not None}
    return detect({"SAGEMAKER_BASE_DIR": str(FIXTURES / case / "opt_ml"), **variables})


def enter(case: str, monkeypatch: pytest.MonkeyPatch, **changes: str | None) -> None:
    """Give this process the environment of ``case``."""
    kept = {"HOME", "PATH", "PWD"}
    for name, value in {**environ(case), "SAGEMAKER_BASE_DIR": str(FIXTURES / case / "opt_ml"), **changes}.items():
        if name not in kept and value is not None:
            monkeypatch.setenv(name, value)
    for name, value in changes.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
