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
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader, TensorDataset

from lightning_smddp import PipelineStrategy, SafeCheckpointIO
from lightning_smddp.resume.auto_resume import STOP_CHECKPOINT
from lightning_smddp.resume.exact_resume import CHECKPOINT_KEY, gather_states
from lightning_smddp.resume.layouts import LayoutRank, Resumption, facts_of, resume_at
from lightning_smddp.resume.random_states import RandomStates, from_plain, seed_all, to_plain
from lightning_smddp.resume.recorded_loader import Course
from lightning_smddp.strategies import checkpoint_io
from lightning_smddp.wire.encode import pack, unpack
from tests.ranks import run_in_threads, run_ranks, run_trainer_ranks
from tests.strategies.grouped import grouped
from tests.strategies.learners import Learner, make_trainer, samples, silent
from tests.strategies.resuming import (
    Dropping,
    Drops,
    Scenario,
    all_from_each,
    checkpoints,
    differences,
    resume_from_each,
    run,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* is not empty:UserWarning"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),  # resumed without callbacks
    pytest.mark.filterwarnings("ignore:It is recommended to use `self.log:UserWarning"),
    pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined:UserWarning"),
    pytest.mark.filterwarnings("ignore:The run is not continued exactly. random numbers .* in persistent:UserWarning"),
    pytest.mark.filterwarnings("ignore:Found [0-9]+ module.*in eval mode:UserWarning"),
]

OFTEN = Scenario(accumulate=2, validate=3)
KINDS: dict[str, Scenario] = {
    "map": OFTEN,
    "workers": Scenario(workers=2, accumulate=2, validate=3),
    "persistent workers": Scenario(workers=2, persistent=True, augment=False, validate=3),
    "stream": Scenario("stream", accumulate=2, validate=3),
    "stream in workers": Scenario("stream", workers=2, validate=3),
    "stream with length": Scenario("sized stream", accumulate=3),
    "batch sampler": Scenario("buckets", validate=3),
    "batch sampler with workers": Scenario("buckets", workers=2),
    "generator": Scenario("generator", workers=2),
    "two loaders": Scenario("two", accumulate=2),
    "max_steps": Scenario(max_steps=10, validate=2),
    "limit_train_batches": Scenario(limit=2),
}


@pytest.mark.parametrize("name", ["map", pytest.param("persistent workers", marks=pytest.mark.slow)])
def test_smddp(name: str, tmp_path: Path) -> None:
    """From some of the checkpoints: in the middle and at the end of epochs, and after validations."""
    scenario = replace(KINDS[name], epochs=2)
    assert run_trainer_ranks(resume_from_each, 2, "smddp", scenario, str(tmp_path), 2) == [{}, {}]


@pytest.mark.slow
def test_pipeline(tmp_path: Path) -> None:
    """Each stage draws its own dropout."""
    scenario = replace(OFTEN, epochs=2, count=18)
    assert run_trainer_ranks(resume_from_each, 2, {}, scenario, str(tmp_path), 2) == [{}, {}]
    assert {path.name[:3] for path in checkpoints(str(tmp_path))} == {"ste", "epo", "val"}


@pytest.mark.slow
def test_pipeline_without_a_check(tmp_path: Path) -> None:
    """Whose evaluation is traced while it counts: what no step has drawn then, each rank still has for itself."""
    scenario = Scenario(epochs=1, count=16, validate=3)
    assert run_trainer_ranks(resume_from_each, 2, {"check": False}, scenario, str(tmp_path)) == [{}, {}]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", KINDS)
def test_smddp_from_every_checkpoint(name: str, tmp_path: Path) -> None:
    assert run_trainer_ranks(resume_from_each, 2, "smddp", KINDS[name], str(tmp_path), timeout=110) == [{}, {}]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in KINDS if name != "two loaders"])  # whose batches no pipeline can cut
