"""What one stage sends to the next: small tensors share a message, and arrive as tensors of their own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp.pipeline.capture.records import TensorSpec
from lightning_smddp.pipeline.runtime.messages import Layout, Neighbour
from tests.ranks import run_ranks

MANY = [
    torch.tensor([True, False, True]),
    torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).t(),
    torch.ones(200, 200).mul(0.5),  # 160 KB: a message of its own
    torch.empty(0, 4),
    torch.tensor(2.5, dtype=torch.float64),
    torch.complex(torch.ones(2), torch.ones(2)).conj(),
    torch.arange(4, dtype=torch.int8),
    torch.complex(torch.ones(1), torch.ones(1)).conj().imag,  # a view that negates
]
LARGE = [torch.complex(torch.ones(200, 100), torch.ones(200, 100)).conj()]
ALONE = [MANY[-1], torch.empty(0)]
CASES = [(MANY, 2), (ALONE, 1), (LARGE, 1), ([], 0), ([torch.empty(0), torch.empty(0)], 0)]


def exchanged(ahead: bool) -> list[tuple[list[Tensor], int]]:
    """What rank 1 has received of rank 0 as the second of two micro-batches, and how many messages rank 0 has sent."""
    found = []
    for sent, _ in CASES:
        rank = dist.get_rank()
        neighbour = Neighbour(dist.group.WORLD, 1 - rank, torch.device("cpu"), ahead)
        layout = Layout.of(list(map(TensorSpec.of, sent)))
        neighbour.begin_step([layout] * 2)
        for microbatch in (0, 1):
            ops = neighbour.sends(layout, sent) if rank == 0 else neighbour.receives(microbatch)
            for work in dist.batch_isend_irecv(ops) if ops else ():
                work.wait()
        if rank == 1:
            neighbour.take(0)
        found.append((list(neighbour.take(1)), len(ops)))
    return found


@pytest.mark.parametrize("ahead", [False, True])
def test_tensors_arrive_as_they_were_sent(ahead: bool) -> None:
    sender, receiver = run_ranks(exchanged, 2, ahead)
    for (sent, messages), (_, number), (received, _) in zip(CASES, sender, receiver, strict=True):
        assert number == messages
        for tensor, copy in zip(sent, received, strict=True):
            assert copy.dtype == tensor.dtype
            assert torch.equal(copy, tensor.resolve_conj())
            assert copy.untyped_storage().nbytes() == copy.nbytes  # one that is changed in place changes no other
