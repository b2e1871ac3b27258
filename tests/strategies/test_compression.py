"""Compressed gradients between two (simulated) nodes: real data are learned, and the memory survives a restart."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_smddp import Compression
from tests.ranks import run_trainer_ranks
from tests.strategies.learners import Learner, make_trainer, silent

NODES = ["a", "b"]
# Lightning takes every checkpoint callback for a ModelCheckpoint here.
pytestmark = pytest.mark.filterwarnings("ignore:.*fit.ckpt_path=:UserWarning")
METHODS = ["bf16", "fp16", "int8", "powersgd"]


def digits() -> tuple[TensorDataset, tuple[Tensor, Tensor]]:
    """For training, and for the test: every fifth image."""
    data, target = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(data / 16, dtype=torch.float32), torch.tensor(target)
    test = torch.arange(len(inputs)) % 5 == 0
    return TensorDataset(inputs[~test], targets[~test]), (inputs[test], targets[test])


class Digits(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self) -> Any:
        data, _ = digits()
        return DataLoader(data, batch_size=16, sampler=DistributedSampler(data, shuffle=False))

    def accuracy(self) -> float:
        _, (inputs, targets) = digits()
        return float((self.net(inputs).argmax(1) == targets).float().mean())


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def learn_digits(compressions: list[Any]) -> list[tuple[float, Tensor]]:
    results = []
    for compression in compressions:
        model = Digits()
        trainer = make_trainer(silent(compression=compression), max_epochs=3)
        trainer.fit(model)
        results.append((model.accuracy(), weights(model)))
    return results


@pytest.mark.slow
def test_digits_are_learned_as_well_as_without_compression() -> None:
    first, second = run_trainer_ranks(learn_digits, 2, [None, *METHODS], node_ids=NODES)
    exact, exact_weights = first[0]
    assert exact > 0.9
    for method, ours, theirs in zip(METHODS, first[1:], second[1:], strict=True):
        assert ours[0] > exact - 0.02, method
        assert torch.equal(ours[1], theirs[1]), method  # the ranks stay together
        assert not torch.equal(ours[1], exact_weights), method  # it did compress


# ---- memory ----


def fit_save_and_resume(compression: Any, path: str) -> dict[str, Any]:
    unbroken = Digits()
    make_trainer(silent(compression=compression), max_epochs=2).fit(unbroken)

    first = Digits()
    trainer = make_trainer(silent(compression=compression), max_epochs=1)
    trainer.fit(first)
    trainer.save_checkpoint(path)

    resumed = Digits()
    again = make_trainer(silent(compression=compression), max_epochs=2)
    loaded: dict[str, Any] = {}
    resumed.on_train_start = lambda: loaded.update(again.strategy._scheme.state_dict())  # type: ignore[method-assign]
    again.fit(resumed, ckpt_path=path)
    return {"half": weights(first), "unbroken": weights(unbroken), "resumed": weights(resumed), "loaded": loaded}


SHORT = {"limit_train_batches": 5}


def save_and_load(path: str) -> tuple[bool, list[str]]:
    """A checkpoint with memory goes on in plain `ddp`, in `smddp` without compression, and with another one."""
    trainer, model = make_trainer(silent(compression="powersgd"), max_epochs=1, **SHORT), Digits()
    model.on_train_end = lambda: trainer.save_checkpoint(path)  # type: ignore[method-assign]
    trainer.fit(model)
    others = [silent(compression=other) for other in (None, "bf16", Compression("powersgd", rank=2))]
    models, said = [Digits() for _ in range(4)], []
    for strategy, resumed in zip(("ddp", *others), models, strict=True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make_trainer(strategy, max_epochs=2, **SHORT).fit(resumed, ckpt_path=path)
        said += [str(one.message) for one in caught if "What compression remembered" in str(one.message)]
    return torch.equal(weights(models[0]), weights(models[1])), said


def resume_on_four(path: str) -> int:
    trainer = make_trainer(silent(compression=Compression("powersgd", scope="all")), max_epochs=2, **SHORT)
    trainer.fit(Digits(), ckpt_path=path)
    return int(trainer.global_step)


class Failing(Learner):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.global_step == 2:
            raise RuntimeError("no more training")
        return super().training_step(batch, batch_idx)


class Keeping(OnExceptionCheckpoint):
    def teardown(self, *_: Any, **__: Any) -> None:
        pass


def fail(directory: str) -> None:
    trainer = make_trainer(silent(compression="int8"), callbacks=[Keeping(directory)], enable_checkpointing=True)
    with pytest.raises(RuntimeError, match="no more training"):
        trainer.fit(Failing())


def on_two_nodes(directory: str) -> tuple[dict[str, Any], tuple[bool, list[str]]]:
    found = fit_save_and_resume("int8", f"{directory}/int8.ckpt"), save_and_load(f"{directory}/powersgd.ckpt")
    fail(directory)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The run is not continued exactly")
@pytest.mark.filterwarnings("ignore:What compression remembered of gradients begins at zero")
def test_memory_is_saved_restored_and_loads_anywhere(tmp_path: Path) -> None:
    """But is not in a checkpoint that an exception makes, which may come between two of its changes."""
    results = run_trainer_ranks(on_two_nodes, 2, str(tmp_path), node_ids=NODES)
    in_file = torch.load(tmp_path / "int8.ckpt", weights_only=True)["smddp"]
    assert len(in_file) == 2
    for (result, (same, said)), of_rank in zip(results, in_file, strict=True):
        assert of_rank
        torch.testing.assert_close(result["loaded"], of_rank)
        moved = (result["unbroken"] - result["half"]).norm()
        assert (result["resumed"] - result["unbroken"]).norm() < 0.05 * moved
        assert same
        assert ["the checkpoint is of other buckets, or of another compression" in text for text in said] == [True] * 2
    path = tmp_path / "powersgd.ckpt"
    assert "smddp" in torch.load(path, weights_only=True)
    assert weights(Digits.load_from_checkpoint(path)).isfinite().all()
    assert run_trainer_ranks(resume_on_four, 4, str(path), node_ids=["a", "a", "b", "b"]) == [5 + 5] * 4
    failed = torch.load(tmp_path / "on_exception.ckpt", weights_only=True)
    assert failed["global_step"] == 2
    assert "smddp" not in failed
