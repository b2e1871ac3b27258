"""Which weights of micro-batches are found for which loss."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_smddp.pipeline.capture.constant_random import without_chance
from lightning_smddp.pipeline.partition.loss_weights import Weighting
from lightning_smddp.pipeline.partition.microbatches import MicroBatch, split
from lightning_smddp.pipeline.partition.weight_trials import amplified, find_weighting

ROWS, LENGTH, VOCABULARY = 8, 10, 13
Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]


def model_of(scale: float = 1e-3) -> nn.Module:
    """Fresh: all losses are nearly equal."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(VOCABULARY, 6), nn.Linear(6, VOCABULARY))
    for parameter in model.parameters():
        parameter.data.mul_(scale)
    return model


def batch_of(padded: bool = True) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=generator)
    lengths = LENGTH - torch.arange(ROWS) % 4 * 2
    inside = torch.arange(LENGTH) < lengths[:, None]
    if padded:
        tokens = torch.where(inside, tokens, 0)
    return {
        "tokens": tokens,
        "labels": torch.where(inside, tokens, -100) if padded else tokens.clone(),
        "mask": inside.float() if padded else torch.ones(ROWS, LENGTH),
        "class": tokens[:, 0].clone(),
    }


def found(loss: Loss, padded: bool = True, scale: float = 1e-3) -> tuple[Weighting, str | None]:
    model = model_of(scale)

    def loss_of(microbatch: MicroBatch) -> float:
        with torch.no_grad(), without_chance(torch.device("cpu")):
            return float(loss(model, microbatch.value))

    before = [parameter.detach().clone() for parameter in model.parameters()]
    microbatch, louder = MicroBatch(batch_of(padded), ROWS, 1.0), functools.partial(amplified, model)
    weighting = find_weighting(loss_of, microbatch, lambda value: split(value, 2), louder=louder)
    assert all(map(torch.equal, before, model.parameters()))
    return weighting


def tokenwise(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels, **options)


def unshifted(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return tokenwise(model(batch["tokens"]), batch["labels"])


def shifted(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return tokenwise(model(batch["tokens"])[:, :-1], batch["labels"][:, 1:])


def padded_and_shifted(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return tokenwise(model(batch["tokens"]), F.pad(batch["labels"], (0, 1), value=-100)[:, 1:])


def by_hand(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    tokens = batch["tokens"][:, 1:]
    losses = tokenwise(model(batch["tokens"])[:, :-1], tokens, reduction="none")
    return losses[tokens != 0].mean()


def masked(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    losses = tokenwise(model(batch["tokens"]), batch["tokens"], reduction="none")
    return (losses * batch["mask"]).sum() / batch["mask"].sum()


def rows(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    losses = tokenwise(model(batch["tokens"]), batch["tokens"], reduction="none")
    return ((losses * batch["mask"]).sum(1) / batch["mask"].sum(1)).mean()


def classes(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).mean(1), batch["class"], torch.linspace(1, 2, VOCABULARY))


def added_up(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return unshifted(model, batch) * (batch["labels"] != -100).sum()


def noisy(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    embedded = F.dropout(model[0](batch["tokens"]), 0.5)
    return tokenwise(model[1](embedded + torch.randn_like(embedded)), batch["labels"])


def hardest(microbatch: MicroBatch) -> float:
    losses = microbatch.value["x"]
    return float(losses.topk(len(losses) // 2).values.mean())


def test_a_mean_over_the_hardest_rows_is_found_where_halves_have_as_many() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 1.0, 2.0, 3.0, 4.0])
    rows = MicroBatch({"x": values}, 8, 1.0, paths=frozenset({("x",)}))
    halves = split(rows.value, 2)
    assert hardest(rows) == (hardest(halves[0]) + hardest(halves[1])) / 2
    weighting, warning = find_weighting(hardest, rows, lambda value: split(value, 2))
    assert not weighting.fits
    assert warning is not None
    assert "The loss of 8 rows is 3.5, but the mean of the losses of its two halves is 3." in warning


LABELS = Weighting("labels", ("labels",))


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (unshifted, LABELS),
        (shifted, Weighting("labels", ("labels",), 1)),
        (padded_and_shifted, Weighting("labels", ("labels",), 1)),
        (masked, Weighting("entries", ("mask",))),
        (rows, Weighting()),
        (added_up, Weighting("sum")),
        (noisy, LABELS),
    ],
)
def test_the_weights_of_a_fresh_model(loss: Loss, expected: Weighting, padded: bool) -> None:
    assert found(loss, padded) == (expected, None)


def test_padding_that_a_step_leaves_out_by_hand() -> None:
    assert found(by_hand) == (Weighting("labels", ("tokens",), 1, 0), None)


def test_class_weights() -> None:
    weighting, warning = found(classes)
    assert warning is None
    assert weighting.path == ("class",)
    assert weighting.class_weights == pytest.approx(torch.linspace(1, 2, VOCABULARY).tolist())
    assert Weighting.from_json(weighting.to_json()) == weighting


def test_a_loss_between_rows_has_a_warning_with_both_numbers() -> None:
    def between(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["tokens"]).mean((1, 2)).std()

    weighting, warning = found(between, scale=1.0)
    assert weighting == Weighting()
    assert warning is not None
    assert "but the mean of the losses of its two halves is" in warning


def test_a_batch_without_the_tensor_is_weighted_by_rows() -> None:
    parts = split({"tokens": torch.zeros(5, 2)}, 2)
    assert LABELS.apply(parts) == parts
