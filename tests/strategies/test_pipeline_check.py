"""What a pipeline compares and finds at its start, and says in its table; the timeline of a step."""

from __future__ import annotations

import functools
import io
import json
import os
import re
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanSquaredError

from lightning_smddp import PipelineTimeline
from lightning_smddp.bridge.step import LightningStep
from lightning_smddp.pipeline.partition.self_check import VerificationError
from lightning_smddp.strategies import callbacks
from tests.ranks import run_trainer_ranks
from tests.strategies.pipeline_learners import Bench, Cases, Net, call
from tests.strategies.test_contract import Escaping, Tokens


class Contrastive(Net):
    """A loss between the rows of a batch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        return F.cross_entropy(logits @ logits.T, torch.arange(len(logits)))


class Shifted(Tokens):
    """As language models do it: each position predicts the next label."""

    def __init__(self) -> None:
        super().__init__("shifted_labels")


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net[1] = nn.BatchNorm1d(16)


class Wrong(Net):
    """Of a pipeline whose second micro-batch counts too much."""

    def on_fit_start(self) -> None:
        original = LightningStep.loss

        def loss(step: LightningStep, microbatch: Any, result: Any) -> Any:
            found = original(step, microbatch, result)
            return found if microbatch.weight > 0.5 or found is None else 1.1 * found

        LightningStep.loss = loss  # type: ignore[method-assign]
        self.put_back = functools.partial(setattr, LightningStep, "loss", original)

    def on_exception(self, *args: Any) -> None:
        self.put_back()


class OwnSquaredError(MeanSquaredError):
    """It has a gradient, and does not say so."""

    is_differentiable = None


class WithMetric(Net):
    """A metric is a part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = OwnSquaredError()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        logits = self.net(batch[0])
        return F.cross_entropy(logits, batch[1]) + self.metric(logits, torch.ones_like(logits))


def refused(make: Callable[[], Any]) -> str:
    """The error of the check."""
    model = make()
    with pytest.raises(VerificationError) as caught:
        Bench({"num_microbatches": 4}).trainer(max_epochs=1, limit_train_batches=1).fit(model)
    getattr(model, "put_back", lambda: None)()
    return str(caught.value)


SCENES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "alone": (Net, {"pipeline_parallel_size": 1}),
    "unchecked": (Escaping, {"check": False}),
    "between rows": (Contrastive, {}),
    "labels": (Shifted, {}),
    "BatchNorm": (Normed, {}),
}


def shown(name: str) -> str:
    """What the first rank prints at the start."""
    model, options = SCENES[name]
    with redirect_stdout(io.StringIO()) as printed, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*changed inside of modules that are placed whole")
        Bench({"num_microbatches": 4, "verbose": True}).fit(model(), options, max_epochs=1)
    return " ".join(printed.getvalue().replace("│", " ").split())


WRONG: list[Any] = [(refused, Wrong), (refused, WithMetric)]
TWO = Cases(call, [*((shown, name) for name in SCENES), *WRONG])
DIFFERS = "The pipeline does not compute what the step computes on one rank"


def test_the_check_can_be_turned_off() -> None:
    """Silently wrong, as it was asked for."""
    first, _ = TWO.results((shown, "unchecked"))
    assert "stage 1 on rank 1" in first


def test_a_loss_between_rows_is_noted_with_both_numbers_and_the_cure() -> None:
    first, second = TWO.results((shown, "between rows"))
    assert "loss weights rows" in first
    assert re.search(r"the loss of the first batch is \d.* and no other weights fit: .* Give loss_weight=", first)
    assert second == ""


def test_weights_that_fit_are_in_the_table() -> None:
    first, _ = TWO.results((shown, "labels"))
    assert "labels that are not -100 in batch['labels'] without its first column" in first
    assert "no other weights fit" not in first


def test_the_table_says_what_sees_micro_batches() -> None:
    first, second = TWO.results((shown, "BatchNorm"))
    assert "stage 1 on rank 1" in first
    assert "4 micro-batches of 2 rows" in first
    assert "in training net.1 (BatchNorm)" in first
    assert second == ""


