# python examples/pipeline_mlp.py
"""A plain classifier in a pipeline of two CPU ranks: only the word after ``strategy=`` says so."""

import lightning as L
import torch
import torch.nn.functional as F
from digits import DigitsData
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy


class Classifier(L.LightningModule):
    def __init__(self, width: int = 512, lr: float = 5e-3) -> None:
        super().__init__()
        self.lr, self.accuracy = lr, MulticlassAccuracy(10, average="micro")
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10),
        )  # fmt: skip

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.accuracy(self.net(images), labels)
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


if __name__ == "__main__":
    L.seed_everything(0)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="smddp_pipeline", max_epochs=2)
    trainer.fit(Classifier(), DigitsData(batch_size=128))
    trainer.print(f"validation accuracy {trainer.callback_metrics['val_accuracy']:.3f}")
