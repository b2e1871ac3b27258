# python examples/padded_lines.py
"""A GPT reads lines of unequal length: each byte counts alike, whichever rank and batch it comes in."""

import linecache
import sysconfig
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from models import GPT
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_smddp import CommunicationOptions, SMDDPStrategy


def lines(count: int, context: int = 64) -> TensorDataset:
    """The first lines of Python's own argparse: bytes, and which byte follows each; -100 is padding."""
    source = linecache.getlines(str(Path(sysconfig.get_paths()["stdlib"]) / "argparse.py"))
    texts = [line.encode()[: context + 1] for line in source if len(line) > 2][:count]
    tokens, labels = torch.zeros(count, context, dtype=torch.long), torch.full((count, context), -100)
    for row, text in enumerate(texts):
        tokens[row, : len(text) - 1] = torch.tensor(list(text[:-1]))
        labels[row, : len(text) - 1] = torch.tensor(list(text[1:]))
    return TensorDataset(tokens, labels)


class LineGPT(GPT):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens, labels = batch
        loss = F.cross_entropy(self(tokens).flatten(0, 1), labels.flatten())  # a mean over labels that are not -100
        self.log("train_loss", loss)
        return loss


def main() -> None:
    L.seed_everything(0)
    communication = CommunicationOptions(loss_weight="labels")
    strategy = SMDDPStrategy(communication=communication)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=40, log_every_n_steps=10)
    trainer.fit(LineGPT(width=96, depth=2, heads=3), DataLoader(lines(1024), batch_size=8, shuffle=True))
    trainer.print(f"train loss {trainer.callback_metrics['train_loss']:.3f}")


if __name__ == "__main__":
    main()
