"""Training steps that cannot be pipelined run as a whole on every rank: the numbers of one process, to the bit."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import os
import random
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_smddp import PipelineStrategy
from tests.ranks import run_trainer_ranks
from tests.strategies.grouped import grouped
from tests.strategies.learners import CLASSES, INPUTS, make_trainer
from tests.strategies.pipeline_learners import Bench, Case, Evaluated, Matrix, Net, assert_same, name_of, outcome

pytestmark = pytest.mark.filterwarnings("ignore:The training step is run as a whole on every rank:UserWarning")


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def fit(bench: Bench, model: Net, **options: Any) -> Any:
    """From the same random numbers in one process and on the ranks' first; the others have others."""
    torch.manual_seed(7 + rank())
    random.seed(7 + rank())
    return bench.fit(model, **options)


class Manual(Evaluated):
    """Manual optimization with one backward pass a step, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.dropout = nn.Dropout(0.1)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self.dropout(self.net(batch[0])), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5)
        optimizer.step()
        self.losses.append(loss.item())
        self.log("loss", loss, on_step=True, on_epoch=True)


def manual(bench: Bench) -> Any:
    return fit(bench, Manual())


class Gan(Net):
    """Two optimizers that take turns, with schedulers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, INPUTS))
            self.judge = nn.Sequential(nn.Linear(INPUTS, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()
        ones, zeros = torch.ones(len(batch[0]), 1), torch.zeros(len(batch[0]), 1)
        self.toggle_optimizer(first)
        fake = self.generator(torch.randn(len(batch[0]), 4))
        loss = F.binary_cross_entropy_with_logits(self.judge(fake), ones)
        self.manual_backward(loss)
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        real = F.binary_cross_entropy_with_logits(self.judge(batch[0]), ones)
        judged = (real + F.binary_cross_entropy_with_logits(self.judge(fake.detach()), zeros)) / 2
        self.manual_backward(judged)
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)
        self.losses += [loss.item(), judged.item()]
        self.log_dict({"g": loss, "d": judged}, prog_bar=True)

    def on_train_epoch_end(self) -> None:
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (self.generator, self.judge)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in optimizers]


def gan(bench: Bench) -> Any:
    return fit(bench, Gan())


class Penalty(Net):
    """A gradient penalty, with automatic optimization."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        loss = F.cross_entropy(self.net(x), batch[1])
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + gradient.pow(2).sum()
        self.losses.append(loss.item())
        return loss


def penalty(bench: Bench) -> Any:
    return fit(bench, Penalty(count=56), accumulate_grad_batches=2, gradient_clip_val=0.3)


class Momentum(Net):
    """A teacher that follows the student within the step."""

    def __init__(self, rebinds: bool) -> None:
        super().__init__()
        self.rebinds = rebinds
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            for student, teacher in zip(self.net.parameters(), self.teacher.parameters(), strict=True):
                if self.rebinds:
                    teacher.data = teacher.data * 0.9 + student.data * 0.1
                else:
                    teacher.mul_(0.9).add_(student, alpha=0.1)
            target = self.teacher(batch[0])
        loss = F.mse_loss(self.net(batch[0]), target) + self.loss(batch)
        self.losses.append(loss.item())
        return loss


def momentum(bench: Bench, rebinds: bool) -> Any:
    return fit(bench, Momentum(rebinds))


class Encoder(nn.Module):
    """Holds the student and the teacher, which follows it in its forward pass."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.teacher = net, copy.deepcopy(net).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            for student, teacher in zip(self.net.parameters(), self.teacher.parameters(), strict=True):
                teacher.mul_(0.9).add_(student, alpha=0.1)
            target = self.teacher(x)
        return self.net(x), target


