"""LightningModules whose memory ``plan_accuracy.py`` predicts and measures: five kinds of models, random weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

STEPS = 10
VOCABULARY = 2000


class Repeated(Dataset[tuple[Tensor, ...]]):
    """Some samples, several times, so that a data set takes no memory to speak of."""

    def __init__(self, tensors: tuple[Tensor, ...], times: int) -> None:
        self.samples, self.times = TensorDataset(*tensors), times

    def __len__(self) -> int:
        return self.times * len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return self.samples[index % len(self.samples)]


class Learner(LightningModule):
    """Trains with AdamW on batches that are there."""

    rows = 32

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, with two numbers of state a parameter."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def tensors(self, count: int) -> tuple[Tensor, ...]:
        """Of ``count`` samples."""
        raise NotImplementedError

    def train_dataloader(self) -> DataLoader[Any]:
        """Enough batches for four ranks. The data are few, and come again."""
        return DataLoader(Repeated(self.tensors(self.rows), 4 * STEPS), batch_size=self.rows)


class Small(Learner):
    """Two layers, whose memory is next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def tensors(self, count: int) -> tuple[Tensor, ...]:
        """Rows of 8 numbers."""
        return (torch.randn(count, 8),)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Squares."""
        return self.net(batch[0]).pow(2).mean()


class MLP(Learner):
    """Eight layers of 1,536; most of its memory is parameters and what belongs to them."""

    rows = 128

    def __init__(self) -> None:
        super().__init__()
        width = 1536
        layers = [layer for _ in range(8) for layer in (nn.Linear(width, width), nn.GELU())]
        self.net = nn.Sequential(nn.Linear(64, width), *layers, nn.Linear(width, 10))

    def tensors(self, count: int) -> tuple[Tensor, ...]:
        """Rows of 64 numbers."""
        return torch.randn(count, 64), torch.randint(10, (count,))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(self.net(batch[0]), batch[1])


class CNN(Learner):
    """Convolutions with BatchNorm; most of its memory is activations."""

    rows = 48

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for number, width in enumerate([16, 32, 32, 32, 64, 64, 128]):
            stride = 2 if number in (3, 5) else 1
            layers += [nn.Conv2d(channels, width, 3, stride, 1), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))

    def tensors(self, count: int) -> tuple[Tensor, ...]:
        """Images of 48 x 48."""
        return torch.randn(count, 3, 48, 48), torch.randint(10, (count,))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(self.net(batch[0]), batch[1])


class GPT2(Learner):
    """A GPT-2 of transformers."""

    rows = 4

    def __init__(self) -> None:
        super().__init__()
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=128, n_embd=384, n_layer=6, n_head=6, bos_token_id=1, eos_token_id=1
        )
        self.model = transformers.GPT2LMHeadModel(config)

    def tensors(self, count: int) -> tuple[Tensor, ...]:
        """Texts of 128 tokens."""
        return (torch.randint(VOCABULARY, (count, 128)),)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The model's own loss."""
        return self.model(input_ids=batch[0], labels=batch[0]).loss


class BERT(Learner):
    """A BERT of transformers with a classifier."""

    rows = 4

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6, "num_hidden_layers": 6}
        config = transformers.BertConfig(vocab_size=8000, max_position_embeddings=128, **sizes)
        config.num_labels = 5
        self.model = transformers.BertForSequenceClassification(config)

    def tensors(self, count: int) -> tuple[Tensor, ...]:
        """Texts of 128 tokens, with classes."""
        return torch.randint(8000, (count, 128)), torch.randint(5, (count,))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The model's own loss."""
        return self.model(input_ids=batch[0], labels=batch[1]).loss


class LSTM(Learner):
    """An embedding, two LSTM layers and a head over a vocabulary."""

    rows = 8

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 512)
        self.first = nn.LSTM(512, 768, batch_first=True)
        self.second = nn.LSTM(768, 768, batch_first=True)
        self.head = nn.Linear(768, VOCABULARY)

    def tensors(self, count: int) -> tuple[Tensor, ...]:
        """Texts of 65 tokens."""
        return (torch.randint(VOCABULARY, (count, 65)),)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy of the next token."""
        text = batch[0]
        hidden, _ = self.second(self.first(self.embedding(text[:, :-1]))[0])
        return F.cross_entropy(self.head(hidden).flatten(0, 1), text[:, 1:].flatten())


MODELS: dict[str, type[Learner]] = {model.__name__: model for model in (MLP, LSTM, CNN, BERT, GPT2)}
