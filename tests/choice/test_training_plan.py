"""``lightning_smddp.plan`` and ``lightning-smddp plan``: sizes that are known, the choice, and what is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lightning_smddp
from lightning_smddp.choice.cli_config import from_config
from lightning_smddp.choice.estimates import Estimate, Memory, Sizes, data_parallel, fully_sharded
from lightning_smddp.choice.first_batch import UnplannableError
from lightning_smddp.choice.profiles import MemoryRecord, StepProfile, profile_optimizer, profile_step
from lightning_smddp.choice.training_plan import TrainingPlan
from lightning_smddp.cli import main
from tests.choice.modules import ByHand, Clipped, Empty, Halves, Penalised, Small, Summing, WithLBFGS

MODULES = "tests.choice.modules"


# ---- sizes that are known ----


def test_a_step_keeps_what_its_backward_needs() -> None:
    root = nn.Sequential(nn.Linear(64, 256, bias=False), nn.Tanh(), nn.Linear(256, 64, bias=False), nn.Tanh())
    x = torch.zeros(1000, 64)
    profile = profile_step(lambda: root(x).sum(), root)
    inner, outer = 4 * 1000 * 256, 4 * 1000 * 64
    assert profile.kept == pytest.approx(inner + outer, rel=0.01)  # what both tanh have returned
    # The inner tanh's backward has the gradient of its result and makes that of its input.
    assert profile.peak == pytest.approx(inner + 2 * inner, rel=0.1)
    assert all(parameter.grad is None for parameter in root.parameters())


def test_memory_that_is_never_written_counts_for_nothing() -> None:
    record = MemoryRecord()

    def work() -> torch.Tensor:
        large = torch.empty(2**26, dtype=torch.uint8)
        large[: 2**23] = 1
        return large

    kept = record.run(work)
    assert (record.now, record.peak) == pytest.approx((2**23, 2**23), rel=0.5)  # pages may be huge ones
    del kept


def test_a_step_changes_nothing() -> None:
    root = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout())
    before = {name: value.clone() for name, value in root.state_dict().items()}
    gradient = torch.ones(8, 8)
    root[0].weight.grad = gradient
    state = torch.get_rng_state()
    profile_step(lambda: root(torch.ones(4, 8)).sum(), root)
    torch.testing.assert_close(root.state_dict(), before)
    assert root[0].weight.grad is gradient
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("make", "numbers"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
        (lambda p: torch.optim.AdamW(p, lr=0.0), 2),
        (lambda p: torch.optim.Adafactor(p), 0.02),
    ],
)
def test_what_optimizers_keep(make: Any, numbers: float) -> None:
    frozen = nn.Parameter(torch.zeros(7), requires_grad=False)
    parameters = [nn.Parameter(torch.zeros(100, 100)), nn.Parameter(torch.zeros(100, 100)), frozen]
    optimizer = make(parameters)
    state, _ = profile_optimizer(optimizer)
    assert set(state) == {id(parameter) for parameter in parameters[:2]}
    assert sum(state.values()) == pytest.approx(numbers * 80000, abs=100)
    assert not optimizer.state


def test_a_step_with_foreach_has_what_all_parameters_take_at_once() -> None:
    parameters = [nn.Parameter(torch.zeros(100, 100)) for _ in range(3)]
    (_, together), (_, alone) = [
        profile_optimizer(torch.optim.AdamW(parameters, foreach=each)) for each in (True, False)
    ]
    assert together >= 3 * 40000 > alone > 0


SIZES = Sizes(parameters=100, buffers=1, gradients=90, state=180, optimizer_temporary=60, batch=5)


def test_memory_of_data_parallel_ranks() -> None:
    profile = StepProfile(kept=30, peak=40)
    assert data_parallel(SIZES, profile, 4) == Memory(101, 90, 180, 35, 90, 10)
    assert data_parallel(SIZES, profile, 1) == Memory(101, 90, 180, 5, 0, 60)  # in the optimizer's step
    assert data_parallel(SIZES, profile, 4, shards_state=True) == Memory(101, 90, 45, 35, 90, 10)

    units = [20, 20, 20, 20]
    # 40 of two units, 10 in which they are gathered, 40 of a unit's gradients, 40 of the root.
    assert fully_sharded(SIZES, profile, 4, units, reshard=True) == Memory(26, 23, 45, 35, 130, 10)
    assert fully_sharded(SIZES, profile, 4, units, reshard=False) == Memory(26, 23, 45, 35, 170, 10)


# ---- the choice ----


def test_the_first_of_those_that_fit_is_taken() -> None:
    large, small = Memory(parameters=2**31), Memory(parameters=2**30)
    estimates = (Estimate("a", '"a"', large), Estimate("b", '"b"', small, True), Estimate("c", '"c"', small, True))
    assert TrainingPlan("M", 2, 1.5, estimates).trainer == 'Trainer(strategy="b", devices=2)'
    none = TrainingPlan("M", 2, 0.5, (estimates[0], Estimate("d", "d", notes=("of this",))))
    assert none.best is None
    assert none.trainer is None
    assert "No strategy fits 0.5 GiB a rank; the least is 2.00 GiB." in str(none)
    assert "d cannot train it: of this" in str(none)


def test_a_plan_of_a_small_module() -> None:
    found = lightning_smddp.plan(Small(), 2, 1.0)
    names = [estimate.name for estimate in found.estimates if estimate.memory is not None]
    assert names[:4] == ["smddp", "smddp, shard='optimizer'", "smddp_fsdp, grad_op", "smddp_fsdp, full"]
    assert names[4:] == ["smddp_pipeline", "smddp_pipeline, checkpointing"]
    assert all(estimate.fits for estimate in found.estimates if estimate.memory is not None)
    parts = found.estimates[0].memory
    whole = 4 * (8 * (16 * 16 + 16) + 16 * 3 + 3)
    assert (parts.parameters, parts.gradients, parts.communication) == (whole, whole, whole)
    assert parts.optimizer_state == 2 * whole + 18 * 4  # and a count for each parameter
    of_stages = found.estimates[-2].memory
    assert of_stages.parameters <= whole
    assert "predicted from a CPU trace" in str(found)


def test_a_pipeline_starts_with_the_whole_module_and_its_gradients_on_the_first_rank() -> None:
    whole = 4 * 2 * (64 * 64 + 64)
    start = lightning_smddp.plan(Halves(), 2, 1.0).estimates[-2].memory
    assert (start.parameters, start.gradients) == (whole, whole)

    # What has no room for that begins with layers that have no memory yet.
    found = lightning_smddp.plan(Halves(), 2, (start.total - 1) / 2**30).estimates[-2]
    assert found.strategy == "PipelineStrategy(meta_init=True)"
    assert found.fits
    assert (found.memory.parameters, found.memory.gradients) == (whole / 2, whole / 2)


def test_optimizers_that_cannot_be_shared_are_said() -> None:
    found = {estimate.name: estimate for estimate in lightning_smddp.plan(Clipped(), 1, 1.0).estimates}
    assert found["smddp, shard='optimizer'"].memory is None
    assert "ClippedSGD cannot be shared" in found["smddp, shard='optimizer'"].notes[0]
    assert found["smddp"].fits


@pytest.mark.parametrize(
    ("make", "text"),
    [(Penalised, "runs a backward pass of its own"), (Summing, "writes a tensor in place at")],
)
def test_what_no_pipeline_can_follow_is_said(make: Any, text: str) -> None:
    found = lightning_smddp.plan(make(), 2, 1.0)
    named = {estimate.name: estimate for estimate in found.estimates}
    refused = {name for name, estimate in named.items() if estimate.memory is None}
    assert refused == {name for name in named if "pipeline" in name}
    assert text in " ".join(str(found).split())


# ---- what is refused ----


@pytest.mark.parametrize(
    ("make", "devices", "memory", "text"),
    [
        (Small, 0, 1.0, "devices=0 has to be a number from 1"),
        (Small, 2, 0.0, "memory_gb=0.0 has to be positive"),
        (Small, 2, float("nan"), "memory_gb=nan has to be positive"),
        (ByHand, 2, 1.0, "ByHand optimizes by hand"),
        (Empty, 2, 1.0, "The train_dataloader of Empty gave no batch"),
        (WithLBFGS, 2, 1.0, "LBFGS cannot be tried on one parameter"),
        (lambda: nn.Linear(1, 1), 2, 1.0, "A Linear is no LightningModule. Give an instance"),
    ],
)
@pytest.mark.filterwarnings("ignore:Total length of")
def test_what_cannot_be_planned(make: Any, devices: int, memory: float, text: str) -> None:
    with pytest.raises(UnplannableError, match=text):
        lightning_smddp.plan(make(), devices, memory)


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--devices", "1", "--memory", "1"]
    remarks: list[str] = []  # of Lightning's Trainer, which is none that anybody trains with
    monkeypatch.setattr(logging.Handler, "handle", lambda self, record: remarks.append(record.getMessage()))
    assert main(["plan", f"{MODULES}:make", "--kwargs", '{"width": 8}', *arguments]) == 0
    printed = capsys.readouterr().out
    assert "Small on 1 rank of 1 GiB" in printed
    assert " 0 " not in printed.splitlines()[2].partition("yes")[2][:40], "parts of a small module are no zeros"
    assert printed.splitlines()[-1].startswith("Trainer(strategy=")
    assert remarks == []
    assert main(["plan", f"{MODULES}:WithoutData", "--datamodule", f"{MODULES}:Data", *arguments]) == 0
    assert main(["plan", f"{MODULES}:Small", "--devices", "1", "--memory", "1e-9"]) == 1
    assert "No strategy fits" in capsys.readouterr().out
    assert main(["plan", f"{MODULES}:Small", "--devices", "0", "--memory", "1"]) == 1
    assert "lightning-smddp plan: devices=0" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")  # of LightningCLI's own calls of jsonargparse
def test_configurations_of_lightning_cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--devices", "1", "--memory", "1"]
    whole, of_one_class, wrong = tmp_path / "whole.yaml", tmp_path / "one.yaml", tmp_path / "wrong.yaml"
    of_two_classes = tmp_path / "two.yaml"
    trainer = "trainer:\n  devices: 8\n  accelerator: gpu\n  precision: bf16-true\nckpt_path: null\n"
    module = f"model:\n  class_path: {MODULES}.Small\n  init_args:\n    width: 24\n"
    whole.write_text(f"{trainer}{module}data:\n  class_path: {MODULES}.WideData\n")
    of_one_class.write_text(f"{trainer}model:\n  width: 32\n")
    of_two_classes.write_text("model:\n  width: 32\ndata:\n  width: 32\n")
    wrong.write_text("seed_everything: 1\n")
    module, data, precision = from_config(str(whole))
    assert (type(module).__name__, module.width, type(data).__name__, precision) == (
        "Small",
        24,
        "WideData",
        "bf16-true",
    )
    assert main(["plan", str(whole), *arguments]) == 0
    assert main(["plan", f"{MODULES}:Small", "--config", str(of_one_class), *arguments]) == 0
    data_class = ["--datamodule", f"{MODULES}:WideData"]
    assert main(["plan", f"{MODULES}:Small", *data_class, "--config", str(of_two_classes), *arguments]) == 0
    capsys.readouterr()
    assert main(["plan", str(wrong), *arguments]) == 1
    assert "has no section `model`" in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "absent.yaml"), *arguments]) == 1
    assert "cannot be read as a LightningCLI configuration" in capsys.readouterr().err
