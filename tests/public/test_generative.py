"""Diffusion, flows, vector quantisation, Gaussian processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.public.cases import MARKS, WHOLE, Case, Learner, check, integers, numbers, table
from tests.public.test_vision import digits

diffusers = pytest.importorskip("diffusers")
vq = pytest.importorskip("vector_quantize_pytorch")
zuko = pytest.importorskip("zuko")
gpytorch = pytest.importorskip("gpytorch")

pytestmark = MARKS


class Generative(Learner):
    rate = 0.01

    def data(self) -> Any:
        return digits(size=16, channels=1)


class Unet2d(Generative):
    """diffusers' training example; noise and times come with the data."""

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


class Unet2dSampling(Unet2d):
    """Samples images at the end of each epoch: the model is called in a hook, again and again."""

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


class VectorQuantised(Generative):
    """Codes learned by an exponential average: buffers that the step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 8, 4, stride=4), nn.ReLU(), nn.Conv2d(8, 8, 1))
        self.codes = vq.VectorQuantize(dim=8, codebook_size=16, decay=0.8, accept_image_fmap=True, kmeans_init=False)
        self.decoder = nn.ConvTranspose2d(8, 1, 4, stride=4)

    def loss(self, batch: Any) -> Tensor:
        quantised, _, commitment = self.codes(self.encoder(batch[0]))
        return F.mse_loss(self.decoder(quantised), batch[0]) + commitment.sum()


class SplineFlow(Generative):
    """zuko: the model returns a distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.flow = zuko.flows.NSF(features=4, context=3, transforms=3, hidden_features=(16, 16))

    def loss(self, batch: Any) -> Tensor:
        return -self.flow(batch[0]).log_prob(batch[1]).mean()

    def data(self) -> Any:
        return list(zip(numbers(24, 3), numbers(24, 4, seed=1), strict=True))


class DeepKernel(SplineFlow):
    """gpytorch: a variational process behind a network; the bound of the likelihood as the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))
        self.process = Process(torch.linspace(-1, 1, 10).repeat(2, 1).T.contiguous())
        self.likelihood = gpytorch.likelihoods.GaussianLikelihood()
        self.bound = gpytorch.mlls.VariationalELBO(self.likelihood, self.process, num_data=24)

    def loss(self, batch: Any) -> Tensor:
        return -self.bound(self.process(self.features(batch[0])), batch[1][:, 0])

    val_dataloader = None


class Process(gpytorch.models.ApproximateGP):
    def __init__(self, points: Tensor) -> None:
        distribution = gpytorch.variational.CholeskyVariationalDistribution(points.shape[0])
        super().__init__(gpytorch.variational.VariationalStrategy(self, points, distribution))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x: Tensor) -> Any:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


@table(
    Case(Unet2dSampling),
    Case(VectorQuantised, {**WHOLE, "split": ["codes"]}),
    Case(SplineFlow),
    Case(DeepKernel, WHOLE, refused=r"SplitError: The step takes another path each time that it is run on the same"),
)
def test_generative(case: Case) -> None:
    check(case)
