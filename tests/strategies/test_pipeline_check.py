"""What a pipeline finds at its start and says in its table; the timeline of a step."""

from __future__ import annotations

import io
import json
import re
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_smddp import PipelineTimeline
from tests.ranks import run_trainer_ranks
from tests.strategies.pipeline_learners import Bench, Cases, Net
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


class Normalised(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(2, nn.BatchNorm1d(16))


SCENES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "unchecked": (Escaping, {"check": False}),
    "between rows": (Contrastive, {}),
    "labels": (Shifted, {}),
    "BatchNorm": (Normalised, {}),
}


def shown(name: str) -> str:
    """What the first rank prints at the start."""
    model, options = SCENES[name]
    with redirect_stdout(io.StringIO()) as printed, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*changed inside of modules that are placed whole")
        Bench({"num_microbatches": 4, "verbose": True}).fit(model(), options, max_epochs=1)
    return " ".join(printed.getvalue().replace("│", " ").split())


TWO = Cases(shown, [(name,) for name in SCENES])


def test_the_check_can_be_turned_off() -> None:
    """Silently wrong, as it was asked for."""
    first, _ = TWO.results(("unchecked",))
    assert "stage 1 on rank 1" in first


def test_a_loss_between_rows_is_noted_with_both_numbers_and_the_cure() -> None:
    first, second = TWO.results(("between rows",))
    assert "loss weights rows" in first
    assert re.search(r"the loss of the first batch is \d.* and no other weights fit: .* Give loss_weight=", first)
    assert second == ""


def test_weights_that_fit_are_in_the_table() -> None:
    first, _ = TWO.results(("labels",))
    assert "labels that are not -100 in batch['labels'] without its first column" in first
    assert "no other weights fit" not in first


def test_the_table_says_what_sees_micro_batches() -> None:
    first, second = TWO.results(("BatchNorm",))
    assert "stage 1 on rank 1" in first
    assert "4 micro-batches of 2 rows" in first
    assert "in training net.2 (BatchNorm)" in first
    assert second == ""


def timeline(directory: str) -> int:
    callback = PipelineTimeline([Path(directory) / name for name in ("t.svg", "t.json")], batch_idx=1)
    Bench({"num_microbatches": 4}).fit(Net(), callbacks=[callback], max_epochs=1)
    return len(callback.spans)


@pytest.mark.slow
def test_the_timeline_of_a_step(tmp_path: Path) -> None:
    counts = run_trainer_ranks(timeline, 2, str(tmp_path))
    assert counts[0] == counts[1] > 0
    assert (tmp_path / "t.svg").read_text().startswith("<?xml")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    for microbatch in range(4):
        assert sum(name == f"forward {microbatch}" for name in names) == 2  # one for each stage
        assert sum(name == f"backward {microbatch}" for name in names) == 2


def test_the_timeline_refuses_other_files(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"use files that end in \.svg, \.png, \.json"):
        PipelineTimeline("timeline.pdf")
    with pytest.raises(ValueError, match="at least 1"):
        PipelineTimeline("timeline.svg", batch_idx=0)
    monkeypatch.setattr("lightning_smddp.strategies.callbacks.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-smddp\[plot\]'"):
        PipelineTimeline("timeline.svg")
    PipelineTimeline("timeline.json")
