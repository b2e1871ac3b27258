"""The start-up check, loss weights, ``lightning-smddp verify``, and the timeline."""

from __future__ import annotations

import functools
import json
import os
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning_smddp.bridge.checks import SecondCheck
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import MeanSquaredError

from lightning_smddp import PipelineStrategy
from lightning_smddp.cli import main
from lightning_smddp.pipeline.partition.verify import VerificationError
from lightning_smddp.strategies import verify as verification
from tests.programs import run_program
from tests.ranks import RanksFailedError, run_trainer_ranks
from tests.strategies.grouped import grouped
from tests.strategies.learners import QUIET
from tests.strategies.pipeline_learners import Cases

ROWS, WIDTH, VOCABULARY, LENGTH = 24, 8, 11, 6


class Chain(LightningModule):
    """Some layers, and a loss that subclasses change."""

    count = 2

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(self.count))
            self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(ROWS, WIDTH, generator=generator)
        return DataLoader(TensorDataset(x, torch.randint(VOCABULARY, (ROWS,), generator=generator)), batch_size=8)


class Remembering(nn.Linear):
    """Leaves a Python number behind: nothing that sees tensors can notice it."""

    size = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.size = float(y.detach().abs().mean())
        return y


class Escaping(Chain):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.layers[0] = Remembering(WIDTH, WIDTH)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.layers[0].size


class EscapingLater(Escaping):
    """Begins with it when a hook has said so."""

    remembers = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = Chain.training_step(self, batch, batch_idx)
        return loss * (self.layers[0].size if self.remembers else 1.0)

    def on_train_batch_end(self, *args: Any) -> None:
        self.remembers = True


class Chancy(Chain):
    """Dropout, and numbers that stay random in the second check."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = F.dropout(self(batch[0]), 0.2)
        return F.cross_entropy(x * torch.poisson(torch.ones_like(x)), batch[1])


class Noticing(Chain):
    """Computes something else wherever operations are looked at, as compiled functions may."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(F.dropout(self(batch[0]), 0.2), batch[1])
        return loss * (1.01 if torch._C._is_torch_function_mode_enabled() else 1.0)


class Contrastive(Chain):
    """A loss between the rows of a batch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits = self(batch[0])
        return F.cross_entropy(logits @ logits.T, torch.arange(len(logits)))


class Normalised(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = nn.BatchNorm1d(WIDTH)


class Noisy(Chain):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0] + torch.randn_like(batch[0])), batch[1])


class Verified(Chain):
    """With dropout and validation, in shuffled batches, and a layer for each of four stages."""

    count = 3

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Dropout(0.3), self.head)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out = self(batch[0])
        self.log("val_loss", F.cross_entropy(out, batch[1]))
        return out

    def train_dataloader(self) -> Any:
        return DataLoader(super().train_dataloader().dataset, batch_size=8, shuffle=True)

    def val_dataloader(self) -> Any:
        return super().train_dataloader()


class Padded(Chain):
    """A mean over labels of which some do not count, in rows of different lengths."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self(batch["x"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        rows = []
        for row in range(ROWS):
            labels = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
            labels[1 + row % LENGTH :] = -100
            rows.append({"x": torch.randn(LENGTH, WIDTH, generator=generator), "labels": labels})
        return DataLoader(rows, batch_size=8)


