"""What a case is, and how one is trained in one process and in the ranks of pipelines."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_smddp import AccumulationStrategy, PipelineStrategy
from tests.ranks import RanksFailedError, run_trainer_ranks
from tests.strategies.grouped import grouped
from tests.strategies.learners import make_trainer
from tests.strategies.pipeline_learners import assert_same

WHOLE = {"num_microbatches": 1, "schedule": "gpipe"}
INTERLEAVED = {"schedule": "interleaved_1f1b", "stages_per_rank": 2, "num_microbatches": 4}
ZERO_BUBBLE = {"schedule": "zbv_zero_bubble", "num_microbatches": 4}
REPLICAS = {"pipeline_parallel_size": 2, "num_microbatches": 2}
EXACT = {"precision": "64-true"}  # where training itself makes more of rounding than the tolerance
TIMEOUT_S = 80.0
# Everything in this directory: warnings of packages are theirs, and ranks import many of them.
MARKS = [pytest.mark.public, pytest.mark.timeout(4 * TIMEOUT_S), pytest.mark.filterwarnings("ignore")]


@dataclass(frozen=True)
class Case:
    """A module and how it is trained.

    Attributes:
        make: makes the LightningModule, with its data.
        pipeline: arguments of ``PipelineStrategy``.
        trainer: arguments of ``Trainer``.
        ranks: how many; with two replicas, twice the stages.
        refused: a pattern of the message with which training has to stop; empty where it has to be equal.
        variant: part of the name, where a module is trained in several ways.
    """

    make: Callable[[], LightningModule]
    pipeline: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 2
    refused: str = ""
    variant: str = ""

    @property
    def name(self) -> str:
        return "-".join(filter(None, [self.make.__name__, self.variant]))

    @property
    def replicas(self) -> int:
        return self.ranks // int(self.pipeline.get("pipeline_parallel_size", self.ranks))


def replicas() -> int:
    """Those of the run that this process belongs to."""
    return int(os.environ.get("PUBLIC_REPLICAS", "1"))


def loader(data: Any, rows: int = 8, loaders: type = DataLoader, **options: Any) -> Any:
    """Batches of ``rows`` rows in order, over all replicas. Lightning's own sampler would shuffle."""
    count = replicas()
    if count > 1:
        replica = int(os.environ["RANK"]) * count // int(os.environ["WORLD_SIZE"])
        options["sampler"] = DistributedSampler(data, num_replicas=count, rank=replica, shuffle=False)
    return loaders(data, batch_size=rows // count, **options)


def numbers(*size: int, seed: int = 0) -> Tensor:
    """Normal ones, the same on every rank."""
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def integers(low: int, high: int, *size: int, seed: int = 0) -> Tensor:
    """From ``low`` to below ``high``, the same on every rank."""
    return torch.randint(low, high, size, generator=torch.Generator().manual_seed(seed))


class Losses(Callback):
    """The loss of each batch, as Lightning hands it to callbacks; and into how many micro-batches batches were cut."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.counts: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.values.append(float(outputs["loss"]))
        self._count(trainer)

    def on_validation_batch_end(self, trainer: Any, *args: Any) -> None:
        self._count(trainer)

    def _count(self, trainer: Any) -> None:
        if isinstance(trainer.strategy, PipelineStrategy):
            self.counts.append(trainer.strategy._last_pipelined().batcher.count)


class Learner(LightningModule):
    """The usual form: a loss of a batch, logged in training and in validation."""

    rows = 8
    rate = 0.05
    loaders: type = DataLoader
    collate: Any = None

    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def data(self) -> Sequence[Any]:
        raise NotImplementedError

    def size(self, batch: Any) -> int | None:
        """Its number of rows, where Lightning cannot see it."""
        return None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, batch_size=self.size(batch))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=self.size(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate, momentum=0.9)

    def train_dataloader(self) -> Any:
        return self.batches(self.data())

    def val_dataloader(self) -> Any:
        return self.batches(self.data()[: 2 * self.rows])

    def batches(self, data: Any) -> Any:
        options = {} if self.collate is None else {"collate_fn": self.collate}
        return loader(data, self.rows, self.loaders, **options)


class Built(Learner):
    """Around one model of a package."""

    def __init__(self) -> None:
        super().__init__()
        self.model = self.build()

    def build(self) -> Any:
        raise NotImplementedError


class HuggingFace(Built):
    """transformers' way: the model computes the loss, and takes a batch by names."""

    def loss(self, batch: Any) -> Tensor:
        return self.model(**batch).loss


def train(case: Case, piped: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Body of a rank: what training leaves, for the comparison.

    Args:
        case: what is trained: in a pipeline, or with ``piped`` in one process that accumulates gradients.
        piped: what a rank of the pipeline has left, which says how that cut batches and weighed the parts.
    """
    seed_everything(1, verbose=False)
    model = case.make()
    seed_everything(2, verbose=False)
    strategy: Any
    if piped is None:
        strategy = PipelineStrategy(**grouped(**{"verbose": False, "resume": "never", **case.pipeline}))
    elif case.replicas > 1:
        strategy = "auto"  # which has the batches of all replicas in one
    else:
        counts = iter(piped["counts"])
        strategy = AccumulationStrategy(lambda rows: next(counts), piped["loss_weight"], device="cpu")
    losses = Losses()
    options = {"max_epochs": 2, "num_sanity_val_steps": 0, **case.trainer}
    options["callbacks"] = [make() for make in options.pop("callbacks", [])] + [losses]
    trainer = make_trainer(strategy, **options)
    trainer.fit(model)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    weights = {name: value.detach().clone() for name, value in model.state_dict().items() if torch.is_tensor(value)}
    shown = getattr(model, "shown", None)  # what a case wants to be compared beside
    result = {"losses": losses.values, "metrics": metrics, "weights": weights, "shown": shown}
    if piped is None:
        chosen = trainer.strategy._last_pipelined().batcher.chosen
        result.update(counts=losses.counts, loss_weight=chosen.kind if chosen else "rows")
    return result


def run(case: Case) -> list[dict[str, Any]]:
    return run_trainer_ranks(train, case.ranks, case, timeout=TIMEOUT_S, env={"PUBLIC_REPLICAS": str(case.replicas)})


def check(case: Case) -> None:
    """The one test: a case's ranks against one process that accumulates gradients over the same micro-batches."""
    if case.refused:
        with pytest.raises(RanksFailedError, match=case.refused) as caught:
            run(case)
        assert not caught.value.hung
        return
    results = run(case)
    (expected,) = run_trainer_ranks(train, 1, case, results[0], timeout=TIMEOUT_S)
    assert torch.isfinite(torch.tensor(expected["losses"])).all(), "this case does not train in one process"
    assert expected["losses"], "this case does not train"
    results = [{name: result[name] for name in expected} for result in results]
    if case.replicas > 1:
        mean = torch.tensor([result["losses"] for result in results]).mean(0).tolist()
        assert_same(mean, expected["losses"], where="the replicas' mean loss")
        expected, results = {"weights": expected["weights"]}, [{"weights": r["weights"]} for r in results]
    for rank, result in enumerate(results):
        assert_same(result, expected, where=f"rank {rank}")


def table(*cases: Case) -> Any:
    """The cases of a file, as a decorator."""
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases])
