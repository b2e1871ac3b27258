# python examples/pipeline_unet.py
"""A U-Net removes noise from digits in a pipeline: no list of layers, and skip connections across the cut."""

import lightning as L
import torch
import torch.nn.functional as F
from digits import DigitsData
from torch import Tensor, nn


def block(channels_in: int, channels: int) -> nn.Module:
    norm = nn.GroupNorm(4, channels)
    return nn.Sequential(nn.Conv2d(channels_in, channels, 3, padding=1), norm, nn.SiLU())


class UNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.down1, self.down2 = block(1, width), block(width, 2 * width)
        self.middle = block(2 * width, 2 * width)
        self.up2, self.up1 = block(4 * width, width), block(2 * width, width)
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        fine = self.down1(images)
        coarse = self.down2(F.max_pool2d(fine, 2))
        middle = self.middle(F.max_pool2d(coarse, 2))
        coarse = self.up2(torch.cat([coarse, F.interpolate(middle, scale_factor=2)], dim=1))
        return self.out(self.up1(torch.cat([fine, F.interpolate(coarse, scale_factor=2)], dim=1)))


class Denoiser(L.LightningModule):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.net = UNet(width)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        clean, noise = batch
        loss = F.mse_loss(self.net(clean + noise), clean)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def on_after_batch_transfer(self, batch: list[Tensor], dataloader_idx: int) -> list[Tensor]:
        return [batch[0], 0.5 * torch.randn_like(batch[0])]  # differs between ranks: the first one's is used

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=2e-3)


if __name__ == "__main__":
    L.seed_everything(0)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="smddp_pipeline", max_epochs=1, limit_val_batches=0, log_every_n_steps=5
    )
    trainer.fit(Denoiser(), DigitsData(batch_size=64))
    trainer.print(f"train loss {trainer.callback_metrics['train_loss']:.3f}")
