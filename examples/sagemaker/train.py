# torchrun --nproc-per-node 2 examples/sagemaker/train.py --steps 30
"""What a SageMaker job runs: bytes of text, in data parallelism or in a pipeline, as the job was started.

``--stages 2`` makes pipelines of two ranks. Outside of a job it reads Python's standard library. Where checkpoints and
the model go, and going on after an interruption, is not said here: in a job that is automatic (docs/sagemaker.md).
"""

import argparse
import os
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_smddp import from_sagemaker
from lightning_smddp.launchers.detection import detect
from lightning_smddp.sagemaker.distribution import is_job

CONTEXT = 16


class NextByte(L.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Embedding(256, 16), nn.Flatten(),
            nn.Linear(16 * CONTEXT, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 256),
        )  # fmt: skip

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        text = batch[0].long()
        loss = F.cross_entropy(self.layers(text[:, :-1]), text[:, -1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--stages", type=int, default=1, help="ranks of a pipeline; 1 is data parallelism")
    parser.add_argument("--microbatches", type=int, default=8)
    options, _ = parser.parse_known_args()  # SageMaker may add --mp_parameters
    pipeline = {"pipeline_parallel_size": options.stages, "num_microbatches": options.microbatches}
    launch, in_job = detect(), is_job(os.environ)
    strategy = from_sagemaker(None if in_job else {}, **(pipeline if options.stages > 1 else {}))
    trainer = L.Trainer(
        strategy=strategy,
        num_nodes=launch.num_nodes or 1,
        devices=launch.local_world_size or "auto",
        max_steps=options.steps,
        log_every_n_steps=10,
        callbacks=[ModelCheckpoint(every_n_train_steps=10)],
        logger=CSVLogger(os.environ.get("SM_OUTPUT_DATA_DIR", ".")),
    )
    L.seed_everything(0, verbose=False)
    files = sorted(Path(os.environ.get("SM_CHANNEL_TRAIN", os.path.dirname(os.__file__))).glob("*.*"))
    text = b"".join(file.read_bytes() for file in files[:40] if file.is_file())
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, CONTEXT + 1, 3)
    trainer.fit(NextByte(options.width), DataLoader(TensorDataset(rows), batch_size=64, shuffle=True))
    trainer.print(f"train loss {trainer.callback_metrics['train_loss']:.3f}")


if __name__ == "__main__":
    main()
