"""Graphs: batches of PyTorch Geometric, node and graph tasks, molecules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.public.cases import MARKS, WHOLE, Case, Learner, check, table

geometric_data = pytest.importorskip("torch_geometric.data")
geometric_loader = pytest.importorskip("torch_geometric.loader")
gnn = pytest.importorskip("torch_geometric.nn")
chemprop = pytest.importorskip("chemprop")

pytestmark = MARKS


def graphs(count: int = 16) -> list[Any]:
    """Random graphs of different sizes with a number and a class each."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for index in range(count):
        nodes = 5 + index % 4
        x = torch.randn(nodes, 6, generator=generator)
        edges = torch.randint(0, nodes, (2, 3 * nodes), generator=generator)
        atoms = torch.randint(1, 9, (nodes,), generator=generator)
        places = 2 * torch.randn(nodes, 3, generator=generator)
        graph = geometric_data.Data(x=x, edge_index=edges, z=atoms, pos=places)
        graph.y = torch.tensor([index % 3])
        graph.target = x.sum().view(1) / 10
        rows.append(graph)
    return rows


class GraphLearner(Learner):
    loaders = geometric_loader.DataLoader

    def __init__(self) -> None:
        super().__init__()
        self.build()

    def build(self) -> None:
        raise NotImplementedError

    def size(self, batch: Any) -> int:
        return batch.num_graphs

    def data(self) -> Any:
        return graphs()


class Gcn(GraphLearner):
    """Graph classification: layers, pooling, head."""

    def build(self) -> None:
        self.first, self.second = gnn.GCNConv(6, 16), gnn.GCNConv(16, 16)
        self.head = nn.Linear(16, 3)

    def loss(self, batch: Any) -> Tensor:
        x = self.first(batch.x, batch.edge_index).relu()
        x = self.second(x, batch.edge_index).relu()
        return F.cross_entropy(self.head(gnn.global_mean_pool(x, batch.batch)), batch.y)


class SchNet(GraphLearner):
    """Distances of atoms; the model makes the graph itself in a module."""

    rate = 0.001

    def build(self) -> None:
        self.model = gnn.SchNet(
            hidden_channels=16, num_filters=16, num_interactions=2, num_gaussians=8, interaction_graph=AllPairs()
        )

    def loss(self, batch: Any) -> Tensor:
        return F.l1_loss(self.model(batch.z, batch.pos, batch.batch)[:, 0], batch.target)


class SchNetForces(SchNet):
    """Forces are the energy's gradient: a backward pass in the step."""

    def loss(self, batch: Any) -> Tensor:
        places = batch.pos.detach().requires_grad_()
        energy = self.model(batch.z, places, batch.batch)
        (slope,) = torch.autograd.grad(energy.sum(), places, create_graph=True)
        return F.l1_loss(energy[:, 0], batch.target) + 0.1 * slope.square().mean()

    val_dataloader = None


class AllPairs(nn.Module):
    def forward(self, pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        same = (batch[:, None] == batch[None]) & ~torch.eye(len(batch), dtype=torch.bool)
        edges = same.nonzero().T
        return edges, (pos[edges[0]] - pos[edges[1]]).norm(dim=1)


class NodesOfOneGraph(GraphLearner):
    """One large graph, a mask of rows to train on: nothing can be cut."""

    rows = 1

    def build(self) -> None:
        self.model = gnn.GraphSAGE(6, 16, num_layers=3, out_channels=3)

    def loss(self, batch: Any) -> Tensor:
        out = self.model(batch.x, batch.edge_index)
        return F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask])

    def data(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(30, 6, generator=generator)
        edges = torch.randint(0, 30, (2, 90), generator=generator)
        mask = torch.arange(30) % 2 == 0
        return [geometric_data.Data(x=x, edge_index=edges, y=x[:, :3].argmax(1), train_mask=mask)]


SMILES = ["CCO", "CCN", "CCC", "c1ccccc1", "CC(=O)O", "CCCl", "CO", "CCCC", "CN", "c1ccncc1", "C1CCC1", "CCOC"]


def molecules(rows: int) -> Any:
    points = [chemprop.data.MoleculeDatapoint.from_smi(smi, [len(smi) / 5.0]) for smi in SMILES]
    return chemprop.data.build_dataloader(chemprop.data.MoleculeDataset(points), batch_size=rows, shuffle=False)


class Chemprop(chemprop.models.MPNN):
    """A LightningModule of the package itself: its batch is a named tuple with a graph object."""

    def __init__(self) -> None:
        super().__init__(
            chemprop.nn.BondMessagePassing(d_h=16, depth=2), chemprop.nn.MeanAggregation(),
            chemprop.nn.RegressionFFN(input_dim=16, hidden_dim=16), batch_norm=False, warmup_epochs=1,
        )  # fmt: skip

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        return molecules(6)

    val_dataloader = train_dataloader


@table(
    Case(Gcn),
    Case(SchNet, WHOLE),
    Case(NodesOfOneGraph, WHOLE),
    Case(Chemprop, WHOLE),
    Case(SchNetForces, WHOLE, refused=r"SplitError: The step runs a backward pass of its own at \S*test_graphs.py:\d+"),
)
def test_graphs(case: Case) -> None:
    check(case)
