# python examples/resume.py
"""Run it twice. It is told to stop in the middle of an epoch, as on a spot instance, and goes on as if it had not."""

import os
import signal

import lightning as L
from digits import Digits, DigitsData
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_smddp import SMDDPStrategy

DIRECTORY = "resume_checkpoints"


class Reclaimed(L.Callback):
    """The host takes the machine back, the first time."""

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: object) -> None:
        if trainer.global_step == 15 and trainer.is_global_zero and not os.environ.get("UNBROKEN"):
            os.kill(os.getpid(), signal.SIGTERM)  # any rank may get it: all stop at one step, and save


if __name__ == "__main__":
    L.seed_everything(0)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        logger=False,
        strategy=SMDDPStrategy(resume="auto"),  # from the newest valid checkpoint in DIRECTORY, if there is one
        callbacks=[ModelCheckpoint(DIRECTORY, save_last=True), Reclaimed()],
    )
    trainer.fit(Digits(width=32), DigitsData(batch_size=64))
    weights = sum(p.detach().double().abs().sum().item() for p in trainer.model.parameters())
    trainer.print(f"step {trainer.global_step}, sum of weights {weights:.12f}")
