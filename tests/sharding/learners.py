"""Models whose training shards their optimizer, or all of them; and strategies that do so and do not."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn import functional as F

from tests.strategies.grouped import grouped
from tests.strategies.learners import Learner, overflow_in_third_batch, silent


def fully_sharded(**options: Any) -> Any:
    from lightning_smddp import SMDDPFSDPStrategy

    return SMDDPFSDPStrategy(**grouped(**{"verbose": False, **options}))


def sharded(**options: Any) -> Any:
    return silent(shard="optimizer", **options)


class AdamLearner(Learner):
    """AdamW on two groups, with a schedule."""

    def configure_optimizers(self) -> Any:
        first = {"params": self.net[0].parameters(), "lr": 0.05}
        optimizer = torch.optim.AdamW([first, {"params": self.net[2].parameters()}], lr=0.01, weight_decay=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class AllAdam(Learner):
    """AdamW on whatever parameters there are."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


class Factored(Learner):
    """An optimizer that looks at whole parameters."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), lr=0.01)


class Others(Learner):
    """A fused kernel with several states, numbers of steps and products, one that begins filled, and none."""

    def configure_optimizers(self) -> Any:
        parameters, optim = [[p] for p in self.parameters()], torch.optim
        self.automatic_optimization = False
        fused = optim.AdamW(parameters[0], lr=0.01, amsgrad=True, fused=True)
        stateless = optim.SGD(parameters[3], lr=0.1)
        return fused, optim.NAdam(parameters[1], foreach=True), optim.Adagrad(parameters[2]), stateless

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            optimizer.step()
            self.losses.append(loss.item())


class AllAtOnce(Learner):
    """One that looks at all of them."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Zero(Learner):
    def configure_optimizers(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, at its import
            from torch.distributed.optim import ZeroRedundancyOptimizer
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, lr=0.01)


class BadBatch(AdamLearner):
    """One batch has a NaN."""

    def loss(self, batch: Any) -> Any:
        loss = super().loss(batch)
        return loss * float("nan") if len(self.losses) == 2 else loss


class Validating(AdamLearner):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validated", self.loss(batch), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log("after", self(torch.ones(2, 8, device=self.device)).sum(), sync_dist=True)

    def forward(self, x: Any) -> Any:
        return self.net(x)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        return x + torch.tanh(self.mix(self.norm(x)))


class Tied(Learner):
    """Blocks, an embedding whose weight is the head's and is used by a function, a parameter of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def loss(self, batch: Any) -> Any:
        tokens = (batch[0] * 4).long() % 16
        x = self.embed(tokens).mean(1) * self.scale
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), batch[1]) + F.linear(x, self.embed.weight).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW((p for n, p in self.named_parameters() if "net" not in n), lr=0.01)


class Convolution(AllAdam):
    """A weight in channels-last order, a layer that is used twice, one that is frozen, and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        conv = nn.Conv2d(2, 3, 2, bias=False)  # of a bias before BatchNorm, gradients are rounding errors
        self.conv = nn.Sequential(conv, nn.BatchNorm2d(3)).to(memory_format=torch.channels_last)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def loss(self, batch: Any) -> Any:
        x = self.frozen(self.frozen(batch[0]))
        image = x.view(-1, 2, 2, 2).to(memory_format=torch.channels_last)
        return F.cross_entropy(self.conv(image).flatten(1) * self.scale + self.net(x), batch[1])

    def on_train_end(self) -> None:
        self.losses += self.conv[1].running_mean.tolist()


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.maybe = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Any, more: bool) -> Any:
        return self.always(x) + self.maybe(x) if more else self.always(x)


class Unused(AllAdam):
    """Parameters that one rank uses and the others not, and some that no rank uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Sometimes() for _ in range(2))
        self.never = nn.Linear(8, 8)

    def loss(self, batch: Any) -> Any:
        x = batch[0]
        for block in self.blocks:
            x = block(x, self.trainer.global_rank == 0)
        return super().loss([x, batch[1]])


class Outside(AllAdam):
    """Uses parameters outside of their units: by themselves, by a module in a unit, and all of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.Sequential(Block(8), Block(8))

    def loss(self, batch: Any) -> Any:
        x = F.linear(batch[0], self.net[0].weight)[:, :8] + self.blocks[1].mix(batch[0])
        penalty = sum(p.square().sum() for p in self.net.parameters())
        return super().loss([self.blocks(x), batch[1]]) + 0.1 * penalty


class Side(Block):
    """Used by a method of its own, which is not ``forward``."""

    def encode(self, x: Any) -> Any:
        return F.linear(self.mix(self.norm(x)), self.mix.weight)


