"""A byte-level GPT and the text that it reads; nothing here knows that training may be distributed."""

import sysconfig
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(L.LightningModule):
    """Predicts the next byte. 1.9 million parameters by default."""

    def __init__(self, width: int = 192, depth: int = 4, heads: int = 6, context: int = 64, lr: float = 2e-3) -> None:
        super().__init__()
        self.lr = lr
        self.token, self.position = nn.Embedding(256, width), nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens = batch[0].long()
        loss = F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def standard_library(samples: int, context: int = 64) -> TensorDataset:
    """``samples`` sequences of ``context + 1`` bytes from the sources of the Python that runs this."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(root.glob("*.py")))  # some 4 MB
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    starts = torch.randint(len(data) - context - 1, (samples,), generator=torch.Generator().manual_seed(0))
    return TensorDataset(torch.stack([data[start : start + context + 1] for start in starts]))
