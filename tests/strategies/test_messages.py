"""What users see: the table at the start of fit, the report at its end, the monitor's values."""

from __future__ import annotations

import contextlib
import csv
import io
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
from tests.ranks import run_trainer_ranks
from tests.strategies.learners import Learner, make_trainer, silent


def fit_and_read(strategy_options: dict[str, Any]) -> tuple[list[str], Any]:
    """What fit prints, as lines without runs of blanks, and the report."""
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


def test_table_and_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    (lines, report), (others, same) = run_trainer_ranks(fit_and_read, 2, OPTIONS, node_ids=["a", "b"])
    assert others == []  # on the first rank only
    table = [line for line in lines if line in ROWS]
    assert table == ROWS
    end = lines.index("gradient communication over 4 steps")
    assert end > lines.index(ROWS[-1])
    assert report == same
    assert (report.steps, len(report.exposed_s)) == (4, 2)
    gradients = 4 * (8 * 16 + 16 + 16 * 3 + 3)
    assert report.gradient_bytes == 4 * gradients
    assert str(report).splitlines()[0] == "gradient communication over 4 steps"


def test_auto_says_what_it_measured_and_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    (lines, _), _ = run_trainer_ranks(fit_and_read, 2, {"verbose": True, "compression": "int8"})
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


def fit_with_monitor(directory: str, strategy: Any) -> None:
    trainer = make_trainer(
        silent(algorithm="hierarchical") if strategy is None else strategy,
        callbacks=[CommunicationMonitor()],
        logger=CSVLogger(directory, name="", version="logs"),
        log_every_n_steps=2,
        accumulate_grad_batches=2,
    )
    trainer.fit(Learner())


def test_monitor(tmp_path: Path) -> None:
    run_trainer_ranks(fit_with_monitor, 2, str(tmp_path), None, node_ids=["a", "b"])
    with (tmp_path / "logs" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["2", "4", "6"]
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
    assert run_trainer_ranks(broadcast_both, 2) == [[["version", 0], 1, [1.0, 1.0]]] * 2
