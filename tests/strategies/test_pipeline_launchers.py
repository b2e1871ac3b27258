"""Every way in which Lightning starts the ranks of a pipeline: scripts, spawn, fork, torchrun, CLI."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.programs import run_program
from tests.ranks import run_trainer_ranks
from tests.strategies.pipeline_learners import Bench, Evaluated, assert_same, outcome

SHORT = {"max_epochs": 1, "limit_val_batches": 2}
# No import of lightning_smddp: the strategy is known by its name.
SCRIPT = """
import os
import sys

import torch
from lightning.pytorch import Trainer

from tests.strategies.learners import QUIET
from tests.strategies.pipeline_learners import Evaluated

if __name__ == "__main__":
    model = Evaluated()
    trainer = Trainer(strategy={strategy!r}, devices=2, max_epochs=1, limit_val_batches=2, **QUIET)
    trainer.fit(model)
    metrics = {{name: float(value) for name, value in trainer.callback_metrics.items()}}
    torch.save((dict(model.state_dict()), metrics), os.path.join(sys.argv[1], f"rank{{trainer.global_rank}}.pt"))
    print(f"rank {{trainer.global_rank}} of {{trainer.world_size}} done\\n", end="")
"""


def run_script(directory: Path, strategy: str, *launcher: str) -> str:
    script = directory / "train.py"
    script.write_text(SCRIPT.format(strategy=strategy))
    result = run_program([*launcher, str(script), str(directory)], directory)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("smddp_pipeline: pipeline parallelism") == 1  # on one rank
    return result.stdout


def assert_learned(directory: Path, files: list[str]) -> None:
    expected = Bench().fit(Evaluated(), **SHORT)
    assert sorted(path.name for path in directory.glob("*.pt")) == files
    for name in files:
        weights, metrics = torch.load(directory / name)
        assert_same(weights, expected["weights"])
        assert_same(metrics, expected["metrics"])


@pytest.mark.slow
def test_a_script_starts_itself_again(tmp_path: Path) -> None:
    output = run_script(tmp_path, "smddp_pipeline")
    assert "rank 1 of 2 done" in output
    assert_learned(tmp_path, ["rank0.pt", "rank1.pt"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", [pytest.param("smddp_pipeline_spawn", marks=pytest.mark.exhaustive), "smddp_pipeline_fork"]
)
def test_spawn_and_fork(strategy: str, tmp_path: Path) -> None:
    """The whole module's weights come back to the one process that goes on."""
    run_script(tmp_path, strategy)
    assert_learned(tmp_path, ["rank0.pt"])


# ---- LightningCLI ----

BY_CLASS = """
strategy:
  class_path: lightning_smddp.PipelineStrategy
  init_args:
    pipeline_parallel_size: 2
    num_microbatches: 4
    schedule: interleaved_1f1b
    split: [net.2, net.4, net.6]
    bucket_cap_mb: 3
    shard: optimizer
    partition:
      stages_per_rank: 2
      placement: spread
    compression: null
    communication:
      class_path: lightning_smddp.CommunicationOptions
      init_args:
        collective_timeout: 45.5
        verbose: false
"""


def fit_with_cli(config: str, path: str) -> tuple[dict[str, Any], Any]:
    from lightning.pytorch.cli import LightningCLI

    trainer = {"accelerator": "cpu", "devices": 2, **SHORT, "logger": False, "enable_checkpointing": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    rank_path = Path(f"{path}.{os.environ['RANK']}")
    rank_path.write_text(yaml.safe_dump({"trainer": {**trainer, **quiet, **yaml.safe_load(config)}}))
    sys.argv = ["train.py", "fit", "--config", str(rank_path)]
    cli = LightningCLI(Evaluated, seed_everything_default=False, save_config_callback=None)
    return outcome(cli.model, cli.trainer), cli.trainer.strategy.options


@pytest.mark.slow
def test_cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # it warns of Lightning's use of it
    expected = Bench().fit(Evaluated(), **SHORT)
    for result, options in run_trainer_ranks(fit_with_cli, 2, BY_CLASS, str(tmp_path / "config.yaml")):
        assert_same(result, expected)
        assert (options.num_microbatches, options.schedule.name) == (4, "interleaved_1f1b")
        assert options.split == ["net.2", "net.4", "net.6"]
        assert options.partition.placement == "spread"
        assert options.gradients.bucket_cap_mb == 3
        assert options.shard == "optimizer"
        assert options.gradients.communication.limit == timedelta(seconds=45.5)
