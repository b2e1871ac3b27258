"""A resumed run is the end of the unbroken one: same samples, same weights and moments, to the bit."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import random
import signal
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader, TensorDataset

from lightning_smddp.checkpoint import files
from lightning_smddp.resume.auto_resume import STOP_CHECKPOINT
from lightning_smddp.resume.exact_resume import CHECKPOINT_KEY
from lightning_smddp.resume.resumable_loader import RandomStates, ResumableLoader
from tests.ranks import run_trainer_ranks
from tests.strategies.learners import RESUMING, Learner, make_trainer, samples, silent
from tests.strategies.resuming import Dropping, Scenario, all_from_each, resume_from_each, run

pytestmark = RESUMING

OFTEN = Scenario(accumulate=2, validate=2)
KINDS: dict[str, Scenario] = {
    "map": Scenario(validate=7),  # of 7 batches on one rank, and 4 on two: at the end of an epoch
    "accumulation": OFTEN,
    "workers": Scenario(workers=2, accumulate=2, validate=2),
    "stream": Scenario("stream", validate=3),
    "stream in workers": Scenario("stream", workers=2, validate=3),
    "batch sampler": Scenario("buckets", validate=3),
    "generator": Scenario("generator", workers=2),
    "two loaders": Scenario("two"),
    "one ended": Scenario("ended", validate=3),
    "max_steps": Scenario(max_steps=10, validate=2),
    "limit_train_batches": Scenario(limit=2),
}


# ---- runs ----


@pytest.mark.slow
def test_one_rank(tmp_path: Path) -> None:
    """From checkpoints in the middle and at the last batch of an epoch, and behind it: whatever the data."""
    names = ("map", "accumulation", "stream", "batch sampler", "two loaders", "one ended")
    kinds = [("smddp", replace(KINDS[name], epochs=2)) for name in names]
    assert run_trainer_ranks(all_from_each, 1, kinds, str(tmp_path), 2, timeout=110) == [{}]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_ranks(tmp_path: Path) -> None:
    """Without workers and with them; of a sharded optimizer; of a pipeline, each stage of which draws its own dropout.

    Also where, without a check, evaluation is traced while it counts.
    """
    kinds: list[tuple[Any, Scenario]] = []
    kinds += [("smddp", replace(KINDS[name], epochs=2)) for name in ("accumulation", "workers", "stream in workers")]
    kinds.append(("sharded", replace(OFTEN, epochs=2)))
    unchecked = Scenario(epochs=1, count=16, validate=3)
    kinds += [({}, replace(OFTEN, epochs=2, count=18)), ({"check": False}, unchecked)]
    assert run_trainer_ranks(all_from_each, 2, kinds, str(tmp_path), 2, timeout=200) == [{}, {}]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "ranks", "chosen"), [("smddp", 1, None), ("smddp", 2, None), ({}, 2, 10)])
@pytest.mark.parametrize("name", KINDS)
def test_from_every_checkpoint(kind: Any, ranks: int, chosen: int | None, name: str, tmp_path: Path) -> None:
    """Of a pipeline from many, as it takes long."""
    if kind == {} and name in ("two loaders", "one ended"):
        pytest.skip("no pipeline can cut their batches")
    scenario = KINDS[name]
    if name == "map" and (kind, ranks) == ("smddp", 2):
        scenario = replace(scenario, validate=4)
    found = run_trainer_ranks(resume_from_each, ranks, kind, scenario, str(tmp_path), chosen, timeout=110)
    assert found == [{}] * ranks


# ---- what is saved, and what does not fit ----


def fit_once(kind: Any, scenario: Scenario, directory: str | None = None, ckpt_path: Any = None) -> Any:
    """What was seen, the steps, and what was said about resuming."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run(kind, scenario, directory, ckpt_path)
    texts = [str(warning.message) for warning in caught]
    known = ("not continued exactly", "resumable")
    return result.seen, result.steps, [text for text in texts if any(words in text for words in known)]


