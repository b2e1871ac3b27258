"""``SafeCheckpointIO`` in Trainers, in the background, and with several ranks."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_smddp import SafeCheckpointIO
from lightning_smddp.checkpoint import files
from tests.checkpoint.models import assert_equal, example
from tests.strategies.learners import Learner, make_trainer


def fit(directory: Path, plugins: list[Any], epochs: int, start: Path | None = None, **options: Any) -> Trainer:
    """Train, and return the Trainer; a checkpoint is saved after each epoch. What goes on begins with other weights."""
    saved = ModelCheckpoint(directory, **{"filename": "{epoch}", "save_top_k": -1, **options})
    trainer = make_trainer("auto", max_epochs=epochs, enable_checkpointing=True, callbacks=[saved], plugins=plugins)
    model = Learner(batch_size=4, count=12)
    if start is not None:
        model.net.apply(lambda module: module.reset_parameters() if isinstance(module, torch.nn.Linear) else None)
    trainer.fit(model, ckpt_path=start)
    return trainer


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* is not empty:UserWarning")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_exchanges_checkpoints_with_plain_lightning(asynchronous: bool, tmp_path: Path) -> None:
    """And links to those that may still be written."""
    ours, io = tmp_path / "ours", SafeCheckpointIO(asynchronous=asynchronous)
    unbroken = fit(tmp_path, [], 3).model
    fit(ours, [io], 2, save_top_k=1, save_last="link")
    assert (ours / "last.ckpt").is_symlink()
    assert sorted(os.listdir(ours)) == ["epoch=1.ckpt", "last.ckpt"]
    for start, loading in ((ours / "last.ckpt", []), (tmp_path / "epoch=1.ckpt", [SafeCheckpointIO()])):
        resumed = fit(start.parent, loading, 3, start)
        assert resumed.global_step == 9
        assert_equal(dict(resumed.model.state_dict()), dict(unbroken.state_dict()))


def test_what_cannot_be_used() -> None:
    with pytest.raises(TypeError, match="AWS_ENDPOINT_URL"):
        SafeCheckpointIO().save_checkpoint({}, "memory://a.ckpt", storage_options={"key": "x"})


# ---- in the background ----


class Gate:
    """Holds back writing until it is opened; ``error`` is raised then."""

    def __init__(self, write: Any) -> None:
        self.open, self.error, self._write = threading.Event(), None, write

    error: BaseException | None

    def __call__(self, *args: Any) -> None:
        assert self.open.wait(20)
        if self.error is not None:
            raise self.error
        self._write(*args)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(files.write)
    monkeypatch.setattr(files, "write", gate)
    yield gate
    gate.open.set()


def test_returns_before_it_is_written(gate: Gate, tmp_path: Path) -> None:
    """Also what has memory of its own in no file: views, parameters, graphs."""
    io, checkpoint = SafeCheckpointIO(asynchronous=True), example()
    more = {
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "sparse": torch.eye(3).to_sparse(),
        "negated": torch.tensor([1 + 2j]).conj().imag,
        "graph": 2 * torch.ones(1, requires_grad=True),
    }
    expected = {name: value.detach().clone() for name, value in more.items()}
    io.save_checkpoint({**checkpoint, **more}, tmp_path / "a.ckpt")
    for value in (checkpoint["state_dict"]["weight"], *more.values()):
        value.detach().zero_()
    checkpoint["hyper_parameters"]["width"] = 0
    assert os.listdir(tmp_path) == []
    gate.open.set()
    loaded = io.load_checkpoint(tmp_path / "a.ckpt")  # which waits
    for name, value in expected.items():
        assert torch.equal(loaded.pop(name).to_dense(), value.to_dense()), name
    assert_equal(loaded, example())
    assert loaded["state_dict"]["tied"].data_ptr() == loaded["state_dict"]["weight"].data_ptr()
    io.teardown()


def test_one_at_a_time_and_the_old_one_is_removed_after_the_new_one_is_there(gate: Gate, tmp_path: Path) -> None:
    io = SafeCheckpointIO(asynchronous=True)
    (tmp_path / "old.ckpt").touch()
    io.save_checkpoint(example(1), tmp_path / "new.ckpt")
    io.remove_checkpoint(tmp_path / "old.ckpt")
    second = threading.Thread(target=io.save_checkpoint, args=(example(2), tmp_path / "second.ckpt"))
    second.start()
    second.join(0.1)
    assert second.is_alive()
    assert os.listdir(tmp_path) == ["old.ckpt"]
    gate.open.set()
    second.join()
    io.teardown()
    assert sorted(os.listdir(tmp_path)) == ["new.ckpt", "second.ckpt"]
    io.remove_checkpoint(tmp_path / "new.ckpt")
    assert os.listdir(tmp_path) == ["second.ckpt"]


def test_a_failure_is_known_at_once_and_raised_once(gate: Gate, tmp_path: Path) -> None:
    io, gate.error = SafeCheckpointIO(asynchronous=True), OSError(errno.ENOSPC, "No space left on device")
    (tmp_path / "old.ckpt").touch()
    io.save_checkpoint(example(2), tmp_path / "new.ckpt")
    io.remove_checkpoint(tmp_path / "old.ckpt")
    assert io.failure is None
    gate.open.set()
    deadline = time.monotonic() + 20
    while io.failure is None and time.monotonic() < deadline:
        time.sleep(0.005)
    assert io.failure is gate.error
    io.remove_checkpoint(tmp_path / "old.ckpt")
    assert os.listdir(tmp_path) == ["old.ckpt"], "what should have been replaced stays"
    with pytest.raises(OSError, match="No space left"):
        io.save_checkpoint(example(2), tmp_path / "new.ckpt")  # or any other call
    assert io.failure is None
    io.raise_failure()
    gate.error = None
    io.save_checkpoint(example(3), tmp_path / "new.ckpt")
    io.teardown()
    assert sorted(os.listdir(tmp_path)) == ["new.ckpt", "old.ckpt"]


def test_what_spawn_returns_is_written_at_once(tmp_path: Path) -> None:
    """Lightning's main process reads it as soon as it is told where, and knows nothing of our thread."""
    SafeCheckpointIO(asynchronous=True).save_checkpoint({"layer.weight": torch.ones(2)}, tmp_path / "a.ckpt")
    assert os.listdir(tmp_path) == ["a.ckpt"]
