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
from tests.strategies.pipeline_learners import Cases


def fit_and_read(strategy_options: dict[str, Any], rich: bool) -> tuple[list[str], Any]:
    """What fit prints, as lines without borders and runs of blanks, and the report."""
    find_spec = tables.find_spec
    tables.find_spec = lambda name: find_spec(name) if rich or name != "rich" else None
    trainer = make_trainer(silent(**strategy_options), accumulate_grad_batches=3)
    with contextlib.redirect_stdout(io.StringIO()) as text:
        trainer.fit(Learner())
    lines = [" ".join(line.replace("│", " ").split()) for line in text.getvalue().splitlines()]
    return lines, trainer.strategy.communication_report


ROWS = [
    "nodes 2 (a, b)",
    "ranks per node 1",
    "cluster size 2 ranks on cpu",
    "backend gloo",
    "algorithm hierarchical",
    "bucket size 2 MiB",
    "wire dtype bf16 between nodes, with error feedback",
]


OPTIONS = {"verbose": True, "algorithm": "hierarchical", "compression": "bf16", "bucket_cap_mb": 2}
ON_TWO_NODES = Cases(fit_and_read, [(OPTIONS, True), (OPTIONS, False)], node_ids=["a", "b"])


@pytest.mark.parametrize("rich", [True, False], ids=["rich", "plain"])
def test_table_and_report(rich: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    (lines, report), (others, same) = ON_TWO_NODES.results((OPTIONS, rich))
    assert others == []  # on the first rank only
    table = [line for line in lines if line in ROWS]
    assert table == ROWS
    end = lines.index("gradient communication over 4 steps")
    assert end > lines.index(ROWS[-1])
    assert any("┌" in line for line in lines) is rich
    assert report == same
    assert (report.steps, len(report.exposed_s)) == (4, 2)
    gradients = 4 * (8 * 16 + 16 + 16 * 3 + 3)
    assert report.gradient_bytes == 4 * gradients
    assert str(report).splitlines()[0] == "gradient communication over 4 steps"


def test_auto_says_what_it_measured_and_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    (lines, _), _ = run_trainer_ranks(fit_and_read, 2, {"verbose": True, "compression": "int8"}, False)
    (algorithm,) = [line for line in lines if line.startswith("algorithm ")]
    assert "(measured at " in algorithm
    assert "native " in algorithm
    assert "shared_memory " in algorithm
    (wire,) = [line for line in lines if line.startswith("wire dtype")]
    assert "int8 applies between nodes, and there is one node" in wire


class Recursing(io.StringIO):
    """As the stdout of rich's progress bar in a notebook: it prints what it is given to show, to itself."""

    def __init__(self, behind: Any) -> None:
        super().__init__()
        self.rich_proxied_file = behind

    def write(self, text: str) -> int:
        return self.write(text)


def test_what_cannot_be_printed_fails_no_run(capfd: pytest.CaptureFixture[str]) -> None:
    behind, closed = io.StringIO(), io.StringIO()
    closed.close()
    for stdout in (Recursing(behind), closed, Recursing(closed)):
        with contextlib.redirect_stdout(stdout):
            tables.say("text")
    assert behind.getvalue() == "text\n"
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