class Attributes(AllAdam):
    """Blocks in attributes, as in a U-Net; one is called twice, and one is never called itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.down1, self.down2, self.up1, self.side = Block(8), Block(8), Block(8), Side(8)

    def loss(self, batch: Any) -> Any:
        x = self.down2(self.down1(batch[0]))
        x = self.up1(self.down1(x)) + self.side.encode(x)
        return super().loss([x, batch[1]])


class Looking(Outside):
    """Measures gradients in a hook, as many do, and writes to parameters in all ways."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.losses.append(math.sqrt(sum(p.grad.norm().item() ** 2 for p in self.parameters())))
        self.losses.append(float(grad_norm(self, 2)["grad_2.0_norm_total"]))
        self.log_dict(grad_norm(self.net, 2))
        with torch.no_grad():
            self.net[0].weight[0] = 0.5
            self.net[2].weight.copy_(torch.ones(3, 16))
            torch.mul(self.net[0].weight, 1.1, out=self.net[0].weight)
            nn.init.constant_(self.blocks[0].norm.bias, 0.2)
            torch.manual_seed(self.global_step)
            nn.init.trunc_normal_(self.net[0].bias, std=0.1)
            self.blocks[1].mix.bias.uniform_(-0.1, 0.1)
            self.blocks[1].norm.weight.add_(self.blocks[0].norm.weight, alpha=0.1)


class Regularized(AdamLearner):
    """Changes gradients and parameters in hooks."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            p.grad.mul_(0.5)

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for p in self.parameters():
                p.mul_(0.99)


class Writing(Regularized):
    """Writes behind autograd's back, too, in ways that must act once."""

    def on_train_batch_end(self, *_: Any) -> None:
        super().on_train_batch_end()
        for p in self.parameters():
            p.data.clamp_(-0.5, 0.5)

    def on_after_backward(self) -> None:
        with torch.no_grad():
            self.net[0].bias.add_(0.01)

    def on_train_epoch_end(self) -> None:
        self.net[2].weight.data = self.net[2].weight.data * 1.5


class Overflowing(AdamLearner):
    def on_train_start(self) -> None:
        overflow_in_third_batch(self)


class StepHooks(AdamLearner):
    """Hooks of the optimizer look at its groups before and behind each step, and see whole parameters."""

    def configure_optimizers(self) -> Any:
        (optimizer,), schedules = super().configure_optimizers()
        self.seen: list[int] = []

        def look(opt: Any, *_: Any) -> None:
            self.seen.append(sum(p.numel() for group in opt.param_groups for p in group["params"]))

        optimizer.register_step_pre_hook(look)
        optimizer.register_step_post_hook(look)
        return [optimizer], schedules

    def on_train_end(self) -> None:
        assert set(self.seen) == {sum(p.numel() for p in self.parameters())}


class LastLayer(Learner):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net[2].parameters(), lr=0.01)


class Adding(Callback):
    """The first layer trains from the second epoch on, in a group of its own.

    It is frozen behind the wrapping: DDP never averages what is frozen before it, as with ``BaseFinetuning``.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net[0].requires_grad_(False)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            pl_module.net[0].requires_grad_(True)
            trainer.optimizers[0].add_param_group({"params": list(pl_module.net[0].parameters()), "lr": 0.02})


class Unfreezing(Callback):
    """The first layer trains from the second epoch on."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net[0].requires_grad_(trainer.current_epoch == 1)


class Adversaries(Learner):
    """A GAN: two optimizers, modules in units and in the root, frozen in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(3)
        self.generator = nn.Sequential(Block(8), Block(8))
        self.out = nn.Linear(8, 8)
        self.critic = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        self.head = nn.Linear(4, 1)

    def judged(self, x: Tensor) -> Tensor:
        return self.head(self.critic(x))

    def made(self, x: Tensor) -> Tensor:
        return self.out(self.generator(x.flip(1)))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, (making, judging) = batch[0], self.optimizers()
        self.toggle_optimizer(making)
        loss = F.softplus(-self.judged(self.made(x))).mean()
        making.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(making, 0.5, "norm")
        making.step()
        self.untoggle_optimizer(making)
        self.toggle_optimizer(judging)
        other = F.softplus(self.judged(self.made(x).detach())).mean()
        judging.zero_grad()
        self.manual_backward(other)
        self.manual_backward(F.softplus(-self.judged(x)).mean())
        judging.step()
        self.untoggle_optimizer(judging)
        self.losses += [loss.item(), other.item()]

    def configure_optimizers(self) -> Any:
        making = [*self.generator.parameters(), *self.out.parameters()]
        judging = [*self.critic.parameters(), *self.head.parameters()]
        return torch.optim.AdamW(making, lr=0.01), torch.optim.RMSprop(judging, lr=0.01)


class Closures(Adversaries):
    """Accumulates by hand, and steps with a closure."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, _ = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(self.made(batch[0]), batch[0])
            self.manual_backward(loss)
            self.losses.append(loss.item())
            return loss

        optimizer.step(closure=closure)
        with optimizer.toggle_model(sync_grad=False):
            self.manual_backward(F.mse_loss(self.made(batch[0] + 1), batch[0]))
        self.manual_backward(F.mse_loss(self.made(batch[0] - 1), batch[0]))
        optimizer.step()


class InTurn(Adversaries):
    """Freezes by hand within a step, in which gradients of an earlier backward pass wait for their optimizer."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for frozen in (self.head, self.out):
            frozen.requires_grad_(False)
            self.manual_backward(F.softplus(self.judged(self.made(batch[0]))).mean())
            frozen.requires_grad_(True)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()
