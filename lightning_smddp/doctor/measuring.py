"""What ranks find out together: one all-reduce by each algorithm, with known values, and how long it takes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_smddp.communication.choose import time_algorithm
from lightning_smddp.communication.communicator import Communicator, reduce_once
from lightning_smddp.communication.objects import gather

SIZE = 8 * 2**20  # bytes of an all-reduce
_NUMEL = 1000  # of the checked one
_TIMEOUT = timedelta(seconds=60)  # of making a communicator, and of each collective


def measure(group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """The same on every rank. Collective over ``group``, which is the world.

    Returns:
        ``all_reduce``: algorithm -> seconds of ``size`` bytes, the median of the slowest rank; ``problems``: algorithm
        -> what is wrong with what it gave; ``nodes``: ranks of each; ``notes``: what was not possible.
    """
    communicator = Communicator(group, device, _TIMEOUT)
    try:
        names = communicator.available()
        problems = {name: _problem_of(name, communicator) for name in names}
        return {
            "nodes": [list(ranks) for ranks in communicator.topology.nodes],
            "device": device.type,
            "size": SIZE,
            "all_reduce": {name: time_algorithm(name, communicator, None, SIZE) for name in names},
            "problems": {name: problem for name, problem in problems.items() if problem is not None},
            "notes": [note for note in communicator.notes if note.startswith("no shared memory")],
        }
    finally:
        communicator.close()


def _problem_of(name: str, communicator: Communicator) -> str | None:
    """What is wrong with an average by this algorithm, on any rank. Collective."""
    ranks = communicator.world_size
    values = torch.arange(_NUMEL, dtype=torch.float32, device=communicator.device)
    algorithm = communicator.algorithm(name)
    averaged = reduce_once(algorithm, values + communicator.rank)
    algorithm.close()
    expected = values + (ranks - 1) / 2
    wrong = int((~averaged.isclose(expected)).sum())  # algorithms multiply by 1 / ranks, which is rounded
    for rank, count in enumerate(gather(wrong, communicator.group)):
        if count:
            return f"rank {rank}: {count} of {_NUMEL} numbers arrived with other values"
    return None
