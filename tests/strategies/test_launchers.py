"""Every way in which Lightning starts ranks, with real processes: scripts, spawn, fork, torchrun, and the CLI."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_smddp import Compression
from tests.programs import ROOT, run_program
from tests.ranks import run_trainer_ranks
from tests.strategies.learners import Learner, Outcome, assert_equal, fit, fit_with_each
from tests.test_registration import NAMES, NO_IMPORT

# No import of lightning_smddp: the strategy is known by its name.
SCRIPT = """
import os
import sys

import torch
from lightning.pytorch import Trainer

from tests.strategies.learners import QUIET, Learner

if __name__ == "__main__":
    model = Learner()
    trainer = Trainer(strategy={strategy!r}, devices=2, max_epochs=2, **QUIET)
    trainer.fit(model)
    torch.save(model.net.state_dict(), os.path.join(sys.argv[1], f"rank{{trainer.global_rank}}.pt"))
    print(f"rank {{trainer.global_rank}} of {{trainer.world_size}} done\\n", end="")
"""


def run_script(directory: Path, strategy: str, *launcher: str) -> str:
    """What the script prints, in forked processes instead of new interpreters."""
    script = directory / "train.py"
    script.write_text(SCRIPT.format(strategy=strategy))
    result = run_program([*launcher, str(script), str(directory)], directory)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def expected_weights() -> dict[str, torch.Tensor]:
    model = Learner(batch_size=8)  # both ranks' batches
    fit("auto", model)
    return dict(model.net.state_dict())


def assert_learned(directory: Path, files: list[str]) -> None:
    assert sorted(path.name for path in directory.glob("*.pt")) == files
    for name in files:
        torch.testing.assert_close(torch.load(directory / name), expected_weights(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_script_starts_itself_again_and_all_names_are_known_without_an_import_of_ours(tmp_path: Path) -> None:
    """In new interpreters, each of which imports Lightning for eight seconds."""
    names = textwrap.dedent(NO_IMPORT.format(pytorch="lightning.pytorch", fabric="lightning.fabric"))
    first = 'import os\nif "LOCAL_RANK" not in os.environ:\n' + textwrap.indent(names, "    ")
    script = tmp_path / "train.py"
    script.write_text(first + SCRIPT.format(strategy="smddp"))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NAMES": ",".join(NAMES)}
    command = [sys.executable, str(script), str(tmp_path)]
    result = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    output = result.stdout
    assert output.count("lightning_smddp.strategies.lightning lightning_smddp.strategies.lightning\n") == 1
    assert output.count("smddp: data parallelism") == 1  # on one rank
    assert output.count("gradient communication over 12 steps") == 1
    assert_learned(tmp_path, ["rank0.pt", "rank1.pt"])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [pytest.param("smddp_spawn", marks=pytest.mark.exhaustive), "smddp_fork"])
def test_spawn_and_fork(strategy: str, tmp_path: Path) -> None:
    output = run_script(tmp_path, strategy)
    assert output.count("smddp: data parallelism") == 1
    assert_learned(tmp_path, ["rank0.pt"])  # the weights come back to the one process that goes on


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    output = run_script(tmp_path, "smddp_find_unused_parameters_true", *launcher)
    assert output.count("smddp: data parallelism") == 1
    assert_learned(tmp_path, ["rank0.pt", "rank1.pt"])


# ---- LightningCLI ----

BY_NAME = """
strategy: smddp
"""
BY_CLASS = """
strategy:
  class_path: lightning_smddp.SMDDPStrategy
  init_args:
    algorithm: native
    compression: {compression}
    bucket_cap_mb: 3
    communication:
      collective_timeout: 45.5
      verbose: false
    find_unused_parameters: true
"""


def fit_with_cli(config: str, path: str) -> tuple[Outcome, Any, dict[str, Any]]:
    from lightning.pytorch.cli import LightningCLI

    trainer = {"accelerator": "cpu", "devices": 2, "max_epochs": 2, "logger": False, "enable_checkpointing": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    rank_path = Path(f"{path}.{os.environ['RANK']}")
    rank_path.write_text(yaml.safe_dump({"trainer": {**trainer, **quiet, **yaml.safe_load(config)}}))
    sys.argv = ["train.py", "fit", "--config", str(rank_path)]
    cli = LightningCLI(Learner, seed_everything_default=False, save_config_callback=None)
    weights = {name: p.detach().clone() for name, p in cli.model.named_parameters()}
    strategy = cli.trainer.strategy
    return Outcome(cli.model.losses, weights), strategy._session.options, strategy._ddp_kwargs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "compression"),
    [
        (BY_NAME, None),
        pytest.param(BY_CLASS.format(compression="null"), None, marks=pytest.mark.exhaustive),
        pytest.param(BY_CLASS.format(compression="int8"), Compression("int8"), marks=pytest.mark.exhaustive),
        (BY_CLASS.format(compression="{method: powersgd, rank: 2}"), Compression("powersgd", rank=2)),
    ],
    ids=["name", "class", "class-method", "class-mapping"],
)
def test_cli(config: str, compression: Compression | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # it warns of Lightning's use of it
    results = run_trainer_ranks(fit_with_cli, 2, config, str(tmp_path / "config.yaml"))
    stock = run_trainer_ranks(fit_with_each, 2, ["ddp"], Learner, {})
    for (ours, options, ddp), (expected,) in zip(results, stock, strict=True):
        assert_equal(Outcome(ours.losses, ours.weights), Outcome(expected.losses, expected.weights))
        assert options.compression == compression
        if config is not BY_NAME:
            assert (options.algorithm, options.bucket_cap_mb) == ("native", 3)
            assert options.communication.limit == timedelta(seconds=45.5)
            assert options.communication.verbose is False
            assert ddp["find_unused_parameters"] is True