class Shifted(Padded):
    """As language models do it: each position predicts the next label."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self(batch["x"])[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss


def train(model: type[Chain], strategy: Any = "auto", devices: int = 1, **options: Any) -> Any:
    module = model()
    trainer = Trainer(strategy=strategy, devices=devices, **{**QUIET, "max_epochs": 1, **options})
    trainer.fit(module)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return metrics, {name: p.detach().clone() for name, p in module.named_parameters() if not p.is_meta}


def pipelined(model: type[Chain], callbacks: Any = None, **options: Any) -> Any:
    strategy = PipelineStrategy(**grouped(**{"num_microbatches": 4, "verbose": False, **options}))
    ranks = int(os.environ["WORLD_SIZE"])
    return train(model, strategy, ranks, callbacks=None if callbacks is None else callbacks())


def warned(model: type[Chain]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipelined(model)
    return [str(w.message) for w in caught if "micro-batch" in str(w.message)]


def refused(model: str) -> str:
    try:
        pipelined(globals()[model])
    except VerificationError as error:
        return f"VerificationError: {error}"
    return "nothing"


REFUSED = Cases(refused, [("Escaping",), ("Noticing",), ("EscapingLater",)])
DIFFERS = "VerificationError: The pipeline does not compute what the step computes on one rank"


def test_an_escape_that_cannot_be_seen_is_caught_on_every_rank() -> None:
    for text in REFUSED.results(("Escaping",)):
        assert DIFFERS in text
        assert "the gradient of 'head' (stage 1) has norm" in text


@pytest.mark.slow
def test_what_a_replay_itself_changes_is_caught_on_every_rank() -> None:
    for text in REFUSED.results(("Noticing",)):
        assert DIFFERS in text


@pytest.mark.slow
def test_an_escape_that_a_hook_begins_is_caught_in_the_second_step() -> None:
    for text in REFUSED.results(("EscapingLater",)):
        assert "VerificationError: After the first optimizer step, and what hooks did then: The pipeline does" in text


@pytest.mark.slow
def test_the_second_step_is_compared_once() -> None:
    """With replicas, and with gradients that accumulate; what chance decides is no difference."""
    assert [count for count, _ in SLOW.results(("compared", "Chancy"))] == [1, 1]
    for count, findings in run_trainer_ranks(compared, 4, "Chain"):
        assert count == 1
        assert [name for name, _, _ in findings] == ["loss", *(f"layers.{index}" for index in range(2)), "head"]
        for _, expected, actual in findings:
            assert actual == pytest.approx(expected, rel=1e-5)


def compared(model: str) -> tuple[int, list[tuple[str, float, float]]]:
    """How often a second check had findings, and the last ones."""
    seen = []
    run = SecondCheck.run

    def noted(self: SecondCheck, *args: Any) -> Any:
        findings = run(self, *args)
        if findings:
            seen.append([(finding.name, finding.expected, finding.actual) for finding in findings])
        return findings

    SecondCheck.run = noted  # type: ignore[method-assign]
    try:
        strategy = PipelineStrategy(**grouped(num_microbatches=2, pipeline_parallel_size=2, verbose=False))
        train(globals()[model], strategy, int(os.environ["WORLD_SIZE"]), accumulate_grad_batches=2, max_epochs=3)
    finally:
        SecondCheck.run = run  # type: ignore[method-assign]
    return len(seen), seen[-1]


@pytest.mark.slow
def test_the_check_can_be_turned_off() -> None:
    assert SLOW.results(("unchecked",))[0] is True


def unchecked() -> bool:
    pipelined(Escaping, check=False)  # silently wrong, as it was asked for
    return True


def scene(name: str, *args: Any) -> Any:
    return globals()[name](*args)


@pytest.mark.parametrize("model", [Padded, Shifted])
def test_micro_batches_count_by_their_labels(model: type[Chain]) -> None:
    metrics, weights = train(model)
    for rank_metrics, rank_weights in QUICK.results(("pipelined", model)):
        torch.testing.assert_close(rank_metrics, metrics, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(rank_weights, weights, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_loss_between_rows_is_reported() -> None:
    first, second = SLOW.results(("warned", Contrastive))
    assert len(first) == 1
    assert "is not the mean over its micro-batches" in first[0]
    assert second == []  # once is enough


def left_at_auto() -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        metrics, weights = pipelined(Contrastive, num_microbatches="auto")
    return [str(w.message) for w in caught if "micro-batch" in str(w.message)], weights


def test_a_loss_between_rows_is_right_unless_micro_batches_are_asked_for() -> None:
    _, expected = train(Contrastive)
    (first, weights), (second, others) = QUICK.results(("left_at_auto",))
    assert len(first) == 1
    assert "each batch runs as one micro-batch" in first[0]
    assert second == []
    torch.testing.assert_close((weights, others), (expected, expected), rtol=1e-5, atol=1e-6)


def test_no_warning_for_a_mean_over_rows() -> None:
    assert QUICK.results(("warned", Chain)) == [[], []]


@pytest.mark.slow
def test_verify_prints_each_unit(tmp_path: Path) -> None:
    """The command, which starts ranks of its own."""
    options = ["--schedule", "interleaved_1f1b", "--num-microbatches", "4"]
    command = ["-m", "lightning_smddp", "verify", "tests.strategies.test_pipeline_check:Verified", *options]
    result = run_program(command, tmp_path, spawned=False)
    assert result.returncode == 0, result.stderr
    last = "The pipeline computes what the module computes in one process: 2 training and 2 validation steps"
    assert last in result.stdout.splitlines()[-1]
    assert "layers.0" in result.stdout
    assert "head" in result.stdout


FIT = verification._fit


def fit_on_rank(directory: str, *arguments: Any, **options: Any) -> None:
    """What the first rank prints goes to a file."""
    strategy = PipelineStrategy(**grouped(num_microbatches=4))
    path = Path(directory, f"printed{os.environ['RANK']}")
    with path.open("w") as file, redirect_stdout(file):
        FIT(*arguments, **options, strategy=strategy)


@pytest.fixture
def verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command by its name for a module, here and on ranks of the tests: returns its code and lines."""

    def fit(*arguments: Any, devices: int, strategy: Any) -> None:
        if devices == 1:
            FIT(*arguments, devices=devices, strategy=strategy)
        else:
            run_trainer_ranks(functools.partial(fit_on_rank, devices=devices), devices, str(tmp_path), *arguments)

    def run(name: str) -> tuple[int, list[str]]:
        code = main(["verify", f"tests.strategies.test_pipeline_check:{name}"])
        return code, [*(tmp_path / "printed0").read_text().splitlines(), *capsys.readouterr().out.splitlines()]

    monkeypatch.setattr(verification, "_fit", fit)
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("Contrastive", "step 1, output 'loss'"),
        pytest.param("Normalised", "update of", marks=pytest.mark.exhaustive),
    ],
)
def test_verify_fails_where_training_warns(name: str, what: str, verify: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on the ranks, too
        code, lines = verify(name)
    assert code == 1
    assert "The pipeline differs from one process, first in" in lines[-1]
    assert what in lines[-1] or "output 'loss'" in lines[-1]


@pytest.mark.slow
def test_verify_says_what_chance_keeps_from_it(verify: Any) -> None:
    code, lines = verify("Noisy")
    assert code == 0
    assert "the step draws random numbers" in lines[-1]


@pytest.mark.slow
def test_verify_fails_for_an_escape(verify: Any) -> None:
    code, lines = verify("Escaping")
    assert code == 1
    assert any("layers.0" in line for line in lines)
    assert "does not compute what the step computes" in "\n".join(lines)


def test_verify_says_what_is_wrong_with_a_name() -> None:
    with pytest.raises(SystemExit, match="has to be module:Class"):
        main(["verify", "tests.strategies"])
    with pytest.raises(SystemExit, match="has no 'Absent'"):
        main(["verify", "tests.strategies.test_pipeline_check:Absent"])
    with pytest.raises(SystemExit, match="There is no module 'tests.nowhere'"):
        main(["verify", "tests.nowhere:Net"])


def test_verify_asks_for_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "lightning.pytorch:LightningModule"]) == 1
    assert "LightningModule has no train_dataloader: give --datamodule" in capsys.readouterr().out


