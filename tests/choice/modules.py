"""LightningModules to plan for; what they hold is known."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

WIDTH, ROWS = 1280, 128


class Wide(LightningModule):
    """Eight layers of 6 MiB, and activations of 0.6 MiB each: a third copy of gradients would be seen."""

    def __init__(self, width: int = WIDTH, rows: int = ROWS) -> None:
        super().__init__()
        self.rows, self.width = rows, width
        layers = [layer for _ in range(8) for layer in (nn.Linear(width, width), nn.Tanh())]
        self.net = nn.Sequential(*layers, nn.Linear(width, 3))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def train_dataloader(self) -> Any:
        x = torch.randn(self.rows, self.width, generator=torch.Generator().manual_seed(0))
        return DataLoader([[x, x[:, :3].argmax(1)]] * 8, batch_size=None)  # one batch: a data set takes memory, too


class Small(Wide):
    """For what needs no size."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(width, 8)


class Halves(Wide):
    """Two modules, of which two stages have one each, and an optimizer that keeps nothing."""

    def __init__(self) -> None:
        super().__init__(64, 8)
        self.net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class WithoutData(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 3)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(LightningDataModule):
    def train_dataloader(self) -> Any:
        return Small().train_dataloader()


class WideData(LightningDataModule):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.width = width

    def train_dataloader(self) -> Any:
        return Small(self.width).train_dataloader()


class ByHand(Small):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Empty(Small):
    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.zeros(0, 16)), batch_size=1)


SUMS = torch.zeros(())


class Summing(Small):
    """Its step writes a tensor that is no attribute of it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        SUMS.add_(loss.detach())
        return loss


class Penalised(Small):
    """No pipeline can follow it: it differentiates within the step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        loss = F.cross_entropy(self.net(x), batch[1])
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.pow(2).sum()


class ClippedSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1e-3)
        return super().step(closure)


class Clipped(Small):
    def configure_optimizers(self) -> Any:
        return ClippedSGD(self.parameters(), lr=0.1)


class WithLBFGS(Small):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def make(width: int = 16) -> Small:
    """A factory."""
    return Small(width)