class SaveInStep(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        if trainer.fit_loop.total_batch_idx == 3:
            trainer.save_checkpoint(self.path)


def saved_in_mid_step(directory: str) -> list[Any]:
    """What is seen of a map and of a stream, whose batches are fetched ahead; of an accumulation, what is said."""
    found = []
    for kind in ("map", "stream"):
        scenario, path = Scenario(kind, accumulate=2, epochs=1), f"{directory}/{kind}.ckpt"
        unbroken = run("smddp", scenario, callbacks=[SaveInStep(path)], enable_checkpointing=False)
        seen, _, _ = fit_once("smddp", scenario, None, path)
        found.append((seen == unbroken.seen[3:], fit_once("smddp", scenario, None, path)[2]))
    return found


def saved_and_changed(directory: str) -> list[Any]:
    """Resumed by a plain Trainer; from a plain one's file; from one with the record of an earlier version."""
    scenario, path = Scenario(epochs=1), f"{directory}/step2.ckpt"
    fit_once("smddp", scenario, directory)
    checkpoint = torch.load(path, weights_only=True)
    plain = fit_once("auto", scenario, None, path)
    found = [plain, fit_once("smddp", replace(scenario, batch_size=3), None, path)]
    for record in (None, {"version": 1, "layout": {"replicas": 1, "size": 1}, "ranks": [], "step": 2}):
        changed = {**checkpoint, CHECKPOINT_KEY: record}
        if record is None:
            del changed[CHECKPOINT_KEY]
        torch.save(changed, f"{directory}/changed.ckpt")
        found.append(fit_once("smddp", scenario, None, f"{directory}/changed.ckpt"))
    return found


def with_less_data(directory: str) -> str:
    run("smddp", Scenario("stream", epochs=1), directory)
    with pytest.raises(ValueError, match="saved after 5 batches") as caught:
        run("smddp", Scenario("stream", epochs=1, count=10), ckpt_path=f"{directory}/step5.ckpt")
    return str(caught.value)


def alone(directory: str) -> list[Any]:
    """In one process, as starting it takes longer than they do."""
    bodies = (saved_in_mid_step, saved_and_changed, with_less_data)
    return [body(f"{directory}/{body.__name__}") for body in bodies]


def test_what_is_saved_and_what_does_not_fit(tmp_path: Path) -> None:
    """The batch that was at work comes again. Ours is plain, and loads anywhere; of others the samples begin anew."""
    [(mid_step, (plain, resized, unknown, earlier), shrunk)] = run_trainer_ranks(alone, 1, str(tmp_path))
    for same, texts in mid_step:
        assert same
        assert ["has the gradients of 1 of 2 batches" in text for text in texts] == [True]
    assert (plain[1], ["not resumable" in text for text in plain[2]]) == ((7, 1), [True])
    assert ["batch_size=3 instead of 4. So this epoch's samples begin" in text for text in resized[2]] == [True]
    for seen, steps, texts in (unknown, earlier):
        assert (len(seen), steps) == (5, (7, 1))
        assert ["data not known. So this epoch's samples begin anew" in text for text in texts] == [True]
    saved = torch.load(tmp_path / "saved_and_changed" / "step2.ckpt", weights_only=True)
    assert len(saved[CHECKPOINT_KEY]["ranks"]) == 1
    assert "combined_loader" not in saved["loops"]["fit_loop"]["state_dict"]  # a Trainer without us would refuse it
    assert "saved after 5 batches of an epoch, but the training data has fewer" in shrunk


def in_another_layout(directory: str) -> Any:
    """Of two replicas, 6 batches in each epoch; then of two stages."""
    scenario = Scenario(epochs=2, count=48)
    fit_once("smddp", scenario, directory)
    return fit_once({}, scenario, None, f"{directory}/step9.ckpt")


@pytest.mark.slow
def test_another_layout(on_two: list[Any]) -> None:
    """In the middle of the second epoch: its data begin anew, and one rank says so."""
    first, other = [layout for layout, *_ in on_two]
    [text] = first[2]
    assert "those of the checkpoint's data [2, 2, 'cpu']. So this epoch's samples begin anew" in text
    assert other[2] == []
    assert first[1][1] == 2


# ---- the user's loaders ----


class Counted:
    """A loader with a state of its own, another one on each rank."""

    def __init__(self) -> None:
        self.given = 100 * int(os.environ["RANK"])

    def __iter__(self) -> Iterator[Any]:
        for _ in range(4):
            self.given += 1
            x, y = samples(4).tensors
            yield x, y, torch.tensor([self.given])

    def __len__(self) -> int:
        return 4

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


def with_own_loaders(directory: str) -> Any:
    """Numbers that a loader with a state gives after resuming; what callbacks see of one without; a second fit."""

    class Module(Dropping):
        def train_dataloader(self) -> Any:
            return Counted()

    run("smddp", Scenario(epochs=1), directory, make_model=Module)
    resumed = run("smddp", Scenario(epochs=1), ckpt_path=f"{directory}/step2.ckpt", make_model=Module)
    combined = CombinedLoader(DataLoader(samples(16), 4))

    class Looks(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            loader = trainer.train_dataloader
            self.seen = isinstance(loader, DataLoader), loader.batch_size, loader.sampler.num_replicas, len(loader)

    looks = Looks()
    for _ in range(2):
        trainer = make_trainer(silent(algorithm="native"), callbacks=[looks], max_epochs=1)
        trainer.fit(Learner(), combined)
    return resumed.seen, looks.seen, type(combined.flattened[0]) is type(trainer.train_dataloader) is DataLoader


def test_own_loaders(tmp_path: Path) -> None:
    for rank, (numbers, seen, is_users) in enumerate(run_trainer_ranks(with_own_loaders, 2, str(tmp_path))):
        assert numbers == [[[100 * rank + 3]], [[100 * rank + 4]]]
        assert seen == (True, 4, 2, 2)
        assert is_users


class WithSources(TensorDataset):
    """Draws from generators of its own, and counts what is loaded."""

    def __init__(self) -> None:
        super().__init__(*samples(20).tensors)
        self.python, self.numpy = random.Random(1), np.random.RandomState(2)
        self.new, self.old = np.random.default_rng(3), np.random.Generator(np.random.MT19937(4))
        self.more = [np.random.Generator(kind(5)) for kind in (np.random.Philox, np.random.SFC64)]
        self.philox, self.sfc = self.more
        self.torch = torch.Generator().manual_seed(5)
        self.loaded = 0

    def __getitem__(self, index: int) -> Any:
        self.loaded += 1
        mine = [self.python.gauss(0, 1), float(self.numpy.randn()), self.new.normal(), self.old.normal()]
        mine += [self.philox.normal(), self.sfc.normal()]
        rest = [random.gauss(0, 1), float(np.random.randn()), torch.rand(1).item()]
        return torch.tensor([index, *mine, torch.rand(1, generator=self.torch).item(), *rest])


def made(loader: Any) -> tuple[RandomStates, ResumableLoader]:
    states = RandomStates(torch.device("cpu"))
    states.look_into(loader)
    return states, ResumableLoader(loader, states)


def given(states: RandomStates, batches: Iterator[Any], count: int = 99) -> list[Any]:
    """Batches, each with numbers that are drawn behind it."""
    found = []
    for _, batch in zip(range(count), batches, strict=False):
        found.append([batch.tolist(), torch.rand(1).item(), random.random(), np.random.randn()])
    return found


@pytest.mark.parametrize("count", [1, 4])
def test_a_loader_goes_on(count: int, tmp_path: Path) -> None:
    """With random numbers of every kind, which a file has as plain values; nothing is loaded that was seen."""
    states, loader = made(DataLoader(WithSources(), 4, shuffle=True))
    iterator = iter(loader)
    given(states, iterator, count)
    torch.save({"now": states.capture(), "loader": loader.state_dict()}, tmp_path / "saved")
    rest = given(states, iterator)

    saved = torch.load(tmp_path / "saved", weights_only=True)
    data = WithSources()
    states, loader = made(DataLoader(data, 4, shuffle=True))
    states.pending = saved["now"]
    loader.load_state_dict({**saved["loader"], "latest": None})
    assert list(loader) == []  # until training starts
    states.restore(saved["now"])
    states.pending = None
    iterator = iter(loader)
    assert given(states, iterator) == rest
    assert len(rest) == 5 - count
    assert data.loaded == 20 - 4 * count


# ---- stops in the middle of a validation ----


class StopInValidation(Callback):
    """A signal to one rank, at the first batch of the validation behind step ``step``."""

    def __init__(self, step: int, rank: int) -> None:
        self.step, self.rank = step, rank
        self.left = 0

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        if trainer.global_step == self.step and not trainer.sanity_checking:
            self.left = trainer.num_val_batches[0] - batch_idx - 1
            time.sleep(0.25)  # other ranks look twice a second
            if trainer.global_rank == self.rank and batch_idx == 0:
                os.kill(os.getpid(), signal.SIGTERM)


def stopped_and_resumed(directory: str) -> Any:
    """How many batches validation did not come to; whether samples go on; what the validation gave that is due."""
    scenario, step = Scenario(epochs=1, validate=3, count=32, validated=64), 3
    unbroken, callback = run("smddp", scenario), StopInValidation(step, rank=1)
    os.chdir(directory)  # where the stop saves; it is the process of this rank
    with pytest.raises(SIGTERMException):
        run("smddp", scenario, callbacks=[callback], enable_checkpointing=False)
    resumed = run("smddp", scenario, ckpt_path=STOP_CHECKPOINT)
    return callback.left, resumed.seen == unbroken.seen[step:], resumed.validation


@pytest.mark.slow
def test_stops_in_a_validation(on_two: list[Any]) -> None:
    """It need not come to its end, and begins anew."""
    for left, goes_on, validation in (stop for _, stop, _ in on_two):
        assert left > 1
        assert goes_on
        assert validation is not None


# ---- stops while a checkpoint is written in the background ----


class Stop(Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1 and batch_idx == 1:
            os.kill(os.getpid(), signal.SIGTERM)


class Listening(io.StringIO):
    """Notes whether a file is there when it is spoken of."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.there = path, []

    def write(self, text: str) -> int:
        if "saved to" in text:
            self.there.append(self.path.exists())
        return super().write(text)


def stopped_while_writing(directory: str) -> list[Any]:
    """With a file that takes long, and with one that cannot be written: the error, what was said, and when."""
    original = files.write

    def slowly(*args: Any) -> None:
        time.sleep(0.5)
        original(*args)

    def failing(*args: Any) -> None:
        time.sleep(0.2)
        raise OSError(errno.ENOSPC, "No space left on device", str(args[1]))

    found = []
    for name, write in (("slow", slowly), ("failing", failing)):
        files.write = write  # type: ignore[assignment]
        root = f"{directory}/{name}"
        out = Listening(Path(root, STOP_CHECKPOINT))
        strategy = silent(algorithm="native", async_save=True)
        with contextlib.redirect_stdout(out), pytest.raises((SIGTERMException, OSError)) as caught:
            make_trainer(strategy, callbacks=[Stop()], default_root_dir=root).fit(Learner())
        found.append((type(caught.value).__name__, str(caught.value), out.getvalue(), out.there))
    return found


def on_two_ranks(directory: str) -> tuple[Any, ...]:
    """In one process of a rank, as starting it takes longer than they do."""
    return in_another_layout(f"{directory}/layout"), stopped_and_resumed(directory), stopped_while_writing(directory)


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_trainer_ranks(on_two_ranks, 2, str(tmp_path_factory.mktemp("two")))


@pytest.mark.slow
def test_a_stop_waits_for_what_is_written_in_the_background(on_two: list[Any]) -> None:
    for rank, (slow, failing) in enumerate(writing for *_, writing in on_two):
        assert slow[0] == "SIGTERMException"
        assert slow[3] == [True] * (rank == 0)
        assert failing[0] == "OSError"
        assert "No space left on device" in failing[1]
        assert "saved to" not in failing[2]
