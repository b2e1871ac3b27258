# python examples/diloco.py
"""A byte-level GPT on nodes that synchronise parameters every 10 steps, for slow networks between them.

On this machine alone, two ranks are one node, which exchanges gradients and takes the outer steps by itself. On each of
two: `torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 examples/diloco.py`.
"""

import os

import lightning as L
from models import GPT, standard_library
from torch.utils.data import DataLoader

from lightning_smddp import DiLoCo, SMDDPStrategy


def main() -> None:
    L.seed_everything(0)
    strategy = SMDDPStrategy(sync=DiLoCo(every=10))  # with more nodes and steps: every=30, fragments=2, delay=1
    nodes = int(os.environ.get("WORLD_SIZE", 2)) // 2
    trainer = L.Trainer(accelerator="cpu", devices=2, num_nodes=nodes, strategy=strategy, max_steps=40)
    trainer.fit(GPT(width=96, depth=2, heads=3), DataLoader(standard_library(samples=4096), batch_size=8, shuffle=True))
    trainer.print(f"train loss {trainer.callback_metrics['train_loss']:.3f}")


if __name__ == "__main__":
    main()
