"""What each rank of the multi-node test runs: digits with ``strategy="smddp"``; rank 0 writes what it saw as JSON."""

import json
import os
import sys

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SAMPLES, GLOBAL_BATCH, EPOCHS = 512, 64, 2


class Digits(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
        self.losses: list[float] = []

    def training_step(self, batch, index):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        mean = self.trainer.strategy.reduce(loss.detach().clone())
        self.losses.append(float(mean))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(strategy, devices: int, num_nodes: int, local_batch: int):
    torch.set_num_threads(1)
    torch.manual_seed(1)
    digits = load_digits()
    data = TensorDataset(
        torch.tensor(digits.data[:SAMPLES], dtype=torch.float32) / 16, torch.tensor(digits.target[:SAMPLES])
    )
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=devices,
        num_nodes=num_nodes,
        use_distributed_sampler=False,
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Digits()
    # Rank r of n takes samples r, r + n, ...: the global batches are those of one process.
    sampler = DistributedSampler(data, devices * num_nodes, int(os.environ.get("RANK", 0)), shuffle=False)
    trainer.fit(model, DataLoader(data, batch_size=local_batch, sampler=sampler))
    return trainer, model


if __name__ == "__main__":
    trainer, model = train("smddp", devices=2, num_nodes=2, local_batch=GLOBAL_BATCH // 4)
    report = trainer.strategy.communication_report
    result = {
        "losses": model.losses,
        "checksum": float(sum(p.double().abs().sum() for p in model.parameters())),
        "inter_node_bytes": report.inter_node_bytes,
        "gradient_bytes": report.gradient_bytes,
        "intra_node_bytes": report.intra_node_bytes,
    }
    with open(f"{sys.argv[1]}.{os.environ['RANK']}", "w") as file:
        json.dump(result, file)