def timeline(directory: str) -> int:
    from lightning_smddp import PipelineTimeline

    callback = PipelineTimeline([Path(directory) / name for name in ("t.svg", "t.json")], batch_idx=1)
    pipelined(Chain, callbacks=lambda: [callback])
    return len(callback.spans)


@pytest.mark.slow
def test_the_timeline_of_a_step(tmp_path: Path) -> None:
    counts = run_trainer_ranks(timeline, 2, str(tmp_path))
    assert counts[0] == counts[1] > 0
    assert (tmp_path / "t.svg").read_text().startswith("<svg")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    for microbatch in range(4):
        assert sum(name == f"forward {microbatch}" for name in names) == 2  # one for each stage
        assert sum(name == f"backward {microbatch}" for name in names) == 2


def test_the_timeline_refuses_other_files() -> None:
    from lightning_smddp import PipelineTimeline

    with pytest.raises(ValueError, match=r"use files that end in \.svg, \.json"):
        PipelineTimeline("timeline.png")
    with pytest.raises(ValueError, match="at least 1"):
        PipelineTimeline("timeline.svg", batch_idx=0)


class SampledByHand(Chain):
    """Takes each rank for a replica, as scripts written for data parallelism do."""

    def train_dataloader(self) -> Any:
        data = super().train_dataloader().dataset
        return DataLoader(data, batch_size=8, sampler=DistributedSampler(data) if dist.is_initialized() else None)


