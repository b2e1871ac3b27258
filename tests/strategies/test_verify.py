"""``lightning-smddp verify``: a user's module in a pipeline and in one process that accumulates, step after step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from lightning_smddp.cli import main
from tests.programs import run_program
from tests.strategies.learners import CLASSES, samples
from tests.strategies.pipeline_learners import Evaluated, Net


class Verified(Evaluated):
    """With batches in random order, dropout, validation, a metric, an attribute, and hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1] = nn.Sequential(nn.Tanh(), nn.Dropout(0.3))
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.rows = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits = self.net(F.dropout(batch[0], 0.1))
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.rows += len(batch[0])
        return F.cross_entropy(logits, batch[1])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad *= 0.5

    def train_dataloader(self) -> Any:
        return DataLoader(samples(24), batch_size=5, shuffle=True)


class Decay(Callback):
    """Changes all weights behind each batch."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter *= 0.9


class CountsInHook(Net):
    """Does what it has to do elsewhere in a pipeline: something is different by the rank."""

    def on_train_batch_start(self, *args: Any) -> None:
        self.factor = 2.0 if torch.distributed.is_initialized() else 1.0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.log("factor", self.factor)
        return super().training_step(batch, batch_idx) * self.factor


@pytest.mark.slow
def test_the_command_says_what_is_the_same(tmp_path: Path) -> None:
    """The command, which starts ranks of its own."""
    module = "tests.strategies.test_verify:Verified"
    callback = ["--callback", "tests.strategies.test_verify:Decay"]
    options = ["--schedule", "interleaved_1f1b", "--num-microbatches", "4"]
    result = run_program(["-m", "lightning_smddp", "verify", module, *callback, *options], tmp_path, spawned=False)
    assert result.returncode == 0, result.stdout + result.stderr
    last = result.stdout.splitlines()[-1]
    assert "The pipeline computes what one process computes that accumulates gradients" in last
    assert "4 training and 3 validation steps are the same" in last


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (
            "test_verify:CountsInHook",
            [
                "output 'loss'",
                "logged 'factor'",
                "attribute 'factor'",
                "update of net.6.weight",
                "differs from one process",
            ],
        ),
        ("test_contract:Manual", ["ValueError: Manual uses manual optimization"]),
    ],
)
def test_what_differs_is_named(name: str, parts: list[str], tmp_path: Path) -> None:
    result = run_program(["-m", "lightning_smddp", "verify", f"tests.strategies.{name}"], tmp_path, spawned=False)
    assert result.returncode == 1, result.stdout + result.stderr
    for part in parts:
        assert part in result.stdout
    assert "Traceback" not in result.stdout + result.stderr


def test_what_is_asked_for_wrongly_is_said_in_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    module = "tests.strategies.test_verify:Verified"
    for name, why in {
        "tests.strategies.test_verify:Absent": "has no attribute 'Absent'. Write module:Class",
        "tests.absent:Net": "No module named 'tests.absent'. Write module:Class",
    }.items():
        with pytest.raises(SystemExit, match=why):
            main(["verify", name])
    with pytest.raises(SystemExit, match="verify: schedule='2f2b' is unknown"):
        main(["verify", module, "--schedule", "2f2b"])
    with pytest.raises(SystemExit):
        main(["verify", module, "--kwargs", "{bad"])
    assert "argument --kwargs: invalid loads value: '{bad'" in capsys.readouterr().err
    # What the user's own code raises is Python's, with its traceback.
    with pytest.raises(TypeError, match="unexpected keyword argument 'width'"):
        main(["verify", module, "--kwargs", '{"width": 3}'])
    (tmp_path / "broken.py").write_text("import not_installed")
    with mock.patch.object(sys, "path", [str(tmp_path), *sys.path]), pytest.raises(ModuleNotFoundError):
        main(["verify", "broken:Net"])
