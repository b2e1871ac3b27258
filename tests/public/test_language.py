"""Language models: padding, seq2seq, experts, adapters, generation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.public.cases import (
    INTERLEAVED,
    MARKS,
    REPLICAS,
    WHOLE,
    ZERO_BUBBLE,
    Case,
    HuggingFace,
    check,
    table,
)

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


def sentences(count: int = 24, side: str = "right", pad_labels: bool = True) -> list[dict[str, Tensor]]:
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
        labels = ids.masked_fill(mask == 0, -100) if pad_labels else ids
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return rows


class Causal(HuggingFace):
    side = "right"

    def data(self) -> Any:
        return sentences(side=self.side)


class Gpt2Right(Causal):
    def build(self) -> Any:
        sizes = {"n_layer": 4, "n_embd": 32, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": 32}
        drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drop, bos_token_id=1, eos_token_id=1))


class Gpt2Packed(Gpt2Right):
    """Several texts in a row, one behind the other; positions start anew with each."""

    def data(self) -> Any:
        rows = []
        for index, row in enumerate(sentences(side="none")):
            cut = 2 + index % 7
            labels = row["labels"].clone()
            labels[cut] = -100
            positions = torch.cat([torch.arange(cut), torch.arange(LENGTH - cut)])
            rows.append({"input_ids": row["input_ids"], "labels": labels, "position_ids": positions})
        return rows


class LlamaRight(Causal):
    def build(self) -> Any:
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=2, **SMALL))


class LlamaLeft(LlamaRight):
    side = "left"


class LlamaUnpadded(LlamaRight):
    """Every row as long as the others, so that replicas weigh the same."""

    side = "none"


class LlamaLora(LlamaRight):
    """As peft's quick tour has it."""

    def build(self) -> Any:
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
        return peft.get_peft_model(super().build(), config)

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2, eps=1e-4)


class BertMasked(Causal):
    def build(self) -> Any:
        drop = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, **drop))

    def data(self) -> Any:
        rows = sentences()
        for index, row in enumerate(rows):
            hidden = torch.zeros(LENGTH, dtype=torch.bool)
            hidden[: 1 + index % 3] = True
            row["labels"] = row["labels"].masked_fill(~hidden, -100)
            row["input_ids"] = row["input_ids"].masked_fill(hidden, 4)
        return rows


class T5Translation(Causal):
    def build(self) -> Any:
        sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        return transformers.T5ForConditionalGeneration(
            transformers.T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0)
        )


class MixtralExperts(Causal):
    """Its loss has a balance of experts over the whole batch."""

    def build(self) -> Any:
        routing = {"num_local_experts": 4, "output_router_logits": True, "num_key_value_heads": 2}
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**routing, **SMALL))


class MambaText(Causal):
    def build(self) -> Any:
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 4}
        return transformers.MambaForCausalLM(transformers.MambaConfig(**sizes))

    def loss(self, batch: Any) -> Tensor:
        return self.model(batch["input_ids"], labels=batch["labels"]).loss


class Generating(Gpt2Right):
    """Generates texts in validation, as summarisation examples do."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        texts = self.model.generate(batch["input_ids"][:, :4], max_new_tokens=4, do_sample=False, pad_token_id=0)
        self.log("val_sum", texts.float().mean())


class T5Beams(T5Translation):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        texts = self.model.generate(batch["input_ids"], max_new_tokens=4, num_beams=2)
        self.log("val_sum", texts.float().mean())


@table(
    Case(Gpt2Right),
    Case(Gpt2Packed),
    Case(LlamaRight),
    Case(LlamaRight, INTERLEAVED, variant="interleaved"),
    Case(LlamaLeft),
    Case(LlamaLeft, {"split": ["model.model.layers.1.self_attn.o_proj"]}, variant="inside_a_layer"),
    Case(LlamaUnpadded, REPLICAS, ranks=4, variant="replicas"),
    Case(LlamaUnpadded, ZERO_BUBBLE, variant="zero_bubble"),
    Case(LlamaLora),
    Case(BertMasked),
    Case(T5Translation),
    Case(MixtralExperts, WHOLE),
    Case(MambaText),
    Case(Generating),
    Case(T5Beams),
)
def test_language(case: Case) -> None:
    check(case)
