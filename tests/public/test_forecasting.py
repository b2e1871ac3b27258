"""Time series: pytorch-forecasting's, gluonts' and transformers' models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.public.cases import (
    INTERLEAVED,
    MARKS,
    WHOLE,
    Built,
    Case,
    HuggingFace,
    Learner,
    check,
    loader,
    numbers,
    table,
)

np = pytest.importorskip("numpy")
pandas = pytest.importorskip("pandas")
forecasting = pytest.importorskip("pytorch_forecasting")
forecasting_data = pytest.importorskip("pytorch_forecasting.data")
forecasting_metrics = pytest.importorskip("pytorch_forecasting.metrics")
gluonts_deepar = pytest.importorskip("gluonts.torch.model.deepar.lightning_module")
gluonts_feedforward = pytest.importorskip("gluonts.torch.model.simple_feedforward.lightning_module")
transformers = pytest.importorskip("transformers")

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


def NBeats() -> Any:  # noqa: N802
    return of_forecasting("NBeats", windows(), widths=[16, 16], backcast_loss_ratio=0.1, num_blocks=[1, 1], dropout=0.0)


def DeepAr() -> Any:  # noqa: N802
    """A recurrent network whose loss is a distribution's."""
    data = windows(time_varying_known_reals=["time"])
    return of_forecasting("DeepAR", data, hidden_size=8, rnn_layers=2, dropout=0.0)


class Windows(Learner):
    """Batches with the names that gluonts' transformations give them."""

    names: tuple[str, ...] = ()

    def rows_of(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        length = self.past + FUTURE  # type: ignore[attr-defined]
        rows = []
        for _ in range(24):
            value = torch.randn(length, generator=generator).cumsum(0) / 5 + 3
            time = torch.linspace(-0.5, 0.5, length)[:, None]
            row = {
                "past_target": value[:-FUTURE],
                "future_target": value[-FUTURE:],
                "past_observed_values": torch.ones(length - FUTURE),
                "future_observed_values": torch.ones(FUTURE),
                "past_time_feat": time[:-FUTURE],
                "future_time_feat": time[-FUTURE:],
                "feat_static_cat": torch.zeros(1, dtype=torch.long),
                "feat_static_real": torch.zeros(1),
            }
            rows.append({name: row[name] for name in row if not self.names or name in self.names})
        return rows


class GluontsFeedForward(gluonts_feedforward.SimpleFeedForwardLightningModule):
    past = PAST
    names = ("past_target", "future_target", "future_observed_values")
    rows_of = Windows.rows_of

    def __init__(self) -> None:
        sizes = {"prediction_length": FUTURE, "context_length": PAST, "hidden_dimensions": [16, 16]}
        super().__init__(model_kwargs=sizes)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.005)

    def train_dataloader(self) -> Any:
        return loader(self.rows_of())

    def val_dataloader(self) -> Any:
        return loader(self.rows_of()[:8])


class GluontsDeepAr(gluonts_deepar.DeepARLightningModule):
    names = ()
    rows_of = Windows.rows_of

    def __init__(self) -> None:
        sizes = {"freq": "D", "prediction_length": FUTURE, "context_length": PAST, "hidden_size": 8}
        super().__init__(model_kwargs={**sizes, "dropout_rate": 0.0, "lags_seq": [1, 2, 3], "num_layers": 2})

    @property
    def past(self) -> int:
        return self.model._past_length

    configure_optimizers = GluontsFeedForward.configure_optimizers
    train_dataloader = GluontsFeedForward.train_dataloader
    val_dataloader = GluontsFeedForward.val_dataloader


class PatchTst(Built):
    rate = 0.01

    def build(self) -> Any:
        sizes = {"context_length": 16, "prediction_length": 4, "patch_length": 4, "patch_stride": 4, "d_model": 16}
        sizes |= {"num_input_channels": 2, "num_hidden_layers": 3, "num_attention_heads": 2, "ffn_dim": 32}
        config = transformers.PatchTSTConfig(**sizes, loss="mse", norm_type="layernorm", pre_norm=True)
        return transformers.PatchTSTForPrediction(config)

    def loss(self, batch: Any) -> Tensor:
        return self.model(past_values=batch[0], future_values=batch[1]).loss

    def data(self) -> Any:
        values = numbers(24, 20, 2).cumsum(1) / 5
        return list(zip(values[:, :16], values[:, 16:], strict=True))


class SeriesTransformer(HuggingFace):
    """A distribution head; lagged inputs."""

    rate = 0.005

    def build(self) -> Any:
        sizes = {"prediction_length": 4, "context_length": 12, "lags_sequence": [1, 2], "d_model": 16}
        sizes |= {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
        config = transformers.TimeSeriesTransformerConfig(
            **sizes, num_time_features=1, encoder_ffn_dim=32, decoder_ffn_dim=32, dropout=0.0, encoder_layerdrop=0.0,
            decoder_layerdrop=0.0, attention_dropout=0.0, activation_dropout=0.0,
        )  # fmt: skip
        return transformers.TimeSeriesTransformerForPrediction(config)

    def data(self) -> Any:
        values = numbers(24, 18).cumsum(1) / 5 + 2
        time = torch.linspace(0, 1, 18)[:, None]
        return [
            {
                "past_values": row[:14],
                "past_time_features": time[:14],
                "past_observed_mask": torch.ones(14),
                "future_values": row[14:],
                "future_time_features": time[14:],
            }
            for row in values
        ]


@table(
    Case(TemporalFusion, WHOLE),
    Case(NBeats, WHOLE),
    Case(GluontsDeepAr),
    Case(PatchTst),
    Case(PatchTst, INTERLEAVED, variant="interleaved"),
    Case(SeriesTransformer),
)
def test_forecasting(case: Case) -> None:
    check(case)
