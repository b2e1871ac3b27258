# python examples/fsdp_gpt.py
"""A GPT of which each of two CPU ranks keeps a half: parameters, gradients and optimizer state."""

import lightning as L
from lightning.pytorch.utilities import grad_norm
from models import GPT, standard_library
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_smddp import SMDDPFSDPStrategy


class Watched(GPT):
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.log_dict({name: norm for name, norm in grad_norm(self, 2).items() if "total" in name})  # of the whole


if __name__ == "__main__":
    L.seed_everything(0)
    data = DataLoader(standard_library(samples=512), batch_size=16, shuffle=True)
    strategy = SMDDPFSDPStrategy(activation_checkpointing="offload")  # on GPUs, activations wait in the host's memory
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, gradient_clip_val=1.0)
    trainer.fit(Watched(width=96, depth=2, heads=3), data)
    trainer.save_checkpoint("gpt.ckpt")  # one plain file, for any strategy
    found = trainer.callback_metrics
    trainer.print(f"train loss {found['train_loss']:.2f}, gradient norm {found['grad_2.0_norm_total']:.2f}")