def test_one_stage_is_called_no_pipeline() -> None:
    first, _ = TWO.results((shown, "alone"))
    assert "training_step 1 stage is no pipeline: use more devices, or another pipeline_parallel_size" in first


def test_wrong_weights_of_micro_batches_are_caught() -> None:
    for text in TWO.results(WRONG[0]):
        assert DIFFERS in text


def test_a_metric_in_the_loss_has_to_say_that_it_is_differentiable() -> None:
    for text in TWO.results(WRONG[1]):
        assert DIFFERS in text
        assert "a metric in the loss that does not say `is_differentiable = True`" in text


# ---- the timeline ----


def timeline(directory: str) -> int:
    callback = PipelineTimeline([Path(directory) / name for name in ("t.svg", "t.png", "t.json")], batch_idx=1)
    output = io.StringIO()
    with redirect_stdout(output):
        Bench({"num_microbatches": 4}).fit(Net(), callbacks=[callback], max_epochs=1)
    assert output.getvalue().count(f"PipelineTimeline wrote {directory}/t.svg, ") == (os.environ["RANK"] == "0")
    return len(callback.spans)


@pytest.mark.slow
def test_the_timeline_of_a_step(tmp_path: Path) -> None:
    counts = run_trainer_ranks(timeline, 2, str(tmp_path))
    assert counts[0] == counts[1] > 0
    picture = (tmp_path / "t.svg").read_text()
    ElementTree.fromstring(picture)
    assert [text for text in ("rank 1", "forward", "backward", "send", "wait") if f"<!-- {text}" not in picture] == []
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    names = [event["name"] for event in spans]
    assert len(spans) == counts[0]
    assert {event["cat"] for event in spans} == {"forward", "backward", "send", "wait"}
    assert all(event["name"] == f"{event['cat']} {event['args']['microbatch']}" for event in spans)
    assert min(event["ts"] for event in spans) == 0
    rows = {(event["pid"], event["args"]["stage"], event["cat"] == "send", event["tid"]) for event in spans}
    assert rows == {(rank, rank, sends, int(sends)) for rank in (0, 1) for sends in (False, True)}
    titles = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert titles == ["rank 0", "compute", "send", "rank 1", "compute", "send"]
    for microbatch in range(4):
        assert sum(name == f"forward {microbatch}" for name in names) == 2  # one for each stage
        assert sum(name == f"backward {microbatch}" for name in names) == 2


def test_the_timeline_that_is_not_written_says_why() -> None:
    callback, trainer = PipelineTimeline("t.svg", batch_idx=90), mock.Mock()
    with pytest.warns(UserWarning, match="wrote nothing: there was no batch_idx=90"):
        callback.on_train_end(trainer, None)
    trainer.strategy = object()  # of another strategy
    with pytest.warns(UserWarning, match="writes nothing: only strategy='smddp_pipeline' has a timeline"):
        callback.on_train_start(trainer, None)


def test_a_timeline_has_nothing_of_a_fit_that_failed_in_the_batch() -> None:
    callback, failed, trainer = PipelineTimeline("t.svg", batch_idx=1), mock.Mock(), mock.Mock()
    trainer.strategy._pipelined.partitioned.runtime.engine.recorder = None  # each fit has an engine of its own
    with mock.patch.multiple(callbacks, dist=mock.DEFAULT, gather=mock.DEFAULT) as patched:
        callback.on_train_batch_start(failed, None, None, 1)
        callback.on_train_batch_end(trainer, None, None, None, 0)
    patched["gather"].assert_not_called()


def test_the_timeline_refuses_other_files() -> None:
    with pytest.raises(ValueError, match=r"use files that end in \.svg, \.png, \.json"):
        PipelineTimeline("timeline.pdf")
    with pytest.raises(ValueError, match="at least 1"):
        PipelineTimeline("timeline.svg", batch_idx=0)