def test_pipeline_from_many_checkpoints(name: str, tmp_path: Path) -> None:
    assert run_trainer_ranks(resume_from_each, 2, {}, KINDS[name], str(tmp_path), 10, timeout=110) == [{}, {}]


FOUR: list[tuple[Any, Scenario]] = [
    ("shared_memory", Scenario(accumulate=2, validate=3, count=50)),  # sums of four in one order, whatever the buckets
    ({"pipeline_parallel_size": 2}, OFTEN),
    ({"pipeline_parallel_size": 2, "placement": "spread"}, KINDS["persistent workers"]),
    ({"pipeline_parallel_size": 2, "schedule": "interleaved_1f1b"}, Scenario("stream", workers=2)),
]


@pytest.mark.exhaustive
def test_four_ranks(tmp_path: Path) -> None:
    assert run_trainer_ranks(all_from_each, 4, FOUR[:1], str(tmp_path), 3, timeout=110) == [{}] * 4


@pytest.mark.exhaustive
def test_four_ranks_of_pipelines(tmp_path: Path) -> None:
    assert run_trainer_ranks(all_from_each, 4, FOUR[1:], str(tmp_path), 3, timeout=110) == [{}] * 4


@pytest.mark.exhaustive
def test_stock_ddp_differs(tmp_path: Path) -> None:
    """So these tests see something."""
    path = str(tmp_path)
    for found in run_trainer_ranks(differing, 2, "ddp", path):
        assert "samples differ 0 batches after the start" in found[0]


def differing(kind: Any, directory: str) -> list[str]:
    warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before")
    unbroken = run(kind, Scenario(), directory)
    return differences(run(kind, Scenario(), ckpt_path=f"{directory}/step6.ckpt"), unbroken)


# ---- the other package ----


def of_twin(directory: str) -> list[str]:
    import pytorch_lightning as pl

    from lightning_smddp.strategies.pytorch_lightning import SMDDPStrategy

    class Module(Drops, pl.LightningModule):
        def __init__(self, scenario: Scenario) -> None:
            super().__init__()
            self.build(scenario)

    def train(**options: Any) -> Any:
        strategy = SMDDPStrategy(**grouped(verbose=False, algorithm="native"))
        twin = {"make_model": Module, "trainer_class": pl.Trainer, "checkpoint_class": pl.callbacks.ModelCheckpoint}
        return run(strategy, replace(OFTEN, epochs=2), **twin, **options)

    unbroken = train(directory=directory)
    return differences(train(ckpt_path=f"{directory}/step3.ckpt"), unbroken)


@pytest.mark.slow
def test_pytorch_lightning(tmp_path: Path) -> None:
    assert run_trainer_ranks(of_twin, 2, str(tmp_path)) == [[], []]


# ---- when and what is saved ----


