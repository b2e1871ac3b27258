# python examples/pipeline_transformers.py --model gpt2
"""Unmodified models of ``transformers`` in a pipeline of two CPU ranks: random weights, and no download.

``--model`` is one of gpt2, llama, bert, vit, t5, mixtral. What is trained is the same LightningModule for all.
"""

import argparse

import lightning as L
import torch
import transformers as hf
from models import standard_library
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset

from lightning_smddp import PipelineStrategy


class HuggingFace(L.LightningModule):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict, batch_idx: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def build(name: str) -> torch.nn.Module:
    size = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256}
    text = {"vocab_size": 256, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    pixels = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
    experts = {"num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True}
    t5 = {"vocab_size": 256, "d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 3, "decoder_start_token_id": 0}
    models = {
        "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=128, n_layer=4, n_head=4, **text)),
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**size, **text)),
        "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**size, vocab_size=256)),
        "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(**size, **pixels)),
        "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**t5)),
        "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**size, **text, **experts)),
    }
    return models[name]()


def data(name: str, samples: int) -> Dataset:
    if name == "vit":
        digits = load_digits()
        images = torch.tensor(digits.images[:samples, None], dtype=torch.float32) / 16
        return [{"pixel_values": i, "labels": int(n)} for i, n in zip(images, digits.target, strict=False)]
    texts = standard_library(samples).tensors[0][:, :64].long()
    return [{"input_ids": text, "labels": text} for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--stages", type=int, default=2)
    options = parser.parse_args()
    L.seed_everything(0)
    strategy = PipelineStrategy(num_microbatches=4 if options.stages < 4 else 8)
    trainer = L.Trainer(
        accelerator="cpu", devices=options.stages, strategy=strategy, max_steps=options.steps, log_every_n_steps=5
    )
    trainer.fit(HuggingFace(build(options.model)), DataLoader(data(options.model, 16 * options.steps), batch_size=16))
    trainer.print(f"train loss {trainer.callback_metrics['train_loss']:.3f}")


if __name__ == "__main__":
    main()
