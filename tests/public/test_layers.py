"""Generative models (diffusion, flows), and reversible layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.public.cases import MARKS, WHOLE, Case, Learner, check, integers, numbers, table
from tests.public.test_vision import digits

diffusers = pytest.importorskip("diffusers")
zuko = pytest.importorskip("zuko")
reformer = pytest.importorskip("reformer_pytorch")

pytestmark = MARKS


class Unet2dSampling(Learner):
    """diffusers' training example; noise and times come with the data.

    Samples images at the end of each epoch: the model is called in a hook, again and again.
    """

    rate = 0.01

    def __init__(self) -> None:
        super().__init__()
        self.model = diffusers.UNet2DModel(
            sample_size=16, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 16),
            norm_num_groups=4, attention_head_dim=4, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )  # fmt: skip
        self.scheduler = diffusers.DDPMScheduler(num_train_timesteps=20)

    def loss(self, batch: Any) -> Tensor:
        images, noise, times = batch
        noisy = self.scheduler.add_noise(images, noise, times)
        return F.mse_loss(self.model(noisy, times, return_dict=False)[0], noise)

    def data(self) -> Any:
        noise, times = numbers(24, 1, 16, 16), integers(0, 20, 24)
        return [(image, *more) for (image, _), *more in zip(digits(size=16, channels=1), noise, times, strict=True)]

    def on_train_epoch_end(self) -> None:
        generator = torch.Generator().manual_seed(0)
        image = torch.randn(2, 1, 16, 16, generator=generator)
        self.scheduler.set_timesteps(3)
        with torch.no_grad():
            for time in self.scheduler.timesteps:
                image = self.scheduler.step(
                    self.model(image, time).sample, time, image, generator=generator
                ).prev_sample
        self.log("sample_mean", image.mean())


class SplineFlow(Learner):
    """zuko: the model returns a distribution."""

    rate = 0.01

    def __init__(self) -> None:
        super().__init__()
        self.flow = zuko.flows.NSF(features=4, context=3, transforms=3, hidden_features=(16, 16))

    def loss(self, batch: Any) -> Tensor:
        return -self.flow(batch[0]).log_prob(batch[1]).mean()

    def data(self) -> Any:
        return list(zip(numbers(24, 3), numbers(24, 4, seed=1), strict=True))


class Reversible(Learner):
    """reformer-pytorch: activations are computed again from the outputs, by hashes with random rotations."""

    rate = 0.01

    def __init__(self) -> None:
        super().__init__()
        sizes = {"num_tokens": 32, "dim": 16, "depth": 2, "heads": 2, "max_seq_len": 16, "bucket_size": 4}
        self.model = reformer.ReformerLM(**sizes, n_hashes=2, causal=True)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.model(batch).transpose(1, 2), batch)

    def data(self) -> Any:
        return list(integers(0, 32, 24, 16))


@table(
    Case(Unet2dSampling),
    Case(SplineFlow),
    Case(Reversible, WHOLE),  # it keeps states of generators and hashes from a forward pass to its backward
)
def test_layers(case: Case) -> None:
    check(case)