def fit_once(kind: Any, scenario: Scenario, directory: str | None = None, ckpt_path: Any = None) -> Any:
    """What was seen, the steps, and what was said about resuming."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run(kind, scenario, directory, ckpt_path)
    texts = [str(warning.message) for warning in caught]
    known = ("not continued exactly", "resumable", "without the state")
    return result.seen, result.steps, [text for text in texts if any(words in text for words in known)]


class SaveAt(Callback):
    """Saves in the middle of a step."""

    def __init__(self, hook: str, batch: int, path: str) -> None:
        self.hook, self.batch, self.path = hook, batch, path

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.save(trainer, "on_train_batch_start")

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        self.save(trainer, "on_before_backward")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.save(trainer, "on_train_batch_end")

    def save(self, trainer: Any, hook: str) -> None:
        if hook == self.hook and trainer.fit_loop.total_batch_idx == self.batch:
            trainer.save_checkpoint(self.path)


def saved_in_mid_step(directory: str, saves: list[tuple[str, str, int]]) -> list[list[str]]:
    found = []
    for number, (data, hook, batch) in enumerate(saves):
        scenario = Scenario(data, accumulate=2, epochs=2)
        path = f"{directory}/{number}.ckpt"
        callbacks = [SaveAt(hook, batch, path)]
        unbroken = run("smddp", scenario, callbacks=callbacks, enable_checkpointing=False)
        found.append(differences(run("smddp", scenario, ckpt_path=path), unbroken))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "saves",  # an epoch has 4 batches of a map, and 7 of a stream
    [
        [("map", "on_train_batch_start", 5), ("stream", "on_before_backward", 9), ("map", "on_train_batch_end", 4)],
        pytest.param(
            [
                ("stream", "on_train_batch_start", 5),
                ("map", "on_before_backward", 5),
                ("stream", "on_train_batch_end", 8),
            ],
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["each", "more"],
)
def test_in_the_middle_of_a_step_and_of_an_accumulation(saves: Any, tmp_path: Path) -> None:
    """Batches since the last optimizer step are trained again, as no checkpoint has their gradients."""
    assert run_trainer_ranks(saved_in_mid_step, 2, str(tmp_path), saves) == [[[]] * 3] * 2


def loads(directory: str) -> Any:
    unbroken = run("smddp", Scenario(epochs=1), directory)
    loaded = []

    class Counting(Dropping):
        def on_train_end(self) -> None:
            loaded.append(self.trainer.train_dataloader.dataset.loaded)

    resumed = run("smddp", Scenario(epochs=1), ckpt_path=f"{directory}/step5.ckpt", make_model=Counting)
    return differences(resumed, unbroken), loaded


@pytest.mark.slow
def test_skips_without_loading(tmp_path: Path) -> None:
    """Map-style data without workers: only the batches that are trained are loaded."""
    assert run_trainer_ranks(loads, 1, str(tmp_path)) == [([], [2 * 4 - 2])]  # the last of 7 batches has 2 samples


def saved_then_plain(directory: str) -> Any:
    scenario = Scenario(epochs=1)
    fit_once("smddp", scenario, directory)
    return fit_once("auto", scenario, None, f"{directory}/step2.ckpt")


def test_checkpoint_is_plain_and_loads_anywhere(tmp_path: Path) -> None:
    [(_, steps, texts)] = run_trainer_ranks(saved_then_plain, 1, str(tmp_path))
    assert (steps, ["not resumable" in text for text in texts]) == ((7, 1), [True])
    path = tmp_path / "step2.ckpt"
    saved = torch.load(path, weights_only=True)
    assert saved[CHECKPOINT_KEY]["layout"] == {"replicas": 1, "size": 1}
    assert len(saved[CHECKPOINT_KEY]["ranks"]) == 1


@pytest.mark.slow
def test_says_what_a_plain_checkpoint_lacks(tmp_path: Path) -> None:
    run_trainer_ranks(fit_once, 1, "auto", Scenario(epochs=1), str(tmp_path))
    path = str(tmp_path / "step3.ckpt")
    [(_, _, texts)] = run_trainer_ranks(fit_once, 1, "smddp", Scenario(epochs=1), None, path)
    assert "without the state of its data and random numbers" in " ".join(texts)


def with_less_data(directory: str) -> None:
    run("smddp", Scenario("stream", epochs=1), directory)
    with pytest.raises(ValueError, match="saved after 5 batches of an epoch, but the training data has only 3"):
        run("smddp", Scenario("stream", epochs=1, count=10), ckpt_path=f"{directory}/step5.ckpt")


@pytest.mark.slow
def test_data_that_has_shrunk(tmp_path: Path) -> None:
    run_trainer_ranks(with_less_data, 1, str(tmp_path))


# ---- another layout ----


OTHER = Scenario(epochs=2, count=48)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "kind"), [(1, "smddp"), (2, {}), pytest.param(4, "smddp", marks=pytest.mark.exhaustive)], ids=str
)
def test_other_number_of_replicas(ranks: int, kind: Any, of_two: Path) -> None:
    """In the middle of the second epoch: its data begin anew, in another order, and one rank says so."""
    scenario = replace(OTHER, accumulate=4)
    first, *others = run_trainer_ranks(fit_once, ranks, kind, scenario, None, of_two / "step9.ckpt")
    [text] = first[2]
    assert "instead of 2 replicas of 1 rank(s)" in text
    assert "random numbers start anew from the seed" in text
    assert "this epoch's order of samples is another one, so that it may have samples twice or not at all" in text
    assert "the first optimizer step has the gradients of 1 of 4 batches" in text  # 3 were trained
    assert all(texts == [] for _, _, texts in others)
    assert first[1][1] == 2


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of a run of two replicas, with 6 batches in each epoch."""
    directory = tmp_path_factory.mktemp("of two")
    run_trainer_ranks(fit_once, 2, "smddp", OTHER, str(directory))
    return directory


