"""``uneven``: where a rank's data ends earlier all ranks stop, or the others go on as if they were alone."""

import contextlib
import functools
import io
import tempfile
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_smddp import CommunicationOptions, PipelineStrategy, SMDDPFSDPStrategy, SMDDPStrategy
from lightning_smddp.communication.objects import broadcast
from lightning_smddp.strategies.uneven import Join
from tests.strategies.learners import RESUMING, make_trainer
from tests.strategies.pipeline_learners import Cases, assert_same, call

pytestmark = [*RESUMING, pytest.mark.filterwarnings("ignore:The ``compute`` method of metric:UserWarning")]
ROWS = [[3, 2], [4, 3, 3, 5, 3]]  # of each rank's batches
DATA = [[torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows)) for rows in rank] for rank in ROWS]


class Stream(torch.utils.data.IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(DATA[dist.get_rank()])


class Model(LightningModule):
    def __init__(self, data: str = "listed", manual: bool = False, path: str = "") -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
        self.data, self.automatic_optimization, self.path = data, not manual, path
        self.mean, self.shown = MeanMetric(), list[float]()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()
        if self._trainer is not None:
            self.mean(batch.sum())
            self.log("sum", self.mean, on_step=False, on_epoch=True)
            self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(batch))
            if batch_idx == 2:  # only one rank has it, and no name was logged before
                self.log(f"late {self.current_epoch}", batch.sum(), on_epoch=True, sync_dist=True, batch_size=1)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.shown.append(float(self.trainer.callback_metrics["loss_step"]))
        if self.path and self.global_step == 3:
            self.trainer.save_checkpoint(self.path)

    def configure_optimizers(self) -> Any:
        self.expected_steps = self._trainer and self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        rows: Any = [] if self.data == "none on rank 1" and dist.get_rank() else DATA[dist.get_rank()]
        return DataLoader(Stream() if self.data == "stream" else rows, batch_size=None, shuffle=self.data == "shuffled")


def alone(uneven: str, accumulated: int, weighs: bool) -> Any:
    """What one process makes of all ranks' batches: its state, each number's loss, and means over an epoch."""
    model, shown, seen = Model(), list[float](), list[tuple[float, Tensor]]()
    optimizer = model.configure_optimizers()
    count = 2 if uneven == "stop" else 5
    for start in [*range(0, count, accumulated)] * 2:
        numbers, seen = range(start, min(start + accumulated, count)), seen if start else []
        steps = [[of_rank[number] for of_rank in DATA if number < len(of_rank)] for number in numbers]
        total = sum(len(rows) if weighs else 1 for step in steps for rows in step)
        share = 1 if weighs else len(numbers) / accumulated  # as Lightning's, at the end of an epoch
        optimizer.zero_grad()
        for step in steps:
            for rows in step:
                kept = [buffer.clone() for buffer in model.buffers()]
                loss = model.training_step(rows, 0)
                (loss * (len(rows) if weighs else 1) * share / total).backward()
                for buffer, value in zip(model.buffers(), kept, strict=True):
                    buffer.copy_(buffer if rows is step[0] else value)  # of the first rank with data
                seen.append((loss.item(), rows))
            shown.append(sum(value for value, _ in seen[-len(step) :]) / len(step))
        optimizer.step()
    loss = sum(value * len(rows) for value, rows in seen) / sum(len(rows) for _, rows in seen)
    metric = sum(rows.sum().item() for _, rows in seen) / len(seen)
    means = {"loss_epoch": loss, "sum": metric, "late 1": DATA[1][2].sum().item() * (count > 2)}
    return model.state_dict(), shown, means


def fit(kind: Any, uneven: Any, accumulated: int, weight: Any, model: Any, path: str | None = None) -> Any:
    """What is left of a run, the steps that were expected and taken, what was said; or an error."""
    strategy = kind(communication=CommunicationOptions(uneven=uneven, loss_weight=weight, verbose=False))
    trainer = make_trainer(strategy, accumulate_grad_batches=accumulated, use_distributed_sampler=False)
    module, out = Model(*model), io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            trainer.fit(module, ckpt_path=path)
    except ValueError as error:
        return str(error)
    means = {name: float(trainer.callback_metrics.get(name, 0.0)) for name in ("loss_epoch", "sum", "late 1")}
    return (module.state_dict(), module.shown, means), [module.expected_steps, trainer.global_step, out.getvalue()]


