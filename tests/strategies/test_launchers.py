"""Every way in which Lightning starts ranks, with real processes: scripts, spawn, fork, torchrun.

`tests/test_readme.py` starts the script of a pipeline, and `tests/test_examples.py` LightningCLI.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_smddp.strategies import launchers
from lightning_smddp.strategies.launchers import launch_ranks
from tests.programs import ROOT, run_program
from tests.strategies.learners import Learner, fit
from tests.strategies.pipeline_learners import Evaluated
from tests.test_registration import NAMES, NO_IMPORT

# No import of lightning_smddp: the strategy is known by its name.
SCRIPT = """
import os
import sys

import torch
from lightning.pytorch import Trainer

from tests.strategies.learners import QUIET
from tests.strategies.{module}

if __name__ == "__main__":
    model = Model()
    trainer = Trainer(strategy={strategy!r}, devices=2, max_epochs=2, limit_val_batches=0, **QUIET)
    trainer.fit(model)
    torch.save(model.net.state_dict(), os.path.join(sys.argv[1], f"rank{{trainer.global_rank}}.pt"))
"""
LEARNER, NET = "learners import Learner as Model", "pipeline_learners import Evaluated as Model"


def run_script(directory: Path, strategy: str, *launcher: str) -> str:
    """What the script prints, in forked processes instead of new interpreters."""
    script = directory / "train.py"
    script.write_text(SCRIPT.format(strategy=strategy, module=NET if "pipeline" in strategy else LEARNER))
    result = run_program([*launcher, str(script), str(directory)], directory)
    assert result.returncode == 0, result.stdout + result.stderr
    title = "smddp_pipeline: pipeline" if "pipeline" in strategy else "smddp: data"
    assert result.stdout.count(f"{title} parallelism") == 1
    return result.stdout


def assert_learned(directory: Path, files: list[str], pipeline: bool = False) -> None:
    model: Any = Evaluated() if pipeline else Learner(batch_size=8)  # both ranks' batches
    fit("auto", model, limit_val_batches=0)
    assert sorted(path.name for path in directory.glob("*.pt")) == files
    for name in files:
        torch.testing.assert_close(torch.load(directory / name), model.net.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_script_starts_itself_again_and_all_names_are_known_without_an_import_of_ours(tmp_path: Path) -> None:
    """In new interpreters, each of which imports Lightning for eight seconds; to look for garbage would be two more."""
    names = textwrap.dedent(NO_IMPORT.format(pytorch="lightning.pytorch", fabric="lightning.fabric"))
    first = 'import gc, os\ngc.disable()\nif "LOCAL_RANK" not in os.environ:\n' + textwrap.indent(names, "    ")
    script = tmp_path / "train.py"
    script.write_text(first + SCRIPT.format(strategy="smddp", module=LEARNER))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NAMES": ",".join(NAMES)}
    command = [sys.executable, str(script), str(tmp_path)]
    result = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    output = result.stdout
    assert output.count("lightning_smddp.strategies.lightning lightning_smddp.strategies.lightning\n") == 1
    assert output.count("smddp: data parallelism") == 1  # on one rank
    assert output.count("gradient communication over 6 steps") == 1
    assert_learned(tmp_path, ["rank0.pt", "rank1.pt"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("smddp_spawn", "smddp_pipeline_spawn")),
        *("smddp_fork", "smddp_pipeline_fork"),
    ],
)
def test_spawn_and_fork(strategy: str, tmp_path: Path) -> None:
    """The weights, of the whole module, come back to the one process that goes on."""
    run_script(tmp_path, strategy)
    assert_learned(tmp_path, ["rank0.pt"], "pipeline" in strategy)


@pytest.mark.parametrize(("shared", "note"), [(2, ""), (1, " They share 1 processor: on CPU use devices=1.")])
def test_a_start_says_how_many_processes_come(shared: int, note: str) -> None:
    lightnings = type("Launcher", (), {"is_interactive_compatible": False, "launch": lambda self, run, **_: run()})
    trainer = mock.Mock(**{"strategy.num_processes": 2})
    with mock.patch.multiple(launchers, processors=lambda: shared, rank_zero_info=mock.DEFAULT) as said:
        launch_ranks(lightnings(), print, trainer=trainer)
    said["rank_zero_info"].assert_called_once_with(f"Starting 2 processes.{note}")


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run_script(tmp_path, "smddp_find_unused_parameters_true", *launcher)
    assert_learned(tmp_path, ["rank0.pt", "rank1.pt"])
