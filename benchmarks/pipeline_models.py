"""The models of ``pipeline_step.py``: as a LightningModule, and as the list of layers that engines ask for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from models import ByteGPT
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 512  # of the chain
CONTEXT = 64  # of the GPT, in bytes


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

    def __init__(self, width: int = WIDTH, depth: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)))

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

    module: Callable[[], Any]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    batch: list[Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    names: list[str]  # of the layers, in the module


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
    """A byte-level GPT of 6 layers, 10.9 M parameters, texts of 64 bytes, AdamW."""
    text = torch.randint(256, (rows, CONTEXT + 1), generator=torch.Generator().manual_seed(1))
    batch = [text[:, :-1].contiguous(), text[:, 1:].contiguous()]
    names = ["gpt.embed", *(f"gpt.blocks.{layer}" for layer in range(6)), "gpt.norm"]
    return Workload(GPTModule, gpt_optimizer, batch, cross_entropy, names)


def mlp(rows: int) -> Workload:
    """16 x (Linear(512), GELU) in nn.Sequential, 4.2 M parameters, SGD."""
    generator = torch.Generator().manual_seed(1)
    batch = [torch.randn(rows, WIDTH, generator=generator) for _ in range(2)]
    return Workload(MLPModule, mlp_optimizer, batch, F.mse_loss, [f"net.{layer}" for layer in range(16)])


def tiny(rows: int) -> Workload:
    """14 x (Linear(16), GELU), SGD: a step is next to nothing but overhead."""
    generator = torch.Generator().manual_seed(1)
    batch = [torch.randn(rows, 16, generator=generator) for _ in range(2)]
    module = functools.partial(MLPModule, width=16, depth=14)
    return Workload(module, mlp_optimizer, batch, F.mse_loss, [f"net.{layer}" for layer in range(14)])


WORKLOADS: dict[str, Callable[[int], Workload]] = {"gpt": gpt, "mlp": mlp}