def persistent_and_resumed(directory: str) -> list[Any]:
    """What was seen after the fifth and after the seventh batch, of seven in each epoch, and what was said."""
    scenario = Scenario(workers=2, persistent=True, epochs=2)
    unbroken = run("smddp", scenario, directory)
    found = []
    for step in (5, 7):
        seen, _, texts = fit_once("smddp", scenario, None, f"{directory}/step{step}.ckpt")
        found.append((seen == unbroken.seen[step:], texts))
    return found


@pytest.mark.slow
def test_persistent_workers_that_draw(tmp_path: Path) -> None:
    """The samples are the same; from the second epoch on their augmentations are others, which a warning says."""
    [found] = run_trainer_ranks(persistent_and_resumed, 1, str(tmp_path))
    assert [same for same, _ in found] == [True] * 2
    warned = "random numbers that are drawn in persistent workers, which are started anew"
    assert [[warned in text for text in texts] for _, texts in found] == [[], [True]]


def resumed(old: int, new: int, batches: int, accumulate: int) -> Resumption:
    """On the first of ``new`` replicas, from a checkpoint of ``old`` ones after ``batches`` batches."""
    loader = DataLoader(samples(48), 4)
    state = to_plain(RandomStates(torch.device("cpu")).capture())
    course, facts = Course(count=batches).to_plain(), [facts_of(loader)]
    rank = {"replica": 0, "place": 0, "now": state, "ahead": 0, "cycles": [], "facts": facts, "loaders": [course]}
    saved = {"layout": {"replicas": old, "size": 1}, "ranks": [rank]}
    return resume_at(saved, LayoutRank(0, 0, new, 1), [loader], batches, accumulate)


@pytest.mark.parametrize(
    ("old", "new", "batches", "accumulate", "expected"),
    [
        (2, 4, 3, 2, "the gradients of 1 of 2 batches"),
        (2, 2, 2, 4, "the gradients of 2 of 4 batches"),  # the same layout, and more accumulation
        (2, 4, 4, 2, None),
        (2, 2, 2, 2, None),
        (2, 4, 2, 1, None),
    ],
)
def test_says_which_step_is_a_fraction(old: int, new: int, batches: int, accumulate: int, expected: str | None) -> None:
    said = [text for text in resumed(old, new, batches, accumulate).in_epoch if "optimizer step" in text]
    assert said == ([] if expected is None else [f"the first optimizer step has {expected}"])


@pytest.mark.slow
def test_other_number_of_stages(tmp_path: Path) -> None:
    scenario = Scenario(count=32, epochs=1)
    unbroken = run_trainer_ranks(fit_once, 2, {}, scenario, str(tmp_path))
    resumed = run_trainer_ranks(fit_once, 3, {}, scenario, None, tmp_path / "step5.ckpt")
    assert len(resumed[0][0]) == 3
    assert resumed[0][0] == unbroken[0][0][5:]
    assert "1 replica of 3 rank(s) instead of 1 replica of 2 rank(s)" in resumed[0][2][0]


# ---- parts ----


