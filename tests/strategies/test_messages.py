"""What users see: the table at the start of fit, the report at its end, the monitor's values."""

from __future__ import annotations

import contextlib
import csv
import io
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from rich.file_proxy import FileProxy

from lightning_smddp import CommunicationMonitor, PipelineStrategy, SMDDPFabricStrategy, SMDDPStrategy
from lightning_smddp.strategies import tables
from tests.ranks import run_trainer_ranks
from tests.strategies.grouped import grouped
from tests.strategies.learners import Learner, make_trainer, silent
from tests.strategies.pipeline_learners import Evaluated, Net


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
    "replicas 2",
    "per-replica batch 4",
    "accumulation 3",
    "global batch 24 for each optimizer step",
    "backend gloo",
    "algorithm hierarchical",
    "bucket size 2 MiB",
    "wire dtype bf16 between nodes, with error feedback",
]


@pytest.mark.parametrize("rich", [True, False], ids=["rich", "plain"])
def test_table_and_report(rich: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    options = {"verbose": True, "algorithm": "hierarchical", "compression": "bf16", "bucket_cap_mb": 2}
    (lines, report), (others, same) = run_trainer_ranks(fit_and_read, 2, options, rich, node_ids=["a", "b"])
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

    def __init__(self) -> None:
        super().__init__()
        self.rich_proxied_file = io.StringIO()

    def write(self, text: str) -> int:
        return self.write(text)


def fit_without_stdout(strategy: Any) -> tuple[int, str, str]:
    closed = io.StringIO()
    closed.close()
    with contextlib.redirect_stdout(Recursing()) as stdout:
        trainer = make_trainer(strategy(), max_steps=1)
        trainer.fit(Net())
        with contextlib.redirect_stdout(closed):
            make_trainer(strategy(), max_steps=1).fit(Net())
        return trainer.global_step, stdout.rich_proxied_file.getvalue(), str(trainer.strategy.communication_report)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [SMDDPStrategy, PipelineStrategy])
def test_a_report_that_cannot_be_printed_fails_no_run(strategy: Any) -> None:
    first, second = run_trainer_ranks(fit_without_stdout, 2, strategy)
    assert first[0] == second[0] > 0
    title = "data parallelism" if strategy is SMDDPStrategy else "pipeline parallelism"
    assert title in first[1]
    assert second[1] == ""
    if strategy is SMDDPStrategy:
        assert first[2] in first[1]


def test_rich_bars_in_a_notebook_show_text_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich 15 in ipykernel 7: showing something flushes stdout, which is rich's own and shows what it still holds."""
    shown: list[str] = []

    def display(part: Any) -> None:
        sys.stdout.flush()
        shown.append(part.text)

    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", ModuleType("IPython.display"))
    monkeypatch.setattr(sys.modules["IPython.display"], "display", display, raising=False)
    behind = io.StringIO()
    monkeypatch.setattr(sys, "stdout", FileProxy(Console(force_jupyter=True), behind))
    tables.say("first\nsecond")
    assert "\n".join(shown).split() == ["first", "second"]
    assert behind.getvalue() == ""


def test_what_is_said_starts_on_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    class Progressing:
        progress_bar_callback = object()

    tables.say("text", Progressing())
    tables.say("more")
    assert capsys.readouterr().out == "\ntext\nmore\n"


def test_plain_tables_fit_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(tables, "find_spec", lambda name: None)
    words = " ".join(f"word-{index:02}" for index in range(40))
    tables.print_table("title", [("name", words), ("other name", "value")])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert " ".join(" ".join(lines[1:-1]).split()) == f"name {words}"
    assert lines[-1] == "  other name  value"


def fit_then_validate() -> str:
    short: Any = {"max_steps": 1, "limit_val_batches": 1, "limit_test_batches": 1}
    trainer, model = make_trainer(PipelineStrategy(**grouped(check=False)), **short), Evaluated()
    with contextlib.redirect_stdout(io.StringIO()) as text:
        trainer.fit(model)
        trainer.validate(model)
        trainer.test(model)
    return text.getvalue()


@pytest.mark.slow
def test_the_table_of_a_pipeline_comes_once() -> None:
    first, second = run_trainer_ranks(fit_then_validate, 2)
    assert first.count("pipeline parallelism") == 1
    assert "pipeline parallelism" not in second


def test_silence() -> None:
    for lines, report in run_trainer_ranks(fit_and_read, 2, {"verbose": False}, True):
        assert lines == []
        assert report.steps == 4


def test_no_report_before_fit() -> None:
    assert silent().communication_report is None


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


def test_monitor_with_another_strategy(tmp_path: Path) -> None:
    run_trainer_ranks(fit_with_monitor, 2, str(tmp_path), "ddp")
    assert not (tmp_path / "logs" / "metrics.csv").exists()


# ---- strategy.broadcast ----


@dataclass
class Release:
    version: int
    weights: torch.Tensor


def broadcast_both(kind: str) -> list[Any]:
    if kind == "fabric":
        fabric = Fabric(accelerator="cpu", devices=2, strategy=SMDDPFabricStrategy(**grouped(verbose=False)))
        fabric.launch()
        strategy: Any = fabric.strategy
    else:
        strategy = make_trainer(silent()).strategy
        assert strategy.broadcast(print) is print  # alone so far
        strategy.setup_environment()
    rank = dist.get_rank()
    release = strategy.broadcast(Release(rank, torch.ones(2) * rank), src=1)
    with pytest.raises(ValueError, match="cannot be sent to other ranks"):
        strategy.broadcast(threading.Lock() if rank == 0 else None)
    return [strategy.broadcast(["version", rank]), release.version, release.weights.tolist()]


@pytest.mark.parametrize("kind", ["trainer", "fabric"])
def test_strategies_broadcast_anything(kind: str) -> None:
    assert run_trainer_ranks(broadcast_both, 2, kind) == [[["version", 0], 1, [1.0, 1.0]]] * 2
