# python examples/digits.py
"""A small network learns scikit-learn's digits on two CPU ranks."""

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


class Digits(L.LightningModule):
    def __init__(self, width: int = 64, lr: float = 3e-3) -> None:
        super().__init__()
        self.lr, self.accuracy = lr, MulticlassAccuracy(10, average="micro")
        self.net = nn.Sequential(
            nn.Conv2d(1, width // 2, 3, padding=1), nn.ReLU(),
            nn.Conv2d(width // 2, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(16 * width, 2 * width), nn.ReLU(), nn.Linear(2 * width, 10),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.accuracy(self(images), labels)
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class DigitsData(L.LightningDataModule):
    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size  # of each replica: the global batch is replicas x batch_size
        digits = load_digits()  # 1797 images of 8 x 8
        data = TensorDataset(torch.tensor(digits.images)[:, None].float() / 16, torch.tensor(digits.target))
        self.train, self.val = torch.utils.data.random_split(data, [1437, 360], torch.Generator().manual_seed(0))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size)


if __name__ == "__main__":
    L.seed_everything(0)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="smddp", max_epochs=2)
    trainer.fit(Digits(), DigitsData())
    trainer.print(f"validation accuracy {trainer.callback_metrics['val_accuracy']:.3f}")
