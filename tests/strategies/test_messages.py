"""What users see: the table at the start of fit, the report at its end, the monitor's values."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger

from lightning_smddp import CommunicationMonitor
from lightning_smddp.strategies import tables
from tests.strategies.learners import Learner, make_trainer, silent
from tests.strategies.pipeline_learners import Cases, call


def fit_and_read(strategy_options: dict[str, Any]) -> tuple[list[str], Any]:
    """What fit prints, as lines without runs of blanks, and the report."""
    os.environ["COLUMNS"] = "200"
    trainer = make_trainer(silent(**strategy_options), accumulate_grad_batches=3)
    with contextlib.redirect_stdout(io.StringIO()) as text:
        trainer.fit(Learner())
    lines = [" ".join(line.split()) for line in text.getvalue().splitlines()]
    return lines, trainer.strategy.communication_report


ROWS = [
    "ranks 2 on cpu",
    "nodes 2 (a, b)",
    "backend gloo",
    "algorithm hierarchical",
    "bucket size 2 MiB",
    "compression bf16",
]


OPTIONS = {"verbose": True, "algorithm": "hierarchical", "compression": "bf16", "bucket_cap_mb": 2}
AUTO = {"verbose": True, "compression": "int8"}


def test_table_and_report() -> None:
    (lines, report), (others, same) = ON_TWO_NODES.results((fit_and_read, OPTIONS))
    assert others == []  # on the first rank only
    table = [line for line in lines if line in ROWS]
    assert table == ROWS
    end = lines.index("gradient communication over 2 steps")
    assert end > lines.index(ROWS[-1])
    assert report == same
    assert (report.steps, len(report.exposed_s)) == (2, 2)
    gradients = 4 * (8 * 16 + 16 + 16 * 3 + 3)
    assert report.gradient_bytes == 2 * gradients
    assert str(report).splitlines()[0] == "gradient communication over 2 steps"


def test_auto_says_what_it_measured_and_notes() -> None:
    (lines, _), _ = ON_ONE_NODE.results((fit_and_read, AUTO))
    (algorithm,) = [line for line in lines if line.startswith("algorithm ")]
    assert "(measured at " in algorithm
    assert "native " in algorithm
    assert "shared_memory " in algorithm
    (wire,) = [line for line in lines if line.startswith("compression")]
    assert "int8 applies between nodes, and there is one node" in wire


class Recursing(io.StringIO):
    """As the stdout of rich's progress bar in a notebook: it prints what it is given to show, to itself."""

    def write(self, text: str) -> int:
        return self.write(text)


def test_what_cannot_be_printed_fails_no_run(capfd: pytest.CaptureFixture[str]) -> None:
    closed = io.StringIO()
    closed.close()
    for stdout in (Recursing(), closed):
        with contextlib.redirect_stdout(stdout):
            tables.say("text")
    assert capfd.readouterr().err.splitlines().count("text") == 2


# ---- the monitor ----


def fit_with_monitor() -> list[dict[str, str]]:
    """What the first rank's logger wrote."""
    with tempfile.TemporaryDirectory() as directory:
        trainer = make_trainer(
            silent(algorithm="hierarchical"),
            callbacks=[CommunicationMonitor()],
            logger=CSVLogger(directory, name="", version="logs"),
            log_every_n_steps=2,
            accumulate_grad_batches=2,
        )
        trainer.fit(Learner())
        written = Path(directory, "logs", "metrics.csv")
        return list(csv.DictReader(written.read_text().splitlines())) if written.exists() else []


def test_monitor() -> None:
    rows, others = ON_TWO_NODES.results((fit_with_monitor,))
    assert others == []
    assert [row["step"] for row in rows] == ["2", "4"]
    for row in rows:
        assert float(row["smddp/exposed_ms"]) > 0
        assert float(row["smddp/waited_ms"]) >= 0


# ---- strategy.broadcast ----


@dataclass
class Release:
    version: int
    weights: torch.Tensor


def broadcast_both() -> list[Any]:
    strategy = make_trainer(silent()).strategy
    assert strategy.broadcast(print) is print  # alone so far
    strategy.setup_environment()
    rank = dist.get_rank()
    release = strategy.broadcast(Release(rank, torch.ones(2) * rank), src=1)
    with pytest.raises(ValueError, match="cannot be sent to other ranks"):
        strategy.broadcast(threading.Lock() if rank == 0 else None)
    return [strategy.broadcast(["version", rank]), release.version, release.weights.tolist()]


def test_strategies_broadcast_anything() -> None:
    assert ON_ONE_NODE.results((broadcast_both,)) == [[["version", 0], 1, [1.0, 1.0]]] * 2


ON_ONE_NODE = Cases(call, [(broadcast_both,), (fit_and_read, AUTO)])  # the first one begins without a group
ON_TWO_NODES = Cases(call, [(fit_and_read, OPTIONS), (fit_with_monitor,)], node_ids=["a", "b"])
