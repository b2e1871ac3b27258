"""Sound: CTC, speech to text, separation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.public.cases import MARKS, WHOLE, Case, HuggingFace, Learner, check, integers, numbers, table

transformers = pytest.importorskip("transformers")
conformer = pytest.importorskip("conformer")
filterbanks = pytest.importorskip("asteroid_filterbanks")

pytestmark = MARKS


def sounds(count: int = 16, length: int = 1600) -> Tensor:
    return numbers(count, length)


WAV2VEC = {
    "vocab_size": 12,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "conv_dim": (8, 8),
    "conv_stride": (10, 8),
    "conv_kernel": (10, 8),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "ctc_loss_reduction": "mean",
    "pad_token_id": 0,
    "layerdrop": 0.0,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "activation_dropout": 0.0,
    "final_dropout": 0.0,
}


class Wav2Vec2(HuggingFace):
    """CTC without masking; labels padded by -100."""

    rate = 0.005
    more: dict[str, Any] = {"mask_time_prob": 0.0, "apply_spec_augment": False}

    def build(self) -> Any:
        return transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**{**WAV2VEC, **self.more}))

    def data(self) -> Any:
        labels = integers(1, 12, 16, 5, seed=1)
        for index, row in enumerate(labels):
            row[2 + index % 4 :] = -100
        return [{"input_values": a, "labels": b} for a, b in zip(sounds(), labels, strict=True)]


class Wav2Vec2SpecAugment(Wav2Vec2):
    """Masks are drawn by numpy in the middle of the model."""

    more = {"mask_time_prob": 0.3, "mask_time_length": 2, "apply_spec_augment": True}


class Wav2Vec2LayerDrop(Wav2Vec2):
    """Layers are left out by chance."""

    more = {"mask_time_prob": 0.0, "apply_spec_augment": False, "layerdrop": 0.5}


class Whisper(HuggingFace):
    rate = 0.005

    def build(self) -> Any:
        sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 8, "vocab_size": 32}
        sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_source_positions": 20}
        tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
        config = transformers.WhisperConfig(**sizes, **tokens, encoder_ffn_dim=32, decoder_ffn_dim=32, dropout=0.0)
        return transformers.WhisperForConditionalGeneration(config)

    def data(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        features = torch.randn(16, 8, 40, generator=generator)
        labels = torch.randint(3, 32, (16, 6), generator=generator)
        for index, row in enumerate(labels):
            row[3 + index % 3 :] = -100
        return [{"input_features": a, "labels": b} for a, b in zip(features, labels, strict=True)]


class Conformer(Learner):
    """Batch norm in its convolutions; frames are classified."""

    rate = 0.01

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(40, 16)
        self.model = conformer.Conformer(dim=16, depth=2, dim_head=8, heads=2, conv_kernel_size=5)
        self.head = nn.Linear(16, 5)

    def loss(self, batch: Any) -> Tensor:
        scores = self.head(self.model(self.first(batch[0].view(-1, 40, 40))))
        return F.cross_entropy(scores.transpose(1, 2), batch[1])

    def data(self) -> Any:
        labels = integers(0, 5, 16, 40, seed=1)
        return list(zip(sounds(), labels, strict=True))


class Separation(Learner):
    """Encoder, masks, decoder in the manner of ConvTasNet; the best order of the speakers is searched."""

    rate = 0.005

    def __init__(self) -> None:
        super().__init__()
        bank = filterbanks.FreeFB(n_filters=16, kernel_size=16, stride=8)
        self.encoder = filterbanks.Encoder(bank)
        self.decoder = filterbanks.Decoder(filterbanks.FreeFB(n_filters=16, kernel_size=16, stride=8))
        self.masker = nn.Sequential(
            nn.GroupNorm(1, 16),
            nn.Conv1d(16, 32, 1),
            nn.PReLU(),
            nn.Conv1d(32, 32, 3, padding=2, dilation=2),
            nn.ReLU(),
        )

    def loss(self, batch: Any) -> Tensor:
        mixed, sources = batch
        coded = self.encoder(mixed[:, None])
        masks = self.masker(coded).unflatten(1, (2, 16))
        out = self.decoder(masks * coded[:, None])[..., : mixed.shape[-1]]
        padded = F.pad(out, (0, sources.shape[-1] - out.shape[-1]))
        orders = torch.stack([(padded - sources).pow(2).mean((1, 2)), (padded - sources.flip(1)).pow(2).mean((1, 2))])
        return orders.min(0).values.mean()

    def data(self) -> Any:
        sources = sounds(32, 400).view(16, 2, 400)
        return list(zip(sources.sum(1), sources, strict=True))


@table(
    Case(Wav2Vec2, WHOLE),
    Case(Wav2Vec2, variant="cut"),
    Case(Wav2Vec2SpecAugment),
    Case(Wav2Vec2LayerDrop),
    Case(Whisper),
    Case(Conformer, WHOLE),
    Case(Separation),
)
def test_audio(case: Case) -> None:
    check(case)
