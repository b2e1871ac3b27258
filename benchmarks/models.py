"""The models of ``ddp_step.py``, each with a batch and an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Workload(NamedTuple):
    """``loss(module(*inputs), target)`` is what a step minimises."""

    module: nn.Module
    inputs: Tensor
    target: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: torch.optim.Optimizer


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp(self.norm2(x))


class ByteGPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self, width: int = 384, layers: int = 6, heads: int = 6, context: int = 64) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Bytes (batch, time) to logits (batch, time, 256)."""
        x = self.embed(text) + self.position.weight[: text.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def mlp(rank: int) -> Workload:
    """16 x Linear(1024) with GELU, 16.8 M parameters, batch 32, SGD: little compute for many gradients."""
    torch.manual_seed(0)
    module = nn.Sequential(*(layer for _ in range(16) for layer in (nn.Linear(1024, 1024), nn.GELU())))
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return Workload(module, torch.randn(32, 1024), torch.randn(32, 1024), F.mse_loss, optimizer)


def gpt(rank: int) -> Workload:
    """A byte-level GPT of 6 layers, 10.9 M parameters, batch 4 x 64 bytes, AdamW."""
    torch.manual_seed(0)
    module = ByteGPT()
    torch.manual_seed(1 + rank)
    text = torch.randint(256, (4, 65))
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-4)
    return Workload(module, text[:, :-1], text[:, 1:], _cross_entropy, optimizer)


def gpt_short(rank: int) -> Workload:
    """The same GPT with one text of 64 bytes a rank: a global batch spread thinly over many ranks."""
    full = gpt(rank)
    return full._replace(inputs=full.inputs[:1], target=full.target[:1])


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


WORKLOADS = {"mlp": mlp, "gpt": gpt, "gpt_short": gpt_short}
