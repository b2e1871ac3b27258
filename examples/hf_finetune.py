# python examples/hf_finetune.py --strategy smddp
"""A Hugging Face classifier learns from which module of Python a piece of text is; nothing is downloaded.

The tokenizer is made on the spot; the weights are random: put ``from_pretrained`` in both places for a real one.
``--strategy smddp_pipeline`` runs the same script as a pipeline of two ranks.
"""

import argparse
import sysconfig
from pathlib import Path

import lightning as L
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader, random_split
from torchmetrics.classification import MulticlassAccuracy

MODULES = ["argparse", "doctest", "tarfile", "typing"]  # the classes
LENGTH = 32  # tokens


def texts() -> list[tuple[str, int]]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    sources = [(folder / f"{name}.py").read_text(encoding="utf-8") for name in MODULES]
    return [(text[at : at + 200], label) for label, text in enumerate(sources) for at in range(0, 60_000, 200)]


def make_tokenizer(corpus: list[str]) -> hf.PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=1000, special_tokens=["[UNK]", "[PAD]"]))
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]")


class FineTuning(L.LightningModule):
    def __init__(self, config: hf.PretrainedConfig, lr: float) -> None:
        super().__init__()
        self.lr, self.accuracy = lr, MulticlassAccuracy(len(MODULES), average="micro")
        self.model = hf.BertForSequenceClassification(config)

    def training_step(self, batch: dict, batch_idx: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict, batch_idx: int) -> None:
        self.accuracy(self.model(**batch).logits, batch["labels"])
        self.log("val_accuracy", self.accuracy)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = hf.get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", choices=["smddp", "smddp_pipeline"], default="smddp")
    L.seed_everything(0)
    samples = texts()
    tokenizer = make_tokenizer([text for text, _ in samples])
    tokens = tokenizer([text for text, _ in samples], padding="max_length", truncation=True, max_length=LENGTH)
    columns = {**tokens, "labels": [label for _, label in samples]}
    data = [{name: columns[name][row] for name in columns} for row in range(len(samples))]
    train, val = random_split(data, [0.9, 0.1], torch.Generator().manual_seed(0))
    size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config = hf.BertConfig(vocab_size=len(tokenizer), num_labels=len(MODULES), pad_token_id=1, **size)
    strategy = parser.parse_args().strategy
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, gradient_clip_val=1.0)
    rows = 16 if strategy == "smddp" else 32  # of each of two replicas, or of one pipeline
    loaders = [DataLoader(part, rows, collate_fn=hf.default_data_collator) for part in (train, val)]
    trainer.fit(FineTuning(config, lr=3e-3), *loaders)
    trainer.print(f"validation accuracy {trainer.callback_metrics['val_accuracy']:.3f}")
