"""Batches of other kinds: graphs of PyTorch Geometric, TensorDicts, time series."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from tests.public.cases import MARKS, WHOLE, Case, Learner, check, numbers, table

geometric_data = pytest.importorskip("torch_geometric.data")
geometric_loader = pytest.importorskip("torch_geometric.loader")
gnn = pytest.importorskip("torch_geometric.nn")
tensordict = pytest.importorskip("tensordict")
np = pytest.importorskip("numpy")
pandas = pytest.importorskip("pandas")
forecasting = pytest.importorskip("pytorch_forecasting")
forecasting_data = pytest.importorskip("pytorch_forecasting.data")
forecasting_metrics = pytest.importorskip("pytorch_forecasting.metrics")

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


PAST, FUTURE = 12, 4


def series() -> Any:
    """Three series of a table, as pytorch-forecasting wants them."""
    parts = []
    for group in range(3):
        time = np.arange(40)
        value = np.sin(time / 3 + group) + 0.1 * group + 2
        parts.append(pandas.DataFrame({"time": time, "value": value, "group": str(group)}))
    return pandas.concat(parts, ignore_index=True).astype({"value": "float32"})


def windows(**options: Any) -> Any:
    more = {"target_normalizer": None, "time_varying_unknown_reals": ["value"], "min_encoder_length": PAST, **options}
    return forecasting_data.TimeSeriesDataSet(
        series(), time_idx="time", target="value", group_ids=["group"], max_encoder_length=PAST,
        max_prediction_length=FUTURE, **more,
    )  # fmt: skip


def of_forecasting(model: str, data: Any, **options: Any) -> Any:
    """A model of the package, which is a LightningModule, with its own data loaders."""
    made = getattr(forecasting, model).from_dataset(data, learning_rate=0.01, optimizer="sgd", **options)
    made.train_dataloader = lambda: data.to_dataloader(train=False, batch_size=16, num_workers=0)
    made.val_dataloader = lambda: data.to_dataloader(train=False, batch_size=16, num_workers=0)
    return made


def TemporalFusion() -> Any:  # noqa: N802
    data = windows(static_categoricals=["group"], time_varying_known_reals=["time"])
    sizes = {"hidden_size": 8, "attention_head_size": 2, "hidden_continuous_size": 4, "dropout": 0.0}
    loss = forecasting_metrics.QuantileLoss([0.1, 0.5, 0.9])
    return of_forecasting("TemporalFusionTransformer", data, **sizes, output_size=3, loss=loss)


@table(
    Case(Gcn),
    Case(OfTensorDict, {"num_microbatches": 4}),
    Case(TemporalFusion, WHOLE),
)
def test_structures(case: Case) -> None:
    check(case)
