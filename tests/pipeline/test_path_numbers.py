"""The first rank's paths are known to all ranks, however many there are."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_smddp.pipeline.mesh import Channel
from lightning_smddp.pipeline.runtime.path_numbers import PathNumbers
from tests.ranks import run_ranks

WORDS: list[list[int] | None] = [[3, 0, 1], [], list(range(63)), list(range(64)), list(range(500)), None, [7]]


def shared() -> list[list[int] | None]:
    group = dist.group.WORLD
    assert group is not None
    numbers = PathNumbers(Channel(group, torch.device("cpu")))
    if group.rank() > 0:
        found = [numbers.receive() for _ in WORDS]
        dist.barrier()  # the first rank stays until its messages have arrived
        return found
    for word in WORDS:
        numbers.send(word)
    dist.barrier()
    return WORDS


def test_all_ranks_have_the_first_ranks_numbers() -> None:
    assert run_ranks(shared, 3) == [WORDS] * 3