def resume(data: str) -> list[Any]:
    """What is left of a run, and of one that goes on from a checkpoint of it, where one rank has no data any more."""
    path = broadcast(f"{tempfile.mkdtemp()}/saved.ckpt")
    torch.manual_seed(dist.get_rank())
    runs = [((data, False, path), None), ((data,), path)]
    return [fit(SMDDPStrategy, "join", 1, None, *run)[0] for run in runs]


class Failing(Model):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert batch_idx < 3
        return super().training_step(batch, batch_idx)


def fail() -> float:
    """A mean over ranks behind a run that failed where one rank had no data."""
    strategy = SMDDPStrategy(communication=CommunicationOptions(uneven="join", verbose=False))
    with pytest.raises(AssertionError):
        make_trainer(strategy, use_distributed_sampler=False).fit(Failing())
    return float(strategy.reduce(torch.tensor(dist.get_rank() + 1.0)))


REPLICAS = functools.partial(PipelineStrategy, pipeline_parallel_size=1)
RUNS: list[Any] = [
    *((fit, SMDDPStrategy, "join", 1, None, ("listed", manual)) for manual in (False, True)),
    (fit, SMDDPStrategy, "join", 2, None, ("stream",)),
    (fit, functools.partial(SMDDPStrategy, shard="optimizer"), "join", 2, "rows", ("stream",)),
    (fit, SMDDPFSDPStrategy, "join", 1, None, ("stream",)),
    *((fit, kind, "stop", 1, None, (data,)) for kind in (SMDDPStrategy, REPLICAS) for data in ("listed", "stream")),
]
EMPTY = (fit, SMDDPStrategy, "join", 1, None, ("none on rank 1",))
RESUMED = [(resume, "stream"), (resume, "shuffled")]
FAILED = (fail,)
CASES = Cases(call, [*RUNS, *RESUMED, EMPTY, FAILED])


@pytest.mark.parametrize("run", RUNS)
def test_ranks_train_as_one_process_with_all_their_batches(run: Any) -> None:
    _, _, uneven, accumulated, weight, (data, *manual) = run
    state, shown, means = alone(uneven, accumulated, weight == "rows")
    for rank, ((found, *logged), facts) in enumerate(CASES.results(run)):
        has_statistics = rank == 0 and not any(manual)  # of BatchNorm, as DDP has it
        own = {name: value for name, value in found.items() if has_statistics or "net.1." not in name}
        assert_same((state | own, *logged), (state, shown, means))
        said = "epoch 0: rank 0 has 2 batches, and it ends there for all\n"
        steps = 6 if accumulated > 1 else len(shown)
        assert facts == [-1 if data == "stream" else steps, steps, said * (uneven == "stop" and rank == 0)]


@pytest.mark.parametrize("case", RESUMED, ids=["stream", "shuffled"])
def test_a_run_goes_on_from_where_a_rank_has_no_data(case: Any) -> None:
    for (state, shown, means), resumed in CASES.results(case):
        torch.testing.assert_close(resumed, (state, shown[3:], means), rtol=0, atol=0)


def test_nothing_is_left_of_a_run_that_failed() -> None:
    assert CASES.results(FAILED) == [1.5, 1.5]


def test_what_cannot_be_is_refused() -> None:
    assert all("epoch 0: rank 1 has 0 batches" in error for error in CASES.results(EMPTY))
    for module, loaders in ((nn.SyncBatchNorm(3), 1), (nn.ReLU(), 2)):
        loop = SimpleNamespace(_combined_loader=SimpleNamespace(flattened=[None] * loaders))
        with pytest.raises(ValueError, match="'join' cannot be used with several .* Use uneven='stop'"):
            Join(SimpleNamespace(lightning_module=module, fit_loop=loop))