class WithSources(TensorDataset):
    def __init__(self) -> None:
        super().__init__(*samples(4).tensors)
        self.python, self.numpy = random.Random(1), np.random.RandomState(2)
        self.new, self.old = np.random.default_rng(3), np.random.Generator(np.random.MT19937(4))
        self.torch = torch.Generator().manual_seed(5)

    def draw(self) -> list[float]:
        mine = [self.python.gauss(0, 1), float(self.numpy.randn()), self.new.normal(), self.old.normal()]
        rest = [random.gauss(0, 1), float(np.random.randn()), torch.rand(1).item()]
        return [*mine, torch.rand(1, generator=self.torch).item(), *rest]


def test_random_states_survive_a_checkpoint(tmp_path: Path) -> None:
    data = WithSources()
    states = RandomStates(torch.device("cpu"), [DataLoader(data)])
    data.draw()
    torch.save(unpack(pack(to_plain(states.capture()))), tmp_path / "states")
    expected = data.draw()
    assert data.draw() != expected
    states.restore(from_plain(torch.load(tmp_path / "states", weights_only=True)))
    assert data.draw() == expected


def test_what_earlier_versions_noted_of_workers_is_passed_over() -> None:
    state = to_plain(RandomStates(torch.device("cpu")).capture())
    course = {"count": 3, "begin": 0, "workers": [[0, torch.zeros(9, dtype=torch.uint8)]], "workers_live": True}
    course |= {"workers_now": [], "work_left": True, "exhausted": False, "uncertain": False}
    course |= {"created": state, "first": state, "latest": None}
    facts = [{"batch_size": 4, "workers": 0, "order": {"shuffle": True, "seed": 0, "length": 26}}]
    rank = {"replica": 0, "place": 0, "now": state, "ahead": 0, "cycles": [], "facts": facts, "loaders": [course]}
    saved = {"layout": {"replicas": 1, "size": 1}, "ranks": [rank], "bucket_order": "null"}
    result = resume_at(saved, LayoutRank(0, 0, 1, 1), [DataLoader(samples(26), 4)], 3)
    assert (result.courses[0].count, result.courses[0].workers_live) == (3, True)
    assert result.courses[0].first is not None
    assert result.differs == result.in_epoch == []
    course["begin"] = 8  # it had left samples out, as of another layout
    result = resume_at(saved, LayoutRank(0, 0, 1, 1), [DataLoader(samples(26), 4)], 3)
    assert result.courses[0].count == 0
    assert "samples twice or not at all" in result.in_epoch[0]


def test_seed_all_depends_on_the_facts_alone() -> None:
    before = RandomStates(torch.device("cpu"))
    state = before.capture()
    drawn = []
    for facts in ((1, 2), (1, 2), (1, 3)):
        seed_all(*facts)
        drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
    before.restore(state)
    assert drawn[0] == drawn[1]
    assert all(a != b for a, b in zip(drawn[0], drawn[2], strict=True))


def test_packs_each_tensor_once() -> None:
    tensor = torch.arange(1000, dtype=torch.uint8)
    assert pack({"a": tensor, "b": [tensor.clone(), None, "text", 2**70]}).numel() < 1300


def gathered(group: Any, rank: int | None = None) -> Any:
    return unpack(pack({"rank": group.rank(), "state": torch.full((group.rank(),), 7), "no": None}))


def test_states_keep_their_values() -> None:
    for rank, state in enumerate(run_in_threads(gathered, 2)):
        assert (state["rank"], state["state"].tolist(), state["no"]) == (rank, [7] * rank, None)
    assert gather_states({"alone": 1}, torch.device("cpu")) == [{"alone": 1}]


def gathered_by_world() -> Any:
    return gather_states({"rank": torch.distributed.get_rank()}, torch.device("cpu"))


@pytest.mark.slow
def test_the_first_rank_gets_all_states() -> None:
    """The others need not decode what they do not write."""
    assert run_ranks(gathered_by_world, 2) == [[{"rank": 0}, {"rank": 1}], []]


