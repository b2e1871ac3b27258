"""``loss_weight``: ranks and accumulated batches make the gradient that one process makes of all batches at once."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_smddp import (
    CommunicationOptions,
    PipelineStrategy,
    SMDDPDeepSpeedStrategy,
    SMDDPFabricStrategy,
    SMDDPFSDPStrategy,
    SMDDPStrategy,
)
from lightning_smddp.bridge.loss_weights import IGNORED
from tests.ranks import run_trainer_ranks
from tests.strategies.learners import make_trainer
from tests.strategies.pipeline_learners import Cases, call

WORDS, WIDTH, LENGTH = 11, 8, 7


def texts(count: int = 21) -> TensorDataset:
    """Of 1 to 7 labels each; a batch of the sampler's has none."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(WORDS, (count, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (count, 1), generator=generator)
    lengths[[8, 10]] = 0
    return TensorDataset(tokens, torch.where(torch.arange(LENGTH) < lengths, tokens.roll(-1, 1), IGNORED))


class Model(LightningModule):
    """``split`` gives a rank's batches as lists of the data set's indices."""

    def __init__(self, split: Callable[[], list[list[int]]]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True))
        self.head = nn.Linear(WIDTH, WORDS)
        self.split = split

    def loss(self, tokens: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
        hidden, _ = self.net(tokens)
        logits = self.head(hidden.flatten(0, 1))
        return F.cross_entropy(logits, labels.flatten(), reduction=reduction)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(*batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)  # Adam's steps do not follow the gradient's size

    def train_dataloader(self) -> Any:
        return DataLoader(texts(), batch_sampler=self.split())


def of_sampler(rank: int | None = None) -> list[list[int]]:
    """As `DistributedSampler` cuts 21 texts, one of which comes twice, into batches of two, the last one of one."""
    rank = dist.get_rank() if rank is None else rank
    indices = list(DistributedSampler(texts(), num_replicas=2, rank=rank, shuffle=False))
    return [indices[start : start + 2] for start in range(0, len(indices), 2)]


def uneven(rank: int | None = None) -> list[list[int]]:
    """Five rows and two; then one and three."""
    rank = dist.get_rank() if rank is None else rank
    return [[[0, 1, 2, 3, 4], [5]], [[6, 7], [10, 11, 12]]][rank]


def longer(rank: int | None = None) -> list[list[int]]:
    """Another batch on the first rank alone."""
    rank = dist.get_rank() if rank is None else rank
    return uneven(rank) + [[13, 14]] * (rank == 0)


def steps(split: Callable[[int], list[list[int]]], accumulated: int) -> Iterator[tuple[Tensor, ...]]:
    """The texts of each optimizer step, of all ranks."""
    ranks = [split(0), split(1)]
    for start in range(0, len(ranks[0]), accumulated):
        window = [index for of_rank in ranks for batch in of_rank[start : start + accumulated] for index in batch]
        yield texts()[window]


def whole(split: Callable[[int], list[list[int]]], accumulated: int, loss: Callable[..., Tensor]) -> dict[str, Tensor]:
    """What one process makes of all ranks' batches at once."""
    model = Model(of_sampler)
    optimizer = model.configure_optimizers()
    for tokens, labels in steps(split, accumulated):
        optimizer.zero_grad()
        loss(model, tokens, labels).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def by_labels(model: Model, tokens: Tensor, labels: Tensor) -> Tensor:
    return model.loss(tokens, labels)


def summed(model: Model, tokens: Tensor, labels: Tensor) -> Tensor:
    return model.loss(tokens, labels, "sum")


def by_rows(model: Model, tokens: Tensor, labels: Tensor) -> Tensor:
    """A text's loss is a sum."""
    return summed(model, tokens, labels) / len(tokens)


class LeavingModel(Model):
    """Leaves the first epoch behind the first of two batches that were to make one step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if (self.current_epoch, batch_idx) == (0, 1) else None


class RowsModel(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return by_rows(self, *batch)


class SumModel(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return summed(self, *batch)


def count_labels(batch: Any) -> Tensor:
    return (batch[1] != IGNORED).sum()


def body(
    kinds: list[type], loss_weight: Any, split: Any, accumulated: int, model_class: type, epochs: int = 1
) -> list[dict[str, Tensor]]:
    """Train one model by each kind of strategy; its parameters."""
    ends: Any = "join" if split is longer else None
    communication = CommunicationOptions(loss_weight=loss_weight, uneven=ends, verbose=False)
    found = []
    for make in kinds:
        model = model_class(split)
        options = {"max_epochs": epochs, "use_distributed_sampler": False, "accumulate_grad_batches": accumulated}
        make_trainer(make(communication=communication), **options).fit(model)
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return found


SHARDED = functools.partial(SMDDPStrategy, shard="optimizer")


KINDS = [SMDDPStrategy, SHARDED, SMDDPFSDPStrategy]
# Weight, batches of ranks, the loss of one process, module.
WEIGHTS: list[tuple[Any, Any, Any, type]] = [
    ("labels", of_sampler, by_labels, Model),
    (count_labels, uneven, by_labels, Model),
    ("rows", uneven, by_rows, RowsModel),
    ("sum", uneven, summed, SumModel),
]


def trained(weight: tuple[Any, Any, Any, type], accumulated: int) -> Any:
    loss_weight, split, _, model_class = weight
    return body, KINDS, loss_weight, split, accumulated, model_class


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("weight", WEIGHTS, ids=lambda weight: weight[3].__name__)
def test_ranks_make_the_gradient_of_one_process(weight: tuple[Any, Any, Any, type], accumulated: int) -> None:
    _, split, loss, _ = weight
    expected = whole(split, accumulated, loss)
    for of_rank in EVERYDAY.results(trained(weight, accumulated)):
        for found in of_rank:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


LEFT = body, [SMDDPStrategy], count_labels, uneven, 2, LeavingModel, 2


def test_a_batch_whose_gradient_is_dropped_counts_in_no_other_step() -> None:
    ((found,), _) = EVERYDAY.results(LEFT)
    torch.testing.assert_close(found, whole(uneven, 2, by_labels), rtol=1e-5, atol=1e-5)


def with_deepspeed() -> tuple[dict[str, Tensor], str]:
    """Parameters, and the error of accumulation."""
    kinds = [functools.partial(SMDDPDeepSpeedStrategy, stage=2)]
    [found] = body(kinds, "labels", longer, 1, Model)
    with pytest.raises(ValueError, match="uneven='join' cannot be used with accumulate_grad_batches=2 and strategy"):
        body(kinds, None, longer, 2, Model)
    with pytest.raises(ValueError, match="accumulate_grad_batches=2 and strategy") as caught:
        body(kinds, "labels", of_sampler, 2, Model)
    return found, str(caught.value)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_deepspeed_weighs_batches_and_refuses_to_accumulate_them() -> None:
    (found, error), (_, other_error) = run_trainer_ranks(with_deepspeed, 2)
    torch.testing.assert_close(found, whole(longer, 1, by_labels), rtol=1e-5, atol=1e-5)
    assert error == other_error


def say_what_labels_would_change() -> list[str]:
    said = []
    for loss_weight in (None, "labels"):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            strategy = SMDDPStrategy(communication=CommunicationOptions(loss_weight=loss_weight))
            make_trainer(strategy, max_steps=2, use_distributed_sampler=False).fit(Model(uneven))
        said += [line for line in out.getvalue().splitlines() if "count alike" in line]
    return said


EVERYDAY = Cases(
    call,
    [*(trained(weight, count) for weight in WEIGHTS for count in (1, 2)), LEFT, (say_what_labels_would_change,)],
)


def test_the_first_step_says_what_labels_would_change() -> None:
    first, second = EVERYDAY.results((say_what_labels_would_change,))
    rows = [texts()[rows] for rows in uneven(0)[:1] + uneven(1)[:1]]
    model = Model(uneven)
    losses = [model.loss(*of_rank).item() for of_rank in rows]
    together = next(steps(uneven, 1))
    assert second == []
    (line,) = first
    assert f"the first loss of all is {sum(losses) / 2:.5g}" in line
    assert f"and were {model.loss(*together).item():.5g} with CommunicationOptions(loss_weight='labels')" in line


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CommunicationOptions(loss_weight="auto"), "is for pipelines. Leave it out"),
        (lambda: PipelineStrategy(communication={"loss_weight": "rows"}), r"write PipelineStrategy.loss_weight"),  # type: ignore[arg-type]
        (lambda: PipelineStrategy(communication={"uneven": "join"}), "Use uneven='stop'"),  # type: ignore[arg-type]
        (lambda: SMDDPFabricStrategy(communication={"loss_weight": "rows"}), "Fabric sees no batches"),  # type: ignore[arg-type]
        (lambda: SMDDPFabricStrategy(communication={"uneven": "stop"}), "'stop'.*Fabric sees no"),  # type: ignore[arg-type]
    ],
)
def test_where_weights_do_not_fit(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
