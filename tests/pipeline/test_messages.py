"""What one stage sends to the next arrives as it was."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp.pipeline.capture.records import TensorSpec
from lightning_smddp.pipeline.runtime.messages import Neighbour
from tests.ranks import run_ranks

SENT = [
    torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).t(),
    torch.tensor([True, False, True]),
    torch.empty(0, 4),
    torch.tensor(2.5, dtype=torch.float64),
    torch.complex(torch.ones(2), torch.ones(2)).conj(),
    torch.arange(4, dtype=torch.int8),
]


def exchanged(ahead: bool) -> list[Tensor]:
    """What rank 1 has received of rank 0, for the second of two micro-batches."""
    rank = dist.get_rank()
    neighbour = Neighbour(dist.group.WORLD, 1 - rank, torch.device("cpu"), ahead)
    neighbour.begin_step([tuple(map(TensorSpec.of, SENT))] * 2)
    for microbatch in (0, 1):
        ops = neighbour.sends(SENT) if rank == 0 else neighbour.receives(microbatch)
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()
    if rank == 1:
        neighbour.take(0)
    return list(neighbour.take(1))


@pytest.mark.parametrize("ahead", [False, True])
def test_tensors_arrive_as_they_were_sent(ahead: bool) -> None:
    nothing, received = run_ranks(exchanged, 2, ahead)
    assert nothing == []
    for tensor, copy in zip(SENT, received, strict=True):
        assert copy.dtype == tensor.dtype
        assert torch.equal(copy, tensor.resolve_conj())
