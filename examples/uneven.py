# python examples/uneven.py
"""A GPT whose ranks have unequal shares of a text: the epoch goes on until the last rank's data ends."""

import lightning as L
import torch
from models import GPT, standard_library
from torch.utils.data import DataLoader, IterableDataset

from lightning_smddp import CommunicationOptions, SMDDPStrategy


class Share(IterableDataset):
    def __iter__(self):
        whole, rows = standard_library(samples=520), (range(200), range(200, 520))
        return (whole[row] for row in rows[torch.distributed.get_rank()])


if __name__ == "__main__":
    L.seed_everything(0)
    strategy = SMDDPStrategy(communication=CommunicationOptions(uneven="join"))
    trainer = L.Trainer(accelerator="cpu", devices=2, max_epochs=1, strategy=strategy)
    trainer.fit(GPT(width=96, depth=2, heads=3), DataLoader(Share(), batch_size=8))
    trainer.print(f"{trainer.global_step} steps, train loss {trainer.callback_metrics['train_loss']:.2f}")
