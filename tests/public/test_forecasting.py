"""Time series: models of pytorch-forecasting and gluonts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.public.cases import MARKS, WHOLE, Case, check, loader, table

np = pytest.importorskip("numpy")
pandas = pytest.importorskip("pandas")
forecasting = pytest.importorskip("pytorch_forecasting")
forecasting_data = pytest.importorskip("pytorch_forecasting.data")
forecasting_metrics = pytest.importorskip("pytorch_forecasting.metrics")
gluonts_deepar = pytest.importorskip("gluonts.torch.model.deepar.lightning_module")

pytestmark = MARKS

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


def DeepAr() -> Any:  # noqa: N802
    """A recurrent network whose loss is a distribution's."""
    data = windows(time_varying_known_reals=["time"])
    return of_forecasting("DeepAR", data, hidden_size=8, rnn_layers=2, dropout=0.0)


def rows_of(length: int) -> Any:
    """With the names that gluonts' transformations give them."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(24):
        value = torch.randn(length, generator=generator).cumsum(0) / 5 + 3
        time = torch.linspace(-0.5, 0.5, length)[:, None]
        rows.append(
            {
                "past_target": value[:-FUTURE],
                "future_target": value[-FUTURE:],
                "past_observed_values": torch.ones(length - FUTURE),
                "future_observed_values": torch.ones(FUTURE),
                "past_time_feat": time[:-FUTURE],
                "future_time_feat": time[-FUTURE:],
                "feat_static_cat": torch.zeros(1, dtype=torch.long),
                "feat_static_real": torch.zeros(1),
            }
        )
    return rows


class GluontsDeepAr(gluonts_deepar.DeepARLightningModule):
    def __init__(self) -> None:
        sizes = {"freq": "D", "prediction_length": FUTURE, "context_length": PAST, "hidden_size": 8}
        super().__init__(model_kwargs={**sizes, "dropout_rate": 0.0, "lags_seq": [1, 2, 3], "num_layers": 2})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.005)

    def train_dataloader(self) -> Any:
        return loader(rows_of(self.model._past_length + FUTURE))

    def val_dataloader(self) -> Any:
        return loader(rows_of(self.model._past_length + FUTURE)[:8])


@table(
    Case(TemporalFusion, WHOLE),
    Case(GluontsDeepAr),
    Case(DeepAr, WHOLE, refused=r"SplitError: 2 stages were asked for.* 'rnn' is opened, as the size of .* values"),
)
def test_forecasting(case: Case) -> None:
    check(case)
