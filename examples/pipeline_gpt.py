# python examples/pipeline_gpt.py
"""A GPT whose ``training_step`` calls its layers itself, in a pipeline; a callback draws what each rank did when.

``--width 320 --depth 8 --context 128 --steps 8`` is the run that is drawn in the README.
"""

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from models import Block, standard_library
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_smddp import PipelineStrategy, PipelineTimeline


class LayersGPT(L.LightningModule):
    def __init__(self, width: int, depth: int, context: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.ModuleList(Block(width, width // 32) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens = batch[0].long()
        x = self.token(tokens[:, :-1]) + self.position
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--timeline", nargs="*", default=["pipeline_timeline.svg", "pipeline_timeline.json"])
    options = parser.parse_args()
    L.seed_everything(0)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=PipelineStrategy(schedule=options.schedule, num_microbatches=8),
        callbacks=[PipelineTimeline(options.timeline, batch_idx=5)],  # .svg, or .json for ui.perfetto.dev
        max_steps=options.steps,
        log_every_n_steps=1,
    )
    torch.set_num_threads(1)
    model = LayersGPT(options.width, options.depth, options.context)
    data = standard_library(samples=16 * options.steps, context=options.context)
    trainer.fit(model, DataLoader(data, batch_size=16))
    trainer.print(f"train loss {trainer.callback_metrics['train_loss']:.3f}")
    trainer.print(f"timeline: {' '.join(options.timeline)}")


if __name__ == "__main__":
    main()
