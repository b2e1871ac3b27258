# python examples/gpt.py
"""A byte-level GPT reads Python's standard library on two CPU ranks; options and the report as an object."""

import lightning as L
from models import GPT, standard_library
from torch.utils.data import DataLoader

from lightning_smddp import CommunicationOptions, SMDDPStrategy


def main() -> None:
    L.seed_everything(0)
    communication = CommunicationOptions(collective_timeout=60)
    strategy = SMDDPStrategy(algorithm="auto", communication=communication)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=30, log_every_n_steps=10)
    trainer.fit(GPT(width=96, depth=2, heads=3), DataLoader(standard_library(samples=4096), batch_size=8, shuffle=True))
    report = strategy.communication_report  # on every rank: all of them answer
    trainer.print(f"train loss {trainer.callback_metrics['train_loss']:.3f}")
    trainer.print(f"gradients a step: {report.gradient_bytes / report.steps / 2**20:.1f} MiB on each rank")


if __name__ == "__main__":
    main()
