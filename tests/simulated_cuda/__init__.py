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
    from tests.simulated_cuda import build, hangs, nccl, races, synchronisations, torch_cuda

    module = build.load(os.environ[VARIABLE])
    torch_cuda.install(module, devices)
    nccl.install(module)
    module.start(devices, [synchronisations.note, hangs.report, synchronisations.where, races.report])


def limit_memory(size: int) -> None:
    """Give each of this process's devices ``size`` bytes; more is ``torch.OutOfMemoryError``."""
    from tests.simulated_cuda import torch_cuda

    torch_cuda._device.set_capacity(size)


def limit_waits(seconds: float) -> None:
    """How long this process's host may wait, for a stream or for the members of a communicator, before it is an error.

    A real host would wait on.
    """
    from tests.simulated_cuda import hangs, torch_cuda

    hangs.limit_s = seconds
    torch_cuda._device.set_hang_limit(seconds)


def hang() -> None:
    """Launch a kernel on the current stream that never ends."""
    import threading

    from tests.simulated_cuda import torch_cuda

    torch_cuda._device.launch(torch_cuda._device.current_stream(), "a kernel that never ends", threading.Event().wait)
