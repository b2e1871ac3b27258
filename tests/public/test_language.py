"""Language models: padding, seq2seq, experts, adapters, generation; and sound: CTC with masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.public.cases import INTERLEAVED, MARKS, WHOLE, Case, HuggingFace, check, integers, numbers, table

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = MARKS

VOCABULARY, LENGTH = 64, 12
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}


def sentences(count: int = 24, side: str = "right") -> list[dict[str, Tensor]]:
    """Token rows of very different lengths, padded to one."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for index in range(count):
        ids = torch.randint(5, VOCABULARY, (LENGTH,), generator=generator)
        mask = torch.ones(LENGTH, dtype=torch.long)
        padding = (index * 5) % (LENGTH - 3)
        if padding and side == "right":
            mask[-padding:] = 0
        if padding and side == "left":
            mask[:padding] = 0
        ids = ids * mask
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return rows


class Causal(HuggingFace):
    side = "right"

    def data(self) -> Any:
        return sentences(side=self.side)


class LlamaRight(Causal):
    def build(self) -> Any:
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=2, **SMALL))


class LlamaLeft(LlamaRight):
    side = "left"


class LlamaLora(LlamaRight):
    """As peft's quick tour has it."""

    def build(self) -> Any:
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
        return peft.get_peft_model(super().build(), config)

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2, eps=1e-4)


class MixtralExperts(Causal):
    """Its loss has a balance of experts over the whole batch."""

    def build(self) -> Any:
        routing = {"num_local_experts": 4, "output_router_logits": True, "num_key_value_heads": 2}
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**routing, **SMALL))


class T5Beams(Causal):
    def build(self) -> Any:
        sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        return transformers.T5ForConditionalGeneration(
            transformers.T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0)
        )

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        texts = self.model.generate(batch["input_ids"], max_new_tokens=4, num_beams=2)
        self.log("val_sum", texts.float().mean())


# ---- sound ----

WAV2VEC = {
    **{"vocab_size": 12, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
    **{"conv_dim": (8, 8), "conv_stride": (10, 8), "conv_kernel": (10, 8), "num_conv_pos_embeddings": 8},
    **{"num_conv_pos_embedding_groups": 2, "ctc_loss_reduction": "mean", "pad_token_id": 0, "layerdrop": 0.0},
    **{"hidden_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0, "activation_dropout": 0.0},
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
        return [{"input_values": a, "labels": b} for a, b in zip(numbers(16, 1600), labels, strict=True)]


class Wav2Vec2SpecAugment(Wav2Vec2):
    """Masks are drawn by numpy in the middle of the model."""

    more = {"mask_time_prob": 0.3, "mask_time_length": 2, "apply_spec_augment": True}


class Wav2Vec2LayerDrop(Wav2Vec2):
    """Layers are left out by chance."""

    more = {"mask_time_prob": 0.0, "apply_spec_augment": False, "layerdrop": 0.5}


@table(
    Case(LlamaRight, INTERLEAVED, variant="interleaved"),
    Case(LlamaLeft, {"split": ["model.model.layers.1.self_attn.o_proj"]}, variant="inside_a_layer"),
    Case(LlamaLora),
    Case(MixtralExperts, WHOLE),
    Case(T5Beams),
    Case(Wav2Vec2SpecAugment),
    Case(Wav2Vec2LayerDrop),
)
def test_language(case: Case) -> None:
    check(case)
