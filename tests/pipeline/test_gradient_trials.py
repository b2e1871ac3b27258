"""Small parts of a loss that need other weights than the rest: seen in gradients, and nothing else is taken for one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_smddp.pipeline.partition.gradient_trials import (
    Gradients,
    GradientTrial,
    Misfit,
    misfit_of,
    noted_gradients,
)
from lightning_smddp.pipeline.partition.loss_weights import Weighting
from lightning_smddp.pipeline.partition.microbatches import MicroBatch, split

ROWS, LENGTH, VOCABULARY, WIDTH = 8, 6, 11, 8
BY_ROWS, BY_LABELS = Weighting(), Weighting("labels", ("labels",))
Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]


def model_of() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY))


def batch_of() -> dict[str, Tensor]:
    """Halves have as many labels that count: only in another order do they count differently."""
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([2, 6, 3, 5] * 2)
    return {"tokens": tokens, "labels": tokens.where(torch.arange(LENGTH) < lengths[:, None], -100)}


def labels(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).transpose(1, 2), batch["labels"])


def penalised(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return labels(model, batch) + 1e-3 * model[:2](batch["tokens"]).pow(2).mean()


def between(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    out = model(batch["tokens"])
    return F.cross_entropy(out.transpose(1, 2), batch["tokens"]) + 1e-2 * out.mean((1, 2)).std()


def decayed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return labels(model, batch) + 0.1 * sum(p.pow(2).sum() for p in model.parameters())


def chancy(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return penalised(model, batch) * (1 + torch.rand(()))


def infinite(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return labels(model, batch) * float("inf")


def rounded(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return labels(model, batch)


def without_gradient(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A softmax does not see what is added to all its arguments: that gradient is what rounding leaves."""
    hidden = model[:2](batch["tokens"])
    scores = (hidden @ (hidden.detach() + model[1].bias).transpose(1, 2)).softmax(2)
    return F.cross_entropy(model[2](scores @ hidden.detach()).transpose(1, 2), batch["labels"])


def verdict(loss: Loss, candidates: list[Weighting]) -> list[Weighting] | Misfit | None:
    model = model_of()

    def run(rows: MicroBatch, seed: int) -> Gradients:
        with torch.random.fork_rng(devices=[]), noted_gradients(dict(model.named_parameters())) as found:
            torch.manual_seed(seed)
            loss(model, rows.value).backward()
        return found

    batch = batch_of()
    rows = MicroBatch(batch, ROWS, 1.0, split(batch, 2)[0].paths)
    found = GradientTrial(run, rows).fitting(candidates, [BY_LABELS])
    assert all(parameter.grad is None for parameter in model.parameters())
    return found


@pytest.mark.parametrize("loss", [labels, decayed, rounded, without_gradient])
def test_the_right_weights_fit(loss: Loss) -> None:
    assert verdict(loss, [BY_ROWS, BY_LABELS]) == [BY_LABELS]


@pytest.mark.parametrize(("loss", "weighting"), [(penalised, BY_LABELS), (between, BY_ROWS), (decayed, BY_ROWS)])
def test_a_small_part_that_needs_other_weights_is_found(loss: Loss, weighting: Weighting) -> None:
    found = verdict(loss, [weighting])
    assert isinstance(found, Misfit)
    assert 5e-5 < found.error < 1
    assert found.parameter in dict(model_of().named_parameters())


@pytest.mark.parametrize("loss", [chancy, infinite])
def test_chance_and_infinity_say_nothing(loss: Loss) -> None:
    assert verdict(loss, [BY_LABELS]) is None


def test_sums_add_up_whatever_the_layout() -> None:
    parameters = {name: nn.Parameter(torch.zeros(*shape)) for name, shape in (("a", (600, 500)), ("b", (7, 3)))}
    parameters["c"] = nn.Parameter(torch.zeros(5, dtype=torch.complex64))
    generator = torch.Generator().manual_seed(0)

    def noted(factors: dict[str, Tensor]) -> Gradients:
        with noted_gradients(parameters) as found:
            sum((p * factors[name]).sum().real for name, p in parameters.items()).backward()
        return found

    one, other = (
        {name: torch.randn(p.shape, dtype=p.dtype, generator=generator) for name, p in parameters.items()}
        for _ in range(2)
    )
    whole = noted({name: 0.25 * one[name] + 0.75 * other[name] for name in one})
    assert misfit_of(whole, [noted(one), noted(other)], [0.25, 0.75]).error < 1e-5
    changed = {**other, "a": other["a"].clone()}
    changed["a"][-1, -1] += 5
    assert misfit_of(whole, [noted(one), noted(changed)], [0.25, 0.75]).error > 1e-4
    assert whole.norms["a"] == pytest.approx(float((0.25 * one["a"] + 0.75 * other["a"]).norm()), rel=1e-5)


def test_sparse_gradients() -> None:
    table = nn.Embedding(9, 4, sparse=True)
    plain = nn.Embedding(9, 4, _weight=table.weight.detach().clone())
    found = []
    for module in (table, plain):
        with noted_gradients(dict(module.named_parameters())) as gradients:
            module(torch.tensor([1, 1, 5])).pow(2).sum().backward()
        found.append(gradients)
    assert misfit_of(found[0], [found[1]], [1.0]).error < 1e-6
