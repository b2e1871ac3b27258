"""The models of ``pipeline_step.py``: as a LightningModule, and as the list of layers that engines ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from models import Block, ByteGPT
from torch import Tensor, nn
from torch.nn import functional as F


class Embedding(nn.Module):
    """The first layer of a :class:`ByteGPT`, with the same parameters."""

    def __init__(self, gpt: ByteGPT) -> None:
        super().__init__()
        self.embed, self.position = gpt.embed, gpt.position

    def forward(self, text: Tensor) -> Tensor:
        """Bytes (batch, time) to (batch, time, width)."""
        return self.embed(text) + self.position.weight[: text.shape[1]]


class GPTModule(LightningModule):
    """Calls the parts of a GPT itself, as modules that log their own losses do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gpt = ByteGPT()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Mean cross-entropy of a batch."""
        text, target = batch
        loss = cross_entropy(self.gpt(text), target)
        self.log("loss", loss)
        return loss

    def layers(self) -> list[nn.Module]:
        """The same parameters as a list of layers of one argument."""
        return [Embedding(self.gpt), *self.gpt.blocks, nn.Sequential(self.gpt.norm, self.gpt.head)]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Over all parameters."""
        return gpt_optimizer(self.parameters())


class MLPModule(LightningModule):
    """A plain ``nn.Sequential``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(16)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Mean squared error of a batch."""
        inputs, target = batch
        loss = F.mse_loss(self.net(inputs), target)
        self.log("loss", loss)
        return loss

    def layers(self) -> list[nn.Module]:
        """The layers, with these parameters."""
        return list(self.net)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Over all parameters."""
        return mlp_optimizer(self.parameters())


class Workload(NamedTuple):
    """What all arms train. ``loss(layers(inputs), target)`` is what a step minimises."""

    about: str
    module: Callable[[], Any]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    batch: list[Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    units: Callable[[int], str]  # the name in the module of the layer with this index


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Mean over all bytes."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def gpt_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW(parameters, lr=3e-4)


def mlp_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """SGD."""
    return torch.optim.SGD(parameters, lr=0.1)


def gpt(rows: int) -> Workload:
    """Of ``rows`` texts."""
    text = torch.randint(256, (rows, 65), generator=torch.Generator().manual_seed(1))
    return Workload(
        f"A byte-level GPT of 6 layers, 10.9 M parameters, batch {rows} x 64 bytes, AdamW.",
        GPTModule,
        gpt_optimizer,
        [text[:, :-1].contiguous(), text[:, 1:].contiguous()],
        cross_entropy,
        lambda layer: f"gpt.blocks.{layer - 1}",
    )


def mlp(rows: int) -> Workload:
    """Of ``rows`` samples."""
    generator = torch.Generator().manual_seed(1)
    return Workload(
        f"16 x (Linear(1024), GELU) in nn.Sequential, 16.8 M parameters, batch {rows}, SGD.",
        MLPModule,
        mlp_optimizer,
        [torch.randn(rows, 1024, generator=generator), torch.randn(rows, 1024, generator=generator)],
        F.mse_loss,
        lambda layer: f"net.{layer}",
    )


def stages_of(layers: Sequence[nn.Module], cut: int) -> list[nn.Module]:
    """Two stages, as one writes them by hand."""
    return [nn.Sequential(*layers[:cut]), nn.Sequential(*layers[cut:])]


WORKLOADS: dict[str, Callable[[int], Workload]] = {"gpt": gpt, "mlp": mlp}
__all__ = ["WORKLOADS", "Block", "Workload", "cross_entropy", "stages_of"]
