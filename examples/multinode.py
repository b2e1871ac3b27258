# torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=host0 examples/multinode.py
"""One script for any number of nodes, under any launcher: it asks what was started, and goes on after a restart.

Type the line above on both nodes; with ``--max-restarts=3`` ranks may die three times. ``slurm.sbatch`` and
``mpirun.sh`` start this file too. ``--strategy smddp_pipeline`` makes one pipeline of all ranks.
"""

import argparse

import lightning as L
from digits import DigitsData
from lightning.pytorch.callbacks import ModelCheckpoint
from pipeline_mlp import Classifier

from lightning_smddp import PipelineStrategy, SMDDPStrategy
from lightning_smddp.launchers.detection import detect

STRATEGIES = {"smddp": SMDDPStrategy, "smddp_pipeline": PipelineStrategy}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", choices=STRATEGIES, default="smddp")
    strategy = STRATEGIES[parser.parse_args().strategy]
    L.seed_everything(0)
    launch = detect()  # what the launcher has set
    trainer = L.Trainer(
        devices=launch.local_world_size or 1,
        num_nodes=launch.num_nodes or 1,
        max_epochs=2,
        logger=False,
        strategy=strategy(resume="auto"),
        callbacks=[ModelCheckpoint("multinode_checkpoints", save_last=True)],  # which all nodes see
    )
    trainer.fit(Classifier(), DigitsData(batch_size=64))
    accuracy = trainer.callback_metrics.get("val_accuracy")  # None: an earlier start has finished the run
    trainer.print("nothing is left to do" if accuracy is None else f"validation accuracy {accuracy:.3f}")
