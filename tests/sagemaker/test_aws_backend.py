"""AWS's backend, played by ``fake_aws``: its known failures happen there, and not in a run of ours."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _InfiniteBarrier, _sync_ddp
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_smddp import PipelineStrategy, SMDDPFabricStrategy, SMDDPStrategy
from lightning_smddp.communication import aws
from tests.ranks import run_trainer_ranks
from tests.strategies.learners import Learner, Outcome, assert_equal, fit, make_trainer, silent

deprecated_in_lightning = pytest.mark.filterwarnings(  # its own all_gather
    "ignore:torch.distributed.nn.functional.all_gather is deprecated:FutureWarning"
)
FAKE = str(Path(__file__).parent / "fake_aws")


class Logging(Learner):
    """Logs means over ranks, prepares data, and makes a metric late."""

    prepared = 0

    def __init__(self, count: int = 48) -> None:
        super().__init__(count=count)
        self.metric = MeanMetric()

    def prepare_data(self) -> None:
        Logging.prepared += 1

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, sync_dist=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.metric(self.loss(batch))
        self.log("val_loss", self.metric)
        gathered = self.all_gather(self.loss(batch))
        self.log("largest", gathered.max(), reduce_fx="max", sync_dist=True)

    val_dataloader = Learner.train_dataloader


def refusals() -> list[str]:
    """What Lightning alone gets to hear from the backend."""

    def message(call: Any) -> str:
        with pytest.raises(RuntimeError) as caught:
            call()
        return str(caught.value).partition(": ")[2]

    original: Any = _InfiniteBarrier.original  # type: ignore[attr-defined]
    return [
        message(lambda: _sync_ddp(torch.ones(1), reduce_op="mean")),
        message(lambda: original(_InfiniteBarrier())),
        message(lambda: dist.barrier(device_ids=[0])),
        message(lambda: dist.new_group([0])),
    ]


def train_on_both(directory: str) -> tuple[Outcome, Outcome, str, dict[str, int], list[str], int, int]:
    usual = fit(silent(algorithm="native"), Logging())
    dist.destroy_process_group()
    sys.path.insert(0, FAKE)
    strategy = silent(process_group_backend="smddp", collective_timeout=30, sharded=True)
    MeanMetric()  # AWS's module is loaded by now, and hashes it too early
    Logging.prepared = 0
    model = Logging()
    trainer = make_trainer(strategy, default_root_dir=directory, enable_checkpointing=True)
    trainer.fit(model)
    other = Outcome(model.losses, dict(model.named_parameters()), {})
    other.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    trainer.validate(model, verbose=False)
    from smdistributed.dataparallel.torch import torch_smddp  # type: ignore[import-not-found]

    files = len(list(Path(directory).rglob("*.ckpt")))
    assert strategy.communication_report is not None
    return usual, other, dist.get_backend(), dict(torch_smddp.calls), refusals(), Logging.prepared, files


@pytest.mark.slow
@deprecated_in_lightning
def test_training_on_aws_backend_equals_training_on_gloo(tmp_path: Path) -> None:
    results = run_trainer_ranks(train_on_both, 2, str(tmp_path))
    for usual, other, backend, calls, refused, _, files in results:
        assert backend == "smddp"
        assert calls["allreduce"] > 12  # the gradients of 12 steps, and more
        assert_equal(other, usual)
        assert refused == ["ReduceOp", "new_group", "device_ids in barrier", "new_group"]
        assert files == 1
    assert [result[5] for result in results] == [2, 0]  # for fit and validate, on rank 0


# ---- without it ----


def test_it_is_missed_clearly() -> None:
    for strategy in (SMDDPStrategy, SMDDPFabricStrategy):
        with pytest.raises(ValueError, match="torch_smddp is not installed. AWS ships .* Leave process_group_backend"):
            strategy(process_group_backend="smddp")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "loads, but has not registered a backend"),
        ("raise OSError('libcuda.so.1: no such file')", "does not load: libcuda.so.1"),
        ("import no_module_of_this_name", "does not load: No module named 'no_module_of_this_name'"),
    ],
    ids=["silent", "broken", "incomplete"],
)
def test_what_is_wrong_with_it_is_said(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "smdistributed" / "dataparallel" / "torch"
    folder.mkdir(parents=True)
    (folder / "torch_smddp.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        with pytest.raises(ValueError, match=message):
            SMDDPStrategy(process_group_backend="smddp")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "smdistributed"]:
            del sys.modules[name]


def test_what_needs_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="algorithm='balanced' and compression='int8' cannot .* algorithm='native'"):
        SMDDPStrategy(algorithm="balanced", compression="int8", process_group_backend="smddp")
    with pytest.raises(ValueError, match="process_group_backend='smddp' cannot be used with smddp_pipeline"):
        PipelineStrategy(process_group_backend="smddp")


@pytest.mark.parametrize("options", [{"algorithm": "balanced"}, {"compression": "bf16"}])
def test_auto_leaves_it_out_where_groups_are_needed(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aws, "problem", lambda: None)
    assert SMDDPStrategy()._session.default_backend(torch.device("cuda", 0)) == "smddp"
    assert SMDDPStrategy(**options)._session.default_backend(torch.device("cuda", 0)) is None


# ---- tensors on the CPU beside a CUDA device ----


def reduce_cpu_tensors() -> list[Any]:
    sys.path.insert(0, FAKE)
    strategy = silent(process_group_backend="smddp")
    seen: dict[str, Any] = {}

    class Asking(Learner):
        def on_train_start(self) -> None:
            rank = self.global_rank
            seen["mean"] = self.trainer.strategy.reduce(torch.tensor(1.0 + rank), reduce_op="mean")
            seen["all"] = self.trainer.strategy.all_gather(torch.tensor([float(rank)]))

    make_trainer(strategy, accelerator="gpu", devices=1, num_nodes=2, max_epochs=1).fit(Asking())
    with pytest.raises(RuntimeError, match="CPU tensors"):
        dist.all_reduce(torch.ones(1))
    return [seen["mean"].device.type, float(seen["mean"]), seen["all"].device.type, seen["all"].tolist()]


@pytest.mark.gpus(1)
@deprecated_in_lightning
def test_cpu_tensors_travel_by_the_device() -> None:
    """Two ranks share one GPU: gloo, which the stand-in uses, does not mind."""
    results = run_trainer_ranks(
        reduce_cpu_tensors, 2, node_ids=["a", "b"], env={"FAKE_SMDDP_DEVICE": "cuda"}, timeout=110
    )
    assert results == [["cpu", 1.5, "cpu", [[0.0], [1.0]]]] * 2
