"""Time series: models of pytorch-forecasting."""

from __future__ import annotations

from typing import Any

import pytest

from tests.public.cases import MARKS, WHOLE, Case, check, table

np = pytest.importorskip("numpy")
pandas = pytest.importorskip("pandas")
forecasting = pytest.importorskip("pytorch_forecasting")
forecasting_data = pytest.importorskip("pytorch_forecasting.data")
forecasting_metrics = pytest.importorskip("pytorch_forecasting.metrics")

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


@table(
    Case(TemporalFusion, WHOLE),
    Case(DeepAr, WHOLE, refused=r"SplitError: 2 stages were asked for.* 'rnn' is opened, as the size of .* values"),
)
def test_forecasting(case: Case) -> None:
    check(case)