class InModule(Net):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder(self.net)
        torch.manual_seed(4)
        self.head = nn.Sequential(nn.Linear(CLASSES, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out, target = self.encoder(batch[0])
        return F.mse_loss(self.head(out), target) + F.cross_entropy(out, batch[1])


def momentum_in_a_module(bench: Bench) -> Any:
    return fit(bench, InModule())


class Queue(Net):
    """A queue of negatives as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.register_buffer("queue", torch.randn(CLASSES, 24, generator=generator))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = F.normalize(self.net(batch[0]), dim=1)
        logits = torch.cat([(x * x.detach().roll(1, 0)).sum(1, keepdim=True), x @ self.queue.clone().detach()], dim=1)
        begin = int(self.pointer)
        self.queue[:, begin : begin + len(x)] = x.detach().T
        self.pointer[0] = (begin + len(x)) % 24
        loss = F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))
        self.losses.append(loss.item())
        return loss


def queue(bench: Bench) -> Any:
    return fit(bench, Queue())


class Rebound(Net):
    """A buffer that the step replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(CLASSES))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        loss = F.cross_entropy(out - self.center, batch[1])
        self.center = self.center * 0.9 + out.detach().mean(0) * 0.1
        return loss


def rebound_buffer(bench: Bench) -> Any:
    return fit(bench, Rebound())


class Center(Net):
    """A centre over all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1, CLASSES))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        loss = F.cross_entropy(out - self.center, batch[1])
        mean = out.detach().sum(0, keepdim=True)
        ranks = 1
        if dist.is_initialized():
            dist.all_reduce(mean)
            ranks = dist.get_world_size()
        self.center.mul_(0.9).add_(mean / (len(out) * ranks), alpha=0.1)
        self.losses.append(loss.item())
        return loss


def center(bench: Bench) -> Any:
    return fit(bench, Center())


class Gathered(Net):
    """A loss between rows of all ranks."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = F.normalize(self.net(batch[0]), dim=1)
        others = x
        if self.trainer.world_size > 1:
            others = self.all_gather(x, sync_grads=True).flatten(0, 1)
        labels = torch.arange(len(x)) + len(x) * self.global_rank
        loss = F.cross_entropy(x @ others.T * 4, labels)
        self.log("loss", loss, sync_dist=True)
        self.losses.append(loss.item())
        return loss


class Carried(Net):
    """Hidden state that goes from batch to batch."""

    def __init__(self) -> None:
        super().__init__(count=32)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.rnn = nn.GRUCell(CLASSES, 6)
            self.head = nn.Linear(6, CLASSES)
        self.hidden: Any = None

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        hidden = self.rnn(self.net(batch[0]), self.hidden)
        self.hidden = hidden.detach()
        loss = F.cross_entropy(self.head(hidden), batch[1])
        self.losses.append(loss.item())
        return loss


def carried(bench: Bench) -> Any:
    return fit(bench, Carried())


class Used(nn.Linear):
    """Counts in place how often each of its outputs is positive."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.used = torch.zeros(16)

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        self.used += (made > 0).sum(0)
        return made


class Counted(Net):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.net[2] = Used()

    def on_train_batch_end(self, *args: Any) -> None:
        self.losses += self.net[2].used.tolist()


def counted(bench: Bench) -> Any:
    return fit(bench, Counted())


class Mined(Net):
    """Goes on with the rows that are hard: how many depends on values."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.net[:4](batch[0])
        hard = (x.sum(1) > x.sum(1).mean()).nonzero().flatten()
        loss = F.cross_entropy(self.net[4:](x[hard]), batch[1][hard])
        self.losses.append(loss.item())
        return loss


class Hardest(nn.Module):
    """Which rows are hard: how many is known to the stage that has them."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.sum(1) > x.sum(1).mean()).nonzero().flatten()


class MinedByModule(Mined):
    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.miner, self.criterion = Hardest(), nn.CrossEntropyLoss()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.net(batch[0])
        hard = self.miner(x)
        loss = self.criterion(x[hard], batch[1][hard])
        self.losses.append(loss.item())
        return loss


def mined(bench: Bench, by_module: bool) -> Any:
    return fit(bench, MinedByModule(6) if by_module else Mined(6))


class Closures(Net):
    """LBFGS calls the step several times."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


def closures(bench: Bench) -> Any:
    return fit(bench, Closures())


class Unseen(Net):
    """A number goes from module to module without torch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.net[:4](batch[0])
        scale = float(x.detach().numpy().std()) + 1
        loss = F.cross_entropy(self.net[4:](x) * scale, batch[1])
        self.losses.append(loss.item())
        return loss


def unseen(bench: Bench) -> Any:
    return fit(bench, Unseen())


CASES: list[Case] = [
    manual, gan, penalty, functools.partial(momentum, rebinds=True), momentum_in_a_module, queue, rebound_buffer,
    carried, counted, functools.partial(mined, by_module=False), functools.partial(mined, by_module=True), closures,
    unseen,
]  # fmt: skip
MORE_CASES: list[Case] = [functools.partial(momentum, rebinds=False), center]
ONE, MORE = Matrix(CASES), Matrix(MORE_CASES)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_as_in_one_process(case: Case) -> None:
    ONE.compare(case, tolerance=0.0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", MORE_CASES, ids=name_of)
def test_more_as_in_one_process(case: Case) -> None:
    MORE.compare(case, tolerance=0.0)


# ---- from the middle of a run on ----


class Late(Net):
    """Can be pipelined until the second epoch."""

    def __init__(self) -> None:
        super().__init__(6)
        self.register_buffer("mean", torch.zeros(16))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.net[:4](batch[0])
        if self.trainer.fit_loop.total_batch_idx >= 6:
            x = self.late(x)
        loss = F.cross_entropy(self.net[4:](x), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), "interval": "step"}]

    def late(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


def late_buffer(bench: Bench) -> Any:
    """In the middle of accumulation, with averages of weights beside the module."""
    return fit(bench, Late(), max_epochs=3, accumulate_grad_batches=3, gradient_clip_val=0.5, callbacks=[Averages()])


class Averages(Callback):
    """Made in a hook, of all ranks' parameters."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if not hasattr(self, "averages"):
            self.averages = [p.detach().clone() for p in pl_module.parameters()]
        for average, parameter in zip(self.averages, pl_module.parameters(), strict=True):
            average.mul_(0.9).add_(parameter.detach(), alpha=0.1)
        pl_module.losses.append(sum(average.square().sum().item() for average in self.averages))


class LatePenalty(Late):
    def late(self, x: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(x.sum(), self.net[0].weight, create_graph=True)
        return x + gradient.mean()


def late_penalty(bench: Bench) -> Any:
    return fit(bench, LatePenalty())


class LateState(Late):
    def late(self, x: Tensor) -> Tensor:
        before = getattr(self, "hidden", x.detach())
        self.hidden = x.detach()
        return x + 0.1 * before


def late_state(bench: Bench) -> Any:
    return fit(bench, LateState(), max_epochs=3)


class Helped(Net):
    """Decides by a number that another function has read: nothing shows that before."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.net[:4](batch[0])
        self.note(x)
        x = self.net[4:6](x)
        if self.noted > 0.06:
            x = self.net[6:8](x)
        size = self.width(x)
        loss = F.cross_entropy(self.net[8:](torch.cat([x[:, size:], x[:, :size]], 1)), batch[1])
        self.losses.append(loss.item())
        return loss

    def note(self, x: Tensor) -> None:
        self.noted = x.mean().item()

    def width(self, x: Tensor) -> int:
        return int((x > 0).sum()) % 5


def helped(bench: Bench) -> Any:
    return fit(bench, Helped(7))


class Consolidated(Net):
    """Elastic weight consolidation: what hooks keep of weights and gradients is used by the steps of later epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.fisher: dict[str, Tensor] = {}

    def on_train_epoch_start(self) -> None:
        self.old = {name: p.detach().clone() for name, p in self.named_parameters()}
        if not self.fisher:
            self.fisher = {name: torch.zeros_like(p) for name, p in self.named_parameters()}

    def on_after_backward(self) -> None:
        for name, parameter in self.named_parameters():
            self.fisher[name] += parameter.grad.square()

    def loss(self, batch: list[Tensor]) -> Tensor:
        loss = super().loss(batch)
        for name, parameter in self.named_parameters():
            loss = loss + 0.5 * (self.fisher[name] * (parameter - self.old[name]).square()).sum()
        return loss


def consolidated(bench: Bench) -> Any:
    return fit(bench, Consolidated(), max_epochs=3)


LATE = [late_buffer, late_penalty, helped, consolidated]
FROM_THE_MIDDLE, MORE_FROM_THE_MIDDLE = Matrix(LATE), Matrix([late_state])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The loss of:UserWarning")
@pytest.mark.parametrize("case", LATE, ids=name_of)
def test_from_the_middle_of_a_run_on(case: Case) -> None:
    FROM_THE_MIDDLE.compare(case)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:The loss of:UserWarning")
def test_state_from_the_middle_of_a_run_on() -> None:
    MORE_FROM_THE_MIDDLE.compare(late_state)


# ---- what is said ----


def said() -> list[str]:
    """Body of a rank: the table and the warning."""
    output = io.StringIO()
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(output):
        warnings.simplefilter("always")
        Bench({}).trainer({"verbose": True}, max_steps=1).fit(Queue())
    texts = [str(w.message) for w in caught if "whole on every rank" in str(w.message)]
    return [" ".join(output.getvalue().split()), *texts]


def test_the_reason_is_said_once() -> None:
    first, second = run_trainer_ranks(said, 2)
    assert "training_step" in first[0]
    assert "replicated" in first[0]
    assert len(first) == 2
    assert "changes buffer 'queue' at " in first[1]
    assert "num_microbatches=1" in first[1]
    assert second == [""]


class Drifting(Manual):
    """Depends on the process."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss(batch) * (1 + rank())


def drift() -> str:
    try:
        Bench({}).fit(Drifting())
    except Exception as error:
        return str(error)
    return "nothing"


def test_ranks_that_drift_are_named() -> None:
    for error in run_trainer_ranks(drift, 2):
        assert "behind training_step of batch 0 of epoch 0 the parameters on rank 1 of the pipeline differ" in error


# ---- replicas ----


class Occasional(Queue):
    """A layer that one replica alone uses, in a batch that is accumulated."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 48
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.extra = nn.Linear(INPUTS, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.global_rank == 1 and batch_idx % 4 == 0:
            loss = loss + self.extra(batch[0]).mean()
        return loss


def train_alike(strategy: str, size: int) -> list[Any]:
    """Body of a rank: what each model has become."""
    results = []
    for make, options in REPLICATED:
        torch.manual_seed(7)
        model = make()
        quiet: Any = {"pipeline_parallel_size": size, "verbose": False, "tuning_cache": False}
        trainer = make_trainer(PipelineStrategy(**grouped(**quiet)) if size > 1 else strategy, **options)
        trainer.fit(model)
        results.append(outcome(model, trainer))
    return results


REPLICATED: list[Any] = [
    (Gan, {"max_epochs": 1}),
    (Center, {"gradient_clip_val": 0.2, "max_epochs": 1}),
    (Occasional, {"accumulate_grad_batches": 2, "max_epochs": 1}),
    (Gathered, {"max_epochs": 1}),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*deprecated")  # what Lightning's all_gather calls
def test_replicas_are_ranks_of_ddp() -> None:
    """Gradients, collectives and sizes of the world are those of as many ranks under ``ddp``."""
    expected = run_trainer_ranks(train_alike, 2, "ddp_find_unused_parameters_true", 1, timeout=100)
    found = run_trainer_ranks(train_alike, 4, "", 2, timeout=100)
    for rank, results in enumerate(found):
        for (make, _), result, reference in zip(REPLICATED, results, expected[rank // 2], strict=True):
            assert_same(result, reference, 1e-5, f"{make.__name__} on rank {rank}")
