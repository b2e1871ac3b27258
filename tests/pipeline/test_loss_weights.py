"""Weights of micro-batches: what an option means for a batch, what counts, and which weights a trial chooses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_smddp.bridge.batches import MicroBatcher
from lightning_smddp.bridge.loss_weights import EXACT, LossWeight, best_fit, candidates, given_weight
from lightning_smddp.pipeline.partition.microbatches import MicroBatch, rows_of, split

ROWS, LENGTH, VOCABULARY = 16, 12, 64


def padded(seed: int = 0, share: float = 0.5) -> dict[str, Tensor]:
    """Tokens with labels of -100 at the ends of rows, whose number differs."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    lengths = (LENGTH * (1 - share * torch.rand(ROWS, generator=generator))).long()
    labels[torch.arange(LENGTH) >= lengths[:, None]] = -100
    return {"input_ids": labels.clamp(min=0), "labels": labels, "mask": (labels >= 0).float()}


def weights(option: Any, batch: Any, count: int = 4) -> list[float]:
    chosen = given_weight(option, batch)
    assert chosen is not None
    return [part.weight for part in chosen.apply(split(batch, count, rows_of(batch)))]


def shares(counts: list[float]) -> list[float]:
    return [count / sum(counts) for count in counts]


def test_each_option_counts_what_it_says() -> None:
    batch = padded()
    parts = [part.value for part in split(batch, 4, rows_of(batch))]
    labels = [float((part["labels"] != -100).sum()) for part in parts]
    shifted = [float((part["labels"][:, 1:] != -100).sum()) for part in parts]
    assert weights("labels", batch) == shares(labels)
    assert weights("shifted_labels", batch) == shares(shifted)
    assert weights("mask", batch) == shares([float(part["mask"].sum()) for part in parts])
    assert weights(lambda part: part["input_ids"].sum(), batch) == shares([float(p["input_ids"].sum()) for p in parts])
    assert weights("rows", batch) == [0.25] * 4
    assert weights("sum", batch) == [1.0] * 4
    assert given_weight("auto", batch) is None


def test_where_nothing_counts_rows_do() -> None:
    batch = {"x": torch.ones(6, 2), "labels": torch.full((6, 3), -100)}
    assert weights("labels", batch, 2) == [0.5, 0.5]
    assert weights(lambda part: 0, batch, 2) == [0.5, 0.5]


@pytest.mark.parametrize("option", ["labels", "shifted_labels", "mask"])
def test_what_the_batch_has_not_is_named_with_what_it_has(option: str) -> None:
    with pytest.raises(ValueError, match=rf"loss_weight='{option}' does not fit.*x=float32\[4, 2\]"):
        given_weight(option, {"x": torch.ones(4, 2)})


@pytest.mark.parametrize("value", [-1.0, float("nan"), "many", None])
def test_a_function_has_to_return_a_weight(value: Any) -> None:
    with pytest.raises(ValueError, match="function given as loss_weight returned"):
        weights(lambda part: value, torch.ones(4, 2), 2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_labels_are_integers_of_minus_100_or_called_so() -> None:
    full = torch.ones(4, 3, dtype=torch.int64)
    assert [weight.kind for weight in candidates({"labels": full})] == ["shifted_labels", "labels", "rows", "sum"]
    assert [weight.kind for weight in candidates([full, full[:, 0]])] == ["rows", "sum"]
    assert [weight.kind for weight in candidates({"labels": full[:, 0]})] == ["rows", "sum"]  # of a classifier
    some = torch.tensor([1, -100, 2, -100])
    assert [weight.kind for weight in candidates([full, some])] == ["labels", "rows", "sum"]
    nested = torch.nested.nested_tensor([full[0], full[1, :1]])  # of which torch has no `any`
    assert [weight.kind for weight in candidates({"labels": nested})] == ["rows", "sum"]


def test_labels_stay_where_an_earlier_batch_has_shown_them() -> None:
    full = torch.ones(4, 3, dtype=torch.int64)
    padded_first, without = [full, full.clone()], [full, full]
    padded_first[1][0, 1:] = -100
    options = SimpleNamespace(loss_weight="labels", partition=SimpleNamespace(split_batch=None, batch_size_fn=None))
    batcher = MicroBatcher(SimpleNamespace(module=torch.nn.Identity(), options=options), None)
    training, validation = SimpleNamespace(trains=True), SimpleNamespace(trains=False)
    labels = batcher.loss_weight(padded_first, training)
    assert (labels.kind, labels.path) == ("labels", (1,))
    assert batcher.loss_weight(without, training) == labels
    assert batcher.loss_weight([padded_first[1], full], training) == labels  # an input of -100 is no label
    assert batcher.loss_weight(without, validation) == LossWeight()
    with pytest.raises(ValueError, match="loss_weight='labels' does not fit"):
        batcher.loss_weight([full], training)


# ---- the trial -------------------------------------------------------------------------------------------------------


def logits_of(batch: dict[str, Tensor]) -> Tensor:
    """Of a fresh model: losses of rows are nearly equal."""
    generator = torch.Generator().manual_seed(3)
    table = 0.1 * torch.randn(VOCABULARY, VOCABULARY, generator=generator)
    return table[batch["input_ids"]]


def token_mean(batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits_of(batch).transpose(1, 2), batch["labels"])


def shifted_mean(batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits_of(batch)[:, :-1].transpose(1, 2), batch["labels"][:, 1:])


def row_mean(batch: dict[str, Tensor]) -> Tensor:
    return logits_of(batch).pow(2).mean()


def total(batch: dict[str, Tensor]) -> Tensor:
    return logits_of(batch).pow(2).sum()


def over_rows(batch: dict[str, Tensor]) -> Tensor:
    return logits_of(batch).mean((1, 2)).std()


def choose(loss: Any, batch: Any, again: float | None = None, count: int = 4) -> tuple[LossWeight, str | None]:
    parts: list[MicroBatch] = split(batch, count, rows_of(batch))
    whole = float(loss(batch))
    losses = [float(loss(part.value)) for part in parts]
    return best_fit(candidates(batch), [whole, whole if again is None else again, *losses], parts, EXACT)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share", [0.1, 0.6])
@pytest.mark.parametrize(
    ("loss", "kind"), [(token_mean, "labels"), (shifted_mean, "shifted_labels"), (row_mean, "rows"), (total, "sum")]
)
def test_the_smallest_error_is_chosen_also_for_fresh_models(loss: Any, kind: str, share: float, seed: int) -> None:
    found, note = choose(loss, padded(seed, share))
    assert (found.kind, note) == (kind, None)


def test_of_equal_errors_the_most_specific_is_chosen() -> None:
    batch = padded()
    batch["labels"] = batch["input_ids"]  # no padding yet
    assert choose(token_mean, batch)[0].kind == "shifted_labels"


def test_chance_says_nothing() -> None:
    assert choose(over_rows, padded(), again=0.5) == (LossWeight(), None)
    assert choose(lambda batch: torch.tensor(float("nan")), padded()) == (LossWeight(), None)