# ---- stops in the middle of a validation ----


class StopInValidation(Callback):
    """A signal to one rank, at the first batch of the validation behind step ``step``."""

    def __init__(self, step: int, rank: int) -> None:
        self.step, self.rank = step, rank
        self.left = 0

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        if trainer.global_step == self.step and not trainer.sanity_checking:
            self.left = trainer.num_val_batches[0] - batch_idx - 1
            time.sleep(0.08)
            if trainer.global_rank == self.rank and batch_idx == 0:
                os.kill(os.getpid(), signal.SIGTERM)


def stopped_and_resumed(kind: Any, scenario: Scenario, step: int) -> tuple[int, list[str]]:
    """How many batches validation did not come to, and what differs from a run that nobody stopped."""
    unbroken, callback = run(kind, scenario), StopInValidation(step, rank=1)
    with pytest.raises(SIGTERMException):
        run(kind, scenario, callbacks=[callback], enable_checkpointing=False)
    return callback.left, differences(run(kind, scenario, ckpt_path=STOP_CHECKPOINT), unbroken)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "count"),
    [("smddp", 32), ({"split": ["net.3"]}, 16)],
    ids=["smddp", "pipeline"],
)
def test_stops_in_a_validation(kind: Any, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It need not come to its end, and begins anew."""
    monkeypatch.chdir(tmp_path)
    scenario = Scenario(epochs=1, validate=3, count=count, validated=64)
    for left, found in run_trainer_ranks(stopped_and_resumed, 2, kind, scenario, 3):
        assert found == []
        assert left > 1


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
    original = checkpoint_io.write_checkpoint

    def slowly(*args: Any) -> None:
        time.sleep(0.5)
        original(*args)

    def failing(*args: Any) -> None:
        time.sleep(0.2)
        raise OSError(errno.ENOSPC, "No space left on device", str(args[1]))

    found = []
    for name, write in (("slow", slowly), ("failing", failing)):
        checkpoint_io.write_checkpoint = write  # type: ignore[assignment]
        root = f"{directory}/{name}"
        out = Listening(Path(root, STOP_CHECKPOINT))
        strategy = silent(algorithm="native", async_save=True)
        with contextlib.redirect_stdout(out), pytest.raises((SIGTERMException, OSError)) as caught:
            make_trainer(strategy, callbacks=[Stop()], default_root_dir=root).fit(Learner())
        found.append((type(caught.value).__name__, str(caught.value), out.getvalue(), out.there))
    return found


@pytest.mark.slow
def test_a_stop_waits_for_what_is_written_in_the_background(tmp_path: Path) -> None:
    for rank, (slow, failing) in enumerate(run_trainer_ranks(stopped_while_writing, 2, str(tmp_path))):
        assert slow[0] == "SIGTERMException"
        assert slow[3] == [True] * (rank == 0)
        assert failing[0] == "OSError"
        assert "No space left on device" in failing[1]
        assert "saved to" not in failing[2]


def with_links(kind: Any, directory: str, **options: Any) -> str:
    callbacks = [ModelCheckpoint(directory, save_last="link")]
    with pytest.raises(ValueError, match="links are made") as caught:
        make_trainer(kind, callbacks=callbacks, enable_checkpointing=True, **options).fit(Learner())
    return str(caught.value)


@pytest.mark.slow
def test_links_to_files_that_are_not_written_yet(tmp_path: Path) -> None:
    [texts] = run_trainer_ranks(both_with_links, 1, str(tmp_path))
    assert all("ModelCheckpoint(save_last='link')" in text and "save_last=True" in text for text in texts)


def both_with_links(directory: str) -> list[str]:
    return [
        with_links(silent(async_save=True), directory),
        with_links(silent(), directory, plugins=[SafeCheckpointIO(asynchronous=True)]),
        with_links(PipelineStrategy(**grouped(verbose=False, async_save=True)), directory),
    ]
