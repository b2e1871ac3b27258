"""Trainer features under ``smddp_pipeline``: written once as a case, run by the ranks of pipelines and by one process.

The one process accumulates gradients over the same micro-batches (``AccumulationStrategy``). A case is a module-level
function that takes a :class:`Bench` and returns what has to be equal: numbers, tensors, strings, in any structure.
Ranks run many cases one after the other, as a start of ranks costs more than a case.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_smddp import AccumulationStrategy, PipelineStrategy
from lightning_smddp.bridge.batches import count_for
from lightning_smddp.pipeline.runtime.schedules import parse
from tests import devices
from tests.ranks import run_each, run_trainer_ranks
from tests.strategies.grouped import grouped
from tests.strategies.learners import CLASSES, INPUTS, Learning, make_trainer, samples


@dataclass(frozen=True)
class Bench:
    """Makes the Trainers of a case.

    Attributes:
        pipeline: arguments of ``PipelineStrategy``; None for one process.
        directory: for files, the same on all ranks, another one for one process.
        accumulation: of one process, arguments of :func:`accumulating`; None for whole batches.
    """

    pipeline: Mapping[str, Any] | None = None
    directory: str = ""
    accumulation: Mapping[str, Any] | None = None

    def trainer(
        self, pipeline: Mapping[str, Any] | None = None, accumulation: Mapping[str, Any] | None = None, **options: Any
    ) -> Trainer:
        """A quiet one.

        Args:
            pipeline: more arguments of the strategy.
            accumulation: what one process is told besides, where ``"auto"`` is to find it.
            **options: of the Trainer.
        """
        strategy: Any = "auto"
        if self.accumulation is not None:
            strategy = accumulating(**{**self.accumulation, **(pipeline or {}), **(accumulation or {})})
        elif self.pipeline is not None:
            quiet = {"verbose": False}
            strategy = PipelineStrategy(**grouped(**{**quiet, **self.pipeline, **(pipeline or {})}))
        return make_trainer(strategy, **options)

    def fit(
        self,
        model: LightningModule,
        pipeline: Mapping[str, Any] | None = None,
        accumulation: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        trainer = self.trainer(pipeline, accumulation, **options)
        trainer.fit(model)
        return outcome(model, trainer)


def accumulating(
    ranks: int,
    num_microbatches: int | str = "auto",
    loss_weight: Any = "auto",
    split_batch: Any = None,
    schedule: str = "1f1b",
    stages_per_rank: int | str = "auto",
    pipeline_parallel_size: int | None = None,
    **others: Any,
) -> AccumulationStrategy:
    """One process that cuts batches as a pipeline of ``ranks`` with these options does; ``"auto"`` weights are rows."""
    rule = parse(schedule)
    size = pipeline_parallel_size or ranks
    stages = size * (rule.default_stages_per_rank if isinstance(stages_per_rank, str) else stages_per_rank)

    def count(rows: int) -> int:
        return count_for(rule, size, stages, rows, nn.Module())

    return AccumulationStrategy(
        count if isinstance(num_microbatches, str) else num_microbatches,
        loss_weight="rows" if loss_weight == "auto" else loss_weight,
        split_batch=split_batch,
        device="cuda:0" if devices.is_cuda() else "cpu",
    )


def outcome(model: LightningModule, trainer: Trainer, **more: Any) -> dict[str, Any]:
    """What every test of training wants to be equal."""
    return {
        "weights": {name: value.detach().clone() for name, value in model.state_dict().items()},
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "losses": list(getattr(model, "losses", [])),
        "steps": (trainer.global_step, trainer.current_epoch),
        **more,
    }


Case = Callable[[Bench], Any]


class Net(Learning, LightningModule):
    """A classifier of ``layers`` linear layers with activations in between."""

    def __init__(self, layers: int = 4, batch_size: int = 8, count: int = 24) -> None:
        super().__init__()
        self.batch_size, self.count = batch_size, count
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            hidden = [module for _ in range(layers - 2) for module in (nn.Linear(16, 16), nn.Tanh())]
            self.net = nn.Sequential(nn.Linear(INPUTS, 16), nn.Tanh(), *hidden, nn.Linear(16, CLASSES))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def train_dataloader(self) -> Any:
        return DataLoader(samples(self.count), batch_size=self.batch_size)


class Evaluated(Net):
    """With the other three steps."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        self.log("test_accuracy", (out.argmax(1) == batch[1]).float().mean())
        return out

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Any]:
        out = self.net(batch[0]).softmax(1)
        return {"probabilities": out, "classes": out.argmax(1), "batch": batch_idx}

    def val_dataloader(self) -> Any:
        return DataLoader(samples(self.count // 2 - 1), batch_size=self.batch_size - 3)

    test_dataloader = predict_dataloader = val_dataloader


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.mix(self.norm(x))).cumsum(1) / 8


class Gpt(LightningModule):
    """Calls blocks of a ``ModuleList`` in ``training_step``; embedding and head share a weight; lengths change."""

    def __init__(self, layers: int = 4, width: int = 8) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.embedding = nn.Embedding(11, width)
            self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, 11, bias=False)
            self.scale = nn.Parameter(torch.ones(width))
        self.head.weight = self.embedding.weight

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 1:
                x = x * self.scale
        return self.head(self.norm(x))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        tokens, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        loss = F.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten())
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "length": tokens.shape[1]}

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        """Sequence lengths change from batch to batch."""
        generator = torch.Generator().manual_seed(0)
        data = [{"tokens": torch.randint(11, (5 + index // 8 % 3,), generator=generator)} for index in range(44)]
        return DataLoader(data, batch_size=8)


def run_cases(
    cases: Sequence[Case], pipeline: Mapping[str, Any] | None, directory: str = "", accumulation: Any = None
) -> dict[str, Any]:
    """Body of a rank: results of cases by name. Without ``pipeline``, as one process."""
    who, results = "alone" if pipeline is None else "ranks", {}
    for case in cases:
        try:
            results[name_of(case)] = case(Bench(pipeline, f"{directory}/{name_of(case)}/{who}", accumulation))
        except Exception as error:
            raise RuntimeError(f"case {name_of(case)} failed") from error
    return results


def name_of(case: Case) -> str:
    if isinstance(case, functools.partial):
        return "-".join([case.func.__name__, *map(str, case.keywords.values())])
    return case.__name__


def once(done: dict[Any, Any], key: Any, run: Callable[[], Any]) -> Any:
    """What ``run`` returned when it was called first; an error if it raised one then."""
    if key not in done:
        try:
            done[key] = run()
        except BaseException as error:
            done[key] = error
            raise
    if isinstance(done[key], BaseException):
        raise AssertionError("the ranks failed in an earlier case") from done[key]
    return done[key]


@dataclass
class Matrix:
    """Cases with the pipelines that run them; a group runs when the first of its results is asked for.

    Results are kept for each kind of devices (``tests/devices.py``).

    Attributes:
        cases: the group's.
        ranks: how many.
        pipeline: arguments of ``PipelineStrategy``.
    """

    cases: Sequence[Case]
    ranks: int = 2
    pipeline: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 90.0
    node_ids: Sequence[str] | None = None
    _done: dict[Any, Any] = field(default_factory=dict)

    def results(self, case: Case, directory: str = "") -> list[Any]:
        """Those of each rank."""
        nodes = {} if self.node_ids is None else {"node_ids": self.node_ids}
        found = self._run("ranks", self.ranks, self.pipeline, directory, None, **nodes)
        return [result[name_of(case)] for result in found]

    def alone(self, case: Case, directory: str = "") -> Any:
        """One process's result, on a device of the same kind."""
        if devices.is_cuda():  # which only a rank has
            return self._run("alone", 1, None, directory, self._accumulation)[0][name_of(case)]
        return case(Bench(None, f"{directory}/{name_of(case)}/alone", self._accumulation))

    @property
    def _accumulation(self) -> Mapping[str, Any]:
        return {"ranks": self.ranks, **self.pipeline}

    def _run(self, who: str, ranks: int, *arguments: Any, **nodes: Any) -> list[dict[str, Any]]:
        everything = list(self.cases), *arguments
        return once(
            self._done,
            (who, devices.kind()),
            lambda: run_trainer_ranks(run_cases, ranks, *everything, timeout=self.timeout, **nodes),
        )

    def compare(self, case: Case, directory: str = "", tolerance: float = 1e-5) -> list[Any]:
        """Hold each rank's result against that of one process. Returns the ranks' results."""
        results = self.results(case, directory)
        expected = self.alone(case, directory)
        for rank, result in enumerate(results):
            assert_same(result, expected, tolerance, f"rank {rank}")
        return results


def call(body: Callable[..., Any], *args: Any) -> Any:
    """The body of ``Cases`` of several bodies."""
    return body(*args)


@dataclass
class Cases:
    """A body's cases, which ranks run one after the other in one start when the first of their results is asked for.

    Attributes:
        body: called with each case's arguments.
        cases: the arguments.
        ranks: how many.
        node_ids: the node of each, if there are several.
    """

    body: Callable[..., Any]
    cases: Sequence[Sequence[Any]]
    ranks: int = 2
    timeout: float = 90.0
    node_ids: Sequence[str] | None = None
    _done: dict[Any, Any] = field(default_factory=dict)

    def results(self, case: Sequence[Any]) -> list[Any]:
        """Those of each rank."""
        limits: dict[str, Any] = {"timeout": self.timeout, "node_ids": self.node_ids}
        found = once(self._done, None, lambda: run_trainer_ranks(run_each, self.ranks, self.body, self.cases, **limits))
        return [results[self.cases.index(case)] for results in found]


def assert_same(actual: Any, expected: Any, tolerance: float = 1e-5, where: str = "result") -> None:
    """Equal structures; tensors and floats may differ by ``tolerance`` (relative; a tenth of it absolute)."""
    if isinstance(expected, Mapping):
        assert list(actual) == list(expected), f"{where} has {list(actual)}, not {list(expected)}"
        for key in expected:
            assert_same(actual[key], expected[key], tolerance, f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert type(actual) is type(expected), f"{where} is a {type(actual)}, not a {type(expected)}"
        assert len(actual) == len(expected), f"{where} has {len(actual)} entries, not {len(expected)}: {actual}"
        for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_same(one, other, tolerance, f"{where}[{index}]")
    elif isinstance(expected, (Tensor, float)):
        torch.testing.assert_close(
            actual, expected, rtol=tolerance, atol=tolerance / 10, equal_nan=True, msg=lambda text: f"{where}: {text}"
        )
    else:
        assert actual == expected, f"{where} is {actual!r}, not {expected!r}"
