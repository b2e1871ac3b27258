"""Layers of other kinds: spiking, equivariant, reversible."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.public.cases import MARKS, WHOLE, Case, Learner, check, integers, numbers, table

snntorch = pytest.importorskip("snntorch")
surrogate = pytest.importorskip("snntorch.surrogate")
o3 = pytest.importorskip("e3nn.o3")
e3nn_layers = pytest.importorskip("e3nn.nn")
reformer = pytest.importorskip("reformer_pytorch")

pytestmark = MARKS


class Rows(Learner):
    rate = 0.02

    def data(self) -> Any:
        return list(zip(numbers(24, 8), integers(0, 3, 24), strict=True))


class Spiking(Rows):
    """snntorch: neurons that keep their state in the module over the steps of a sample."""

    def __init__(self) -> None:
        super().__init__()
        slope = surrogate.fast_sigmoid(slope=5)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)
        self.hidden = snntorch.Leaky(beta=0.9, spike_grad=slope, init_hidden=True)
        self.out = snntorch.Leaky(beta=0.9, spike_grad=slope, init_hidden=True, output=True)

    def loss(self, batch: Any) -> Tensor:
        self.hidden.reset_hidden()
        self.out.reset_hidden()
        potentials = [self.out(self.last(self.hidden(self.first(batch[0]))))[1] for _ in range(3)]
        return F.cross_entropy(torch.stack(potentials).sum(0), batch[1])


class Equivariant(Rows):
    """e3nn: layers whose code is generated when they are made."""

    def __init__(self) -> None:
        super().__init__()
        hidden = "4x0e + 2x1o"
        self.first = o3.FullyConnectedTensorProduct("8x0e", "1x0e + 1x1o", hidden)
        self.second = o3.FullyConnectedTensorProduct(hidden, "1x0e + 1x1o", "6x0e + 2x1o")
        self.gate = e3nn_layers.Gate("4x0e", [torch.tanh], "2x0e", [torch.sigmoid], "2x1o")
        self.last = o3.Linear(self.gate.irreps_out, "3x0e")

    def loss(self, batch: Any) -> Tensor:
        around = o3.spherical_harmonics("1x0e + 1x1o", batch[0][:, :3], normalize=True)
        x = self.gate(self.second(self.first(batch[0], around), around))
        return F.cross_entropy(self.last(x), batch[1])


class Reversible(Learner):
    """reformer-pytorch: activations are computed again from the outputs, by hashes with random rotations."""

    rate = 0.01

    def __init__(self) -> None:
        super().__init__()
        sizes = {"num_tokens": 32, "dim": 16, "depth": 2, "heads": 2, "max_seq_len": 16, "bucket_size": 4}
        self.model = reformer.ReformerLM(**sizes, n_hashes=2, causal=True)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.model(batch).transpose(1, 2), batch)

    def data(self) -> Any:
        return list(integers(0, 32, 24, 16))


@table(
    Case(Equivariant),
    Case(Reversible, WHOLE),  # it keeps states of generators and hashes from a forward pass to its backward
    Case(Spiking, WHOLE, refused=r"SplitError: The step replaces buffer 'hidden.mem'.* Change it in place"),
)
def test_special_layers(case: Case) -> None:
    check(case)
