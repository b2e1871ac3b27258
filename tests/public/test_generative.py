"""Autoencoders, diffusion, flows, vector quantisation, differential equations, adversaries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.public.cases import MARKS, WHOLE, Case, Learner, check, integers, numbers, table
from tests.public.test_vision import digits

diffusers = pytest.importorskip("diffusers")
denoising = pytest.importorskip("denoising_diffusion_pytorch")
vq = pytest.importorskip("vector_quantize_pytorch")
zuko = pytest.importorskip("zuko")
torchdiffeq = pytest.importorskip("torchdiffeq")
gpytorch = pytest.importorskip("gpytorch")
pythae = pytest.importorskip("pythae.models")

pytestmark = MARKS


class Generative(Learner):
    rate = 0.01

    def data(self) -> Any:
        return digits(size=16, channels=1)


class Vae(Generative):
    """The usual form with ``torch.distributions``, which validate what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 32))
        self.mean, self.log_variance = nn.Linear(32, 8), nn.Linear(32, 8)
        self.decoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 256))

    def loss(self, batch: Any) -> Tensor:
        images = batch[0].flatten(1)
        hidden = self.encoder(images)
        posterior = torch.distributions.Normal(self.mean(hidden), (0.5 * self.log_variance(hidden)).exp())
        prior = torch.distributions.Normal(torch.zeros(8), torch.ones(8))
        out = self.decoder(posterior.rsample())
        divergence = torch.distributions.kl_divergence(posterior, prior).sum(1).mean()
        return F.mse_loss(out, images) + 0.01 * divergence


class AutoencoderKl(Generative):
    """diffusers' VAE of latent diffusion, without the draw."""

    def __init__(self) -> None:
        super().__init__()
        self.model = diffusers.AutoencoderKL(
            in_channels=1, out_channels=1, block_out_channels=(8, 16), latent_channels=2, norm_num_groups=4,
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        )  # fmt: skip

    def loss(self, batch: Any) -> Tensor:
        posterior = self.model.encode(batch[0]).latent_dist
        out = self.model.decode(posterior.mode()).sample
        return F.mse_loss(out, batch[0]) + 1e-4 * posterior.kl().mean()


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


class LatentDiffusion(Unet2d):
    """A frozen encoder, and an EMA of the trained part by diffusers' own class."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Conv2d(1, 1, 1).requires_grad_(False)

    def on_fit_start(self) -> None:
        self.ema = diffusers.training_utils.EMAModel(self.model.parameters(), decay=0.9)

    def loss(self, batch: Any) -> Tensor:
        images, noise, times = batch
        with torch.no_grad():
            latents = self.encoder(images)
        return super().loss((latents, noise, times))

    def on_train_batch_end(self, *args: Any) -> None:
        self.ema.step(self.model.parameters())

    def on_train_end(self) -> None:
        self.shown = [float(weight.sum()) for weight in self.ema.shadow_params]


class DenoisingDiffusion(Generative):
    """lucidrains' package draws noise inside its own forward pass."""

    def __init__(self) -> None:
        super().__init__()
        unet = denoising.Unet(dim=8, dim_mults=(1, 2), channels=1, flash_attn=False, attn_heads=2, attn_dim_head=8)
        self.model = denoising.GaussianDiffusion(unet, image_size=16, timesteps=20, sampling_timesteps=2)

    def loss(self, batch: Any) -> Tensor:
        return self.model(batch[0])


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


class PythaeAutoencoder(Generative):
    """pythae's models take a dict and return an object with the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = pythae.AE(pythae.AEConfig(input_dim=(1, 16, 16), latent_dim=4))

    def loss(self, batch: Any) -> Tensor:
        return self.model({"data": batch[0]}).loss


class PythaeVae(PythaeAutoencoder):
    """Draws its latent values in the step."""

    rate = 1e-3

    def __init__(self) -> None:
        super().__init__()
        self.model = pythae.VAE(pythae.VAEConfig(input_dim=(1, 16, 16), latent_dim=4))


class PythaeVaeGan(PythaeAutoencoder):
    """Three losses, three optimizers, as pythae's own trainer steps them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = pythae.VAEGAN(pythae.VAEGANConfig(input_dim=(1, 16, 16), latent_dim=4))
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        parts = self.model.encoder, self.model.decoder, self.model.discriminator
        return [torch.optim.Adam(part.parameters(), lr=1e-3, eps=1e-4) for part in parts]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.model({"data": batch[0]})
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        for loss in (out.encoder_loss, out.decoder_loss, out.discriminator_loss):
            self.manual_backward(loss, retain_graph=True)
        for optimizer in optimizers:
            optimizer.step()
        self.log("train_loss", out.loss)
        return out.loss


class SplineFlow(Generative):
    """zuko: the model returns a distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.flow = zuko.flows.NSF(features=4, context=3, transforms=3, hidden_features=(16, 16))

    def loss(self, batch: Any) -> Tensor:
        return -self.flow(batch[0]).log_prob(batch[1]).mean()

    def data(self) -> Any:
        return list(zip(numbers(24, 3), numbers(24, 4, seed=1), strict=True))


class AutoregressiveFlow(SplineFlow):
    def __init__(self) -> None:
        super().__init__()
        self.flow = zuko.flows.MAF(features=4, context=3, transforms=3, hidden_features=(16, 16))


class NeuralOde(SplineFlow):
    """A solver calls the module as often as it needs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.field = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))
        self.last = nn.Linear(4, 4)

    def loss(self, batch: Any) -> Tensor:
        times = torch.tensor([0.0, 1.0])
        end = torchdiffeq.odeint(lambda t, y: self.field(y), self.first(batch[0]), times, method="rk4")[-1]
        return F.mse_loss(self.last(end), batch[1])


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
    Case(Vae),
    Case(AutoencoderKl),
    Case(Unet2d),
    Case(Unet2dSampling),
    Case(LatentDiffusion),
    Case(DenoisingDiffusion),
    Case(VectorQuantised, {**WHOLE, "split": ["codes"]}),
    Case(VectorQuantised, {"num_microbatches": 2}),
    Case(PythaeVae),
    Case(SplineFlow),
    Case(AutoregressiveFlow),
    Case(NeuralOde),
)
def test_generative(case: Case) -> None:
    check(case)
