"""Objects of any kind are copied without their memory."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_smddp.bridge.step import with_same_memory

X = torch.arange(30.0).reshape(5, 6)


class Graphs:
    def __init__(self, x: Tensor, sizes: list[int]) -> None:
        self.x, self.sizes = x, sizes


def test_a_copy_that_shares_memory() -> None:
    graphs = Graphs(torch.cat([X, X]), [5, 5])
    copied = [with_same_memory(each) for each in (graphs, X, "a")]
    copied[0].x.requires_grad_()
    copied[0].sizes.append(7)
    copied[1].requires_grad_()
    assert graphs.x.requires_grad is X.requires_grad is False
    assert graphs.sizes == [5, 5]
    assert copied[0].x.data_ptr() == graphs.x.data_ptr()