def test_a_sampler_for_ranks_is_refused() -> None:
    with pytest.raises(RanksFailedError) as failure:
        run_trainer_ranks(pipelined, 2, SampledByHand)
    assert sorted(failure.value.tracebacks) == [0, 1]
    for text in failure.value.tracebacks.values():
        assert "has num_replicas=2, but there are 1 replicas" in text
        assert "trainer.distributed_sampler_kwargs" in text


class Logging(Chain):
    """Means, counts and extremes, with other reductions over batches than over rows, in training and validation."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.logged(batch, "")

    def logged(self, batch: list[Tensor], prefix: str) -> Tensor:
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        hits = (batch[0][:, 0] > batch[0][:, 1]).float()
        for reduce_fx in ("mean", "sum", "max", "min"):
            options = {"reduce_fx": reduce_fx, "on_step": False, "on_epoch": True}
            self.log(f"{prefix}mean {reduce_fx}", hits.mean(), **options)
            self.log(f"{prefix}rows {reduce_fx}", float(len(logits)), **options)
            self.log(f"{prefix}largest {reduce_fx}", logits.max(), **options)
            self.log(f"{prefix}smallest {reduce_fx}", logits.min(), **options)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.logged(batch, "val ")

    def val_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader()


@pytest.mark.slow
def test_what_is_logged_is_the_batchs_whatever_its_reduction_over_batches() -> None:
    metrics, _ = train(Logging)
    assert len(metrics) == 32
    for rank_metrics, _ in SLOW.results(("pipelined", Logging)):
        torch.testing.assert_close(rank_metrics, metrics, rtol=1e-5, atol=1e-6)


class Unfit(Chain):
    """Logs what a batch cannot get from its micro-batches, once through a metric, which can."""

    def __init__(self) -> None:
        super().__init__()
        self.rmse = MeanSquaredError(squared=False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.logged(batch, "train")

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.logged(batch, "val")

    def logged(self, batch: list[Tensor], name: str) -> Tensor:
        logits = self(batch[0])
        self.log(f"{name} deviation", logits.std())
        self.log(f"{name} largest", logits.max())
        self.log(f"{name} rmse", self.rmse(logits[:, 0], batch[1].float()))
        return F.cross_entropy(logits, batch[1])

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


@pytest.mark.slow
def test_logged_values_that_fit_no_rule_are_named_once() -> None:
    first, second = SLOW.results(("warned", Unfit))
    assert second == []
    training, validation = sorted(first)
    assert "'train deviation' is" in training
    assert "`validation_step` runs each batch as one micro-batch" in validation
    assert "'val deviation' is" in validation
    assert "largest' is" not in training + validation
    assert "rmse' is" not in training + validation


class PaddedLater(Padded):
    """The same, with layers that are never whole."""

    def __init__(self) -> None:
        LightningModule.__init__(self)

    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            self.layers, self.head = nn.ModuleList([nn.Linear(WIDTH, WIDTH)]), nn.Linear(WIDTH, VOCABULARY)


def warned_without_trial() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipelined(PaddedLater, meta_init=True)
    return [str(w.message) for w in caught if "labels of -100" in str(w.message)]


@pytest.mark.slow
def test_labels_that_do_not_count_are_mentioned_where_weights_cannot_be_tried() -> None:
    first, second = SLOW.results(("warned_without_trial",))
    assert "batch['labels'] has labels of -100" in first[0]
    assert second == []


QUICK = Cases(scene, [("pipelined", Padded), ("pipelined", Shifted), ("left_at_auto",), ("warned", Chain)])
SLOW = Cases(
    scene,
    [
        ("unchecked",),
        ("compared", "Chancy"),
        ("warned", Contrastive),
        ("pipelined", Logging),
        ("warned", Unfit),
        ("warned_without_trial",),
    ],
)
