"""One test body for several kinds of devices: the CPU, simulated CUDA devices, GPUs.

A test's markers say which kind its ranks have: ``simulated_cuda``, ``gpus(n)``, else the CPU. ``tests/conftest.py``
tells the ranks so by their environment.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tests import simulated_cuda

# Set in a test with the marker `gpus`: its ranks have GPUs.
GPUS = "LIGHTNING_SMDDP_TESTS_GPUS"


def kind() -> str:
    """Of the devices that ranks have: "cpu", "simulated" or "gpu". In a test and in its ranks."""
    if simulated_cuda.wanted():
        return "simulated"
    return "gpu" if GPUS in os.environ else "cpu"


def is_cuda() -> bool:
    """Whether ranks have CUDA devices, simulated or not."""
    return kind() != "cpu"


def kinds(count: int) -> dict[str, pytest.MarkDecorator]:
    """``count`` simulated devices, and GPUs, where there are as many."""
    return {"simulated": pytest.mark.simulated_cuda, "gpu": pytest.mark.gpus(count)}


def on_gpus(count: int) -> Any:
    """Run a test on ``count`` simulated devices, and, where there are as many, on GPUs."""
    params = [pytest.param(kind, marks=mark) for kind, mark in kinds(count).items()]
    return pytest.mark.parametrize("device", params)


def hang() -> None:
    """Launch a kernel that does not end while a test runs."""
    if kind() == "simulated":
        simulated_cuda.hang()
    else:
        torch.cuda._sleep(2**42)  # clock cycles: half an hour


def rank_environment(rank: int, nodes: list[str]) -> dict[str, str]:
    """What makes GPUs of this machine those of ``rank``'s node, if tests divide this machine into several."""
    if kind() != "gpu" or len(set(nodes)) == 1:
        return {}
    mine = [str(other) for other, node in enumerate(nodes) if node == nodes[rank]]
    return {"CUDA_VISIBLE_DEVICES": ",".join(mine)}
