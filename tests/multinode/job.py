"""A program that any launcher can start: trains in data parallelism, then as a pipeline; :func:`check` its outcome.

``python -m tests.multinode.job DIRECTORY DEVICES NODES``, where a rank may be told to meet with an accident; it then
trains only in the way in which that happens.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_smddp import PipelineStrategy, SMDDPStrategy
from tests.strategies.learners import Learner, make_trainer
from tests.strategies.pipeline_learners import Net

BATCH, COUNT, EPOCHS = 4, 96, 2
STEP_S = 0.02
ACCIDENT = "MULTINODE_ACCIDENT"  # kill:RANK:STRATEGY:STEP, or wait: it waits for somebody to kill it
NONE = "none:0::0"
ENVIRONMENTS = {"torchrun": "TorchElastic", "mpirun": "MPIRun", "srun": "SLURM", "sagemaker": "SageMaker"}


class Accident(Callback):
    """What happens once to a rank; the file ``accident`` says that it has."""

    def __init__(self, name: str, where: Path) -> None:
        self.file = where / "accident"
        kind, rank, strategy, step = os.environ.get(ACCIDENT, NONE).split(":")
        self.kind, self.rank = kind, int(rank)
        self.step = int(step) if strategy == name else -1

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(STEP_S)
        if trainer.global_rank == self.rank and trainer.global_step == self.step and not self.file.exists():
            self.file.write_text(f"{os.getpid()}")
            while self.kind == "wait":
                time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)


def fit(name: str, where: Path, devices: int, nodes: int, make: Any, model: LightningModule) -> dict[str, Any]:
    """Train ``model``; returns what this rank knows afterwards."""
    keeping = ModelCheckpoint(where / name, filename="{step}", every_n_train_steps=2, save_top_k=2, monitor="step",
                              mode="max")  # fmt: skip
    trainer = Trainer(
        strategy=make(resume="auto"), devices=devices, num_nodes=nodes, max_epochs=EPOCHS,
        callbacks=[Accident(name, where), keeping], accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=where,
    )  # fmt: skip
    environment: Any = trainer.strategy.cluster_environment  # type: ignore[attr-defined]
    trainer.fit(model)
    return {
        "environment": type(environment).__name__,
        "weights": {key: value.detach().clone() for key, value in model.state_dict().items()},
        "losses": model.losses,
        "ranks": (trainer.global_rank, trainer.world_size, trainer.local_rank, trainer.node_rank),
    }


def main(where: str, devices: str, nodes: str) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    here, n, d = Path(where), int(nodes), int(devices)
    ways: dict[str, Any] = {
        "smddp": lambda: fit("smddp", here, d, n, SMDDPStrategy, Learner(BATCH, COUNT)),
        "smddp_pipeline": lambda: fit("smddp_pipeline", here, d, n, PipelineStrategy, Net(batch_size=BATCH * 2)),
    }
    only = os.environ.get(ACCIDENT, NONE).split(":")[2]
    results = {name: train() for name, train in ways.items() if only in ("", name)}
    rank = next(iter(results.values()))["ranks"][0]
    torch.save(results, here / f"result-{rank}.pt")


def check(
    where: Path, devices: int, nodes: int, launcher: str, output: str, by_node: bool = False
) -> list[dict[str, Any]]:
    """Compare what all ranks have left with a training in this process; returns that, by rank.

    ``by_node``: the first rank of each node comes first, then the second of each.
    """
    world_size = devices * nodes
    missing = [rank for rank in range(world_size) if not (where / f"result-{rank}.pt").exists()]
    assert not missing, f"no results of ranks {missing}\n{output}"
    results = [torch.load(where / f"result-{rank}.pt", weights_only=True) for rank in range(world_size)]
    alone = {"smddp": Learner(BATCH * world_size, COUNT), "smddp_pipeline": Net(batch_size=BATCH * 2)}
    for name in results[0]:
        model = alone[name]
        trainer = make_trainer("auto", max_epochs=EPOCHS, devices=1, num_nodes=1)
        trainer.fit(model)
        for rank, result in enumerate(results):
            found = result[name]
            torch.testing.assert_close(found["weights"], dict(model.state_dict()), rtol=1e-5, atol=1e-5)
            node, local_rank = (rank % nodes, rank // nodes) if by_node else (rank // devices, rank % devices)
            assert found["ranks"] == (rank, world_size, local_rank, node), output
            assert found["environment"].startswith(ENVIRONMENTS[launcher]), output
    if "smddp_pipeline" in results[0]:
        seen = results[0]["smddp_pipeline"]["losses"]  # after a restart: of what was left to do
        torch.testing.assert_close(seen, alone["smddp_pipeline"].losses[-len(seen) :], rtol=1e-5, atol=1e-5)
    return results


if __name__ == "__main__":
    main(*sys.argv[1:])
