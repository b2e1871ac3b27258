"""Batches that are objects: graphs of PyTorch Geometric, TensorDicts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from tests.public.cases import MARKS, Case, Learner, check, numbers, table

geometric_data = pytest.importorskip("torch_geometric.data")
geometric_loader = pytest.importorskip("torch_geometric.loader")
gnn = pytest.importorskip("torch_geometric.nn")
tensordict = pytest.importorskip("tensordict")

pytestmark = MARKS


def graphs(count: int = 16) -> list[Any]:
    """Random graphs of different sizes with a class each."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for index in range(count):
        nodes = 5 + index % 4
        x = torch.randn(nodes, 6, generator=generator)
        edges = torch.randint(0, nodes, (2, 3 * nodes), generator=generator)
        rows.append(geometric_data.Data(x=x, edge_index=edges, y=torch.tensor([index % 3])))
    return rows


class Gcn(Learner):
    """Graph classification: layers, pooling, head."""

    loaders = geometric_loader.DataLoader

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = gnn.GCNConv(6, 16), gnn.GCNConv(16, 16)
        self.head = nn.Linear(16, 3)

    def size(self, batch: Any) -> int:
        return batch.num_graphs

    def data(self) -> Any:
        return graphs()

    def loss(self, batch: Any) -> Tensor:
        x = self.first(batch.x, batch.edge_index).relu()
        x = self.second(x, batch.edge_index).relu()
        return F.cross_entropy(self.head(gnn.global_mean_pool(x, batch.batch)), batch.y)


class OfTensorDict(Learner):
    """The batch is a TensorDict with another one in it, as torchrl's replay buffers make them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.net(batch["observation"]), batch["next", "reward"])

    def data(self) -> Any:
        states, rewards = numbers(24, 4), numbers(24, 1, seed=3)
        return [{"observation": x, "next": {"reward": y}} for x, y in zip(states, rewards, strict=True)]

    @staticmethod
    def collate(rows: Any) -> Any:
        return tensordict.TensorDict(default_collate(rows), batch_size=[len(rows)])


@table(
    Case(Gcn),
    Case(OfTensorDict, {"num_microbatches": 4}),
)
def test_graphs(case: Case) -> None:
    check(case)
