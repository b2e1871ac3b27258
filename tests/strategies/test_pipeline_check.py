"""The start-up check, the table's word on loss weights, and the timeline."""

from __future__ import annotations

import io
import json
import os
import re
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_smddp import PipelineStrategy
from lightning_smddp.pipeline.partition.self_check import VerificationError
from tests.ranks import RanksFailedError, run_trainer_ranks
from tests.strategies.grouped import grouped
from tests.strategies.learners import QUIET
from tests.strategies.pipeline_learners import Cases

ROWS, WIDTH, VOCABULARY, LENGTH = 24, 8, 11, 6


class Chain(LightningModule):
    """Some layers, and a loss that subclasses change."""

    count = 2

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(self.count))
            self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(ROWS, WIDTH, generator=generator)
        return DataLoader(TensorDataset(x, torch.randint(VOCABULARY, (ROWS,), generator=generator)), batch_size=8)


class Remembering(nn.Linear):
    """Leaves a Python number behind: nothing that sees tensors can notice it."""

    size = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.size = float(y.detach().abs().mean())
        return y


class Escaping(Chain):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.layers[0] = Remembering(WIDTH, WIDTH)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.layers[0].size


class Contrastive(Chain):
    """A loss between the rows of a batch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits = self(batch[0])
        return F.cross_entropy(logits @ logits.T, torch.arange(len(logits)))


class Padded(Chain):
    """A mean over labels of which some do not count, in rows of different lengths."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self(batch["x"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        rows = []
        for row in range(ROWS):
            labels = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
            labels[1 + row % LENGTH :] = -100
            rows.append({"x": torch.randn(LENGTH, WIDTH, generator=generator), "labels": labels})
        return DataLoader(rows, batch_size=8)


class Shifted(Padded):
    """As language models do it: each position predicts the next label."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self(batch["x"])[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss


def train(model: type[Chain], strategy: Any = "auto", devices: int = 1, **options: Any) -> Any:
    module = model()
    trainer = Trainer(strategy=strategy, devices=devices, **{**QUIET, "max_epochs": 1, **options})
    trainer.fit(module)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return metrics, {name: p.detach().clone() for name, p in module.named_parameters() if not p.is_meta}


def pipelined(model: type[Chain], callbacks: Any = None, **options: Any) -> Any:
    strategy = PipelineStrategy(**grouped(**{"num_microbatches": 4, "verbose": False, **options}))
    ranks = int(os.environ["WORLD_SIZE"])
    return train(model, strategy, ranks, callbacks=None if callbacks is None else callbacks())


def refused(model: str) -> str:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*changed inside of modules that are placed whole")
            pipelined(globals()[model])
    except VerificationError as error:
        return f"VerificationError: {error}"
    return "nothing"


DIFFERS = "VerificationError: The pipeline does not compute what the step computes on one rank"


def test_an_escape_that_cannot_be_seen_is_caught_on_every_rank() -> None:
    for text in SCENES.results(("refused", "Escaping")):
        assert DIFFERS in text
        assert "the gradient of 'head' (stage 1) has norm" in text


@pytest.mark.slow
def test_the_check_can_be_turned_off() -> None:
    assert SCENES.results(("unchecked",))[0] is True


def unchecked() -> bool:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*changed inside of modules that are placed whole")
        pipelined(Escaping, check=False)  # silently wrong, as it was asked for
    return True


def scene(name: str, *args: Any) -> Any:
    return globals()[name](*args)


@pytest.mark.parametrize("model", [Padded, Shifted])
def test_micro_batches_count_by_their_labels(model: type[Chain]) -> None:
    metrics, weights = train(model)
    for rank_metrics, rank_weights in SCENES.results(("pipelined", model)):
        torch.testing.assert_close(rank_metrics, metrics, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(rank_weights, weights, rtol=1e-5, atol=1e-6)


def shown(model: type[Chain]) -> str:
    """What the first rank prints at the start."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        pipelined(model, verbose=True)
    return " ".join(printed.getvalue().replace("│", " ").split())


def test_a_loss_between_rows_is_noted_with_both_numbers_and_the_cure() -> None:
    first, second = SCENES.results(("shown", Contrastive))
    assert "loss weights rows" in first
    assert re.search(r"the loss of the first batch is \d.* and no other weights fit: .* Give loss_weight=", first)
    assert second == ""


def test_weights_that_fit_are_in_the_table() -> None:
    first, _ = SCENES.results(("shown", Shifted))
    assert "labels that are not -100 in batch['labels'] without its first column" in first
    assert "no other weights fit" not in first


def timeline(directory: str) -> int:
    from lightning_smddp import PipelineTimeline

    callback = PipelineTimeline([Path(directory) / name for name in ("t.svg", "t.json")], batch_idx=1)
    pipelined(Chain, callbacks=lambda: [callback])
    return len(callback.spans)


@pytest.mark.slow
def test_the_timeline_of_a_step(tmp_path: Path) -> None:
    counts = run_trainer_ranks(timeline, 2, str(tmp_path))
    assert counts[0] == counts[1] > 0
    assert (tmp_path / "t.svg").read_text().startswith("<svg")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    for microbatch in range(4):
        assert sum(name == f"forward {microbatch}" for name in names) == 2  # one for each stage
        assert sum(name == f"backward {microbatch}" for name in names) == 2


def test_the_timeline_refuses_other_files() -> None:
    from lightning_smddp import PipelineTimeline

    with pytest.raises(ValueError, match=r"use files that end in \.svg, \.json"):
        PipelineTimeline("timeline.png")
    with pytest.raises(ValueError, match="at least 1"):
        PipelineTimeline("timeline.svg", batch_idx=0)


class SampledByHand(Chain):
    """Takes each rank for a replica, as scripts written for data parallelism do."""

    def train_dataloader(self) -> Any:
        data = super().train_dataloader().dataset
        return DataLoader(data, batch_size=8, sampler=DistributedSampler(data) if dist.is_initialized() else None)


def test_a_sampler_for_ranks_is_refused() -> None:
    with pytest.raises(RanksFailedError) as failure:
        run_trainer_ranks(pipelined, 2, SampledByHand)
    assert sorted(failure.value.tracebacks) == [0, 1]
    for text in failure.value.tracebacks.values():
        assert "has num_replicas=2, but there are 1 replicas" in text
        assert "trainer.distributed_sampler_kwargs" in text


SCENES = Cases(
    scene,
    [
        ("refused", "Escaping"),
        ("unchecked",),
        ("pipelined", Padded),
        ("pipelined", Shifted),
        ("shown", Contrastive),
        ("shown", Shifted),
    ],
)
