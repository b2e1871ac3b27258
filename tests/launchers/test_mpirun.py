"""Open MPI's mpirun for real: data-parallel, then pipeline training, without mpi4py; and a rank that dies."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.strategies.learners import Learner, fit
from tests.strategies.pipeline_learners import Bench, Evaluated, assert_same

ROOT = Path(__file__).parents[2]
MPIRUN = shutil.which("mpirun")

SCRIPT = """
import os
import signal
import sys

import torch
from lightning.pytorch import Trainer

from tests.strategies.learners import QUIET, Learner
from tests.strategies.pipeline_learners import Evaluated


class Dying(Learner):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_rank == 1 and batch_idx == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def train(name, model):
    trainer = Trainer(strategy=name, devices=2, max_epochs=2, **QUIET)
    print(type(trainer.strategy.cluster_environment).__name__, trainer.global_rank, trainer.world_size, flush=True)
    trainer.fit(model)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    torch.save((dict(model.state_dict()), metrics), os.path.join(sys.argv[1], f"{name}{trainer.global_rank}.pt"))


if __name__ == "__main__":
    train("smddp", Learner())
    train("smddp_pipeline", Evaluated())
    train("smddp", Dying())
"""


def open_mpi_is_missing() -> bool:
    if MPIRUN is None:
        return True
    version = subprocess.run([MPIRUN, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    return "Open MPI" not in version


@pytest.mark.exhaustive  # the example is run by mpirun, too
@pytest.mark.skipif(open_mpi_is_missing(), reason="Open MPI's mpirun is not installed (Debian: openmpi-bin)")
def test_two_ranks_of_open_mpi(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [str(MPIRUN), "--oversubscribe", "-np", "2", sys.executable, str(script), str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)}
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "TMPDIR": str(tmp_path)}
    result = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    output = result.stdout + result.stderr
    for rank in range(2):
        assert f"MPIRunEnvironment {rank} 2" in result.stdout, output
    assert output.count("Started by mpirun (Open MPI") == 1, output  # one process group, and rank 0 only

    model = Learner(batch_size=8)  # both ranks' batches
    fit("auto", model)
    pipeline = Bench().fit(Evaluated())
    for rank in range(2):
        weights, _ = torch.load(tmp_path / f"smddp{rank}.pt")
        torch.testing.assert_close(
            {name: weights[f"net.{name}"] for name in model.net.state_dict()},
            dict(model.net.state_dict()), rtol=1e-5, atol=1e-6,
        )  # fmt: skip
        weights, metrics = torch.load(tmp_path / f"smddp_pipeline{rank}.pt")
        assert_same(weights, pipeline["weights"])
        assert_same(metrics, pipeline["metrics"])

    assert result.returncode != 0
    assert "Rank 1 (host" in output
    assert re.search("its process (ended|was killed by SIGKILL)", output)  # known until mpirun has waited for it
