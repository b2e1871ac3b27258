"""A simulated CUDA device for tests; see README.md in this folder."""

from __future__ import annotations

import os

# Holds the compiled device's path in a test with the marker `simulated_cuda`: its ranks have the device.
VARIABLE = "LIGHTNING_SMDDP_TESTS_SIMULATED_CUDA"


def wanted() -> bool:
    """Whether ranks have the simulated device."""
    return VARIABLE in os.environ


def install(devices: int) -> None:
    """Give this process ``devices`` simulated CUDA devices and NCCL. It cannot be undone: for rank processes only."""
    from tests.simulated_cuda import build, nccl, synchronisations, torch_cuda

    module = build.load(os.environ[VARIABLE])
    torch_cuda.install(module, devices)
    nccl.install(module)
    module.start(devices, synchronisations.note)
