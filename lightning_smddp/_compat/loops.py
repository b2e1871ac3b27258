"""Private parts of Lightning's loops and torch's loaders that resuming needs, each with its reason and its end.

Written against Lightning 2.6, whose loops have no public face at all: remove each when it gets one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter


@contextmanager
def around_training_data(
    trainer: Any, prepare: Callable[[Any], None], reset: Callable[[], None], begin: Callable[[Any], None]
) -> Iterator[None]:
    """Take part in how a fit gets its data. No hook of strategies or callbacks comes at these three points.

    Args:
        trainer: whose ``fit`` is about to run.
        prepare: called with the ``CombinedLoader``, just before Lightning makes the iterators of a fit's first epoch
            (and again after ``reload_dataloaders_every_n_epochs``).
        reset: called before the loops look at what a checkpoint has told them.
        begin: called with the data fetcher at the begin of an epoch's batches, where Lightning makes iterators for
            every epoch but a fit's first.
    """
    fit_loop = trainer.fit_loop
    epoch_loop = fit_loop.epoch_loop

    def load_states() -> None:
        type(fit_loop)._load_combined_loader_states(fit_loop)
        prepare(fit_loop._combined_loader)

    def reset_loop() -> None:
        reset()
        type(fit_loop).reset(fit_loop)

    def on_run_start(data_fetcher: Any) -> None:
        begin(data_fetcher)
        type(epoch_loop).on_run_start(epoch_loop, data_fetcher)

    # Attributes of the loops hide the methods of their classes, which ours call: they are gone again at the end.
    changes = [
        (fit_loop, "_load_combined_loader_states", load_states),
        (fit_loop, "reset", reset_loop),
        (epoch_loop, "on_run_start", on_run_start),
    ]
    for loop, name, function in changes:
        setattr(loop, name, function)
    try:
        yield
    finally:
        for loop, name, _ in changes:
            vars(loop).pop(name, None)


@contextmanager
def around_validation(trainer: Any, begin: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
    """Call ``begin`` before validation inside of fit makes its iterators, and ``end`` when its batches are over.

    An exception in between leaves ``end`` out.
    """
    val_loop = trainer.fit_loop.epoch_loop.val_loop

    def run() -> Any:
        if not trainer.sanity_checking:
            begin()
        found = type(val_loop).run(val_loop)
        end()
        return found

    def on_run_end() -> Any:
        end()
        return type(val_loop).on_run_end(val_loop)

    val_loop.run = run
    val_loop.on_run_end = on_run_end  # the last part of `run`, with the hooks that follow the batches
    try:
        yield
    finally:
        vars(val_loop).pop("run", None)
        vars(val_loop).pop("on_run_end", None)


@contextmanager
def around_resume_start(trainer: Any, choose: Callable[[Any], Any]) -> Iterator[None]:
    """Let ``choose`` replace the path of the checkpoint that a fit starts from (None: from none).

    Lightning decides before the process group is up, and without a look at whether the file is valid.
    """
    connector = trainer._checkpoint_connector

    def resume_start(checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        chosen = choose(checkpoint_path)
        type(connector).resume_start(connector, chosen, *args, **kwargs)

    connector.resume_start = resume_start
    try:
        yield
    finally:
        vars(connector).pop("resume_start", None)


def requeue_checkpoint(trainer: Any) -> str | None:
    """The newest file that Lightning wrote when Slurm requeued the job, which it resumes from unasked."""
    path: str | None = trainer._checkpoint_connector._hpc_resume_path
    return path


def iterate_over(combined_loader: Any, loaders: list[Any]) -> None:
    """Let ``combined_loader`` iterate over ``loaders``, and show its own to users as ever.

    Its public setter changes both.
    """
    combined_loader._flattened = loaders


def cycles(combined_loader: Any) -> list[bool]:
    """For each loader of mode ``"max_size_cycle"`` whether it has begun anew in this epoch; else an empty list."""
    consumed = getattr(combined_loader._iterator, "_consumed", [])
    return [bool(has_ended) for has_ended in consumed]


def set_cycles(combined_loader: Any, consumed: list[bool]) -> None:
    """Set which loaders of a ``CombinedLoader`` have come to their end, as :func:`cycles` gave them."""
    if consumed and hasattr(combined_loader._iterator, "_consumed"):
        combined_loader._iterator._consumed = list(consumed)


def skips_indices(loader: Any, iterator: Any) -> bool:
    """Whether batches of ``iterator`` can be left out by their indices alone, without loading them."""
    if not isinstance(loader, DataLoader) or not isinstance(iterator, _SingleProcessDataLoaderIter):
        return False
    return bool(loader._dataset_kind == _DatasetKind.Map)


def skip_indices(iterator: Any) -> None:
    """Leave one batch out; see :func:`skips_indices`. Raises ``StopIteration``."""
    iterator._next_index()


def fetched_ahead(trainer: Any) -> int:
    """Batches that were fetched, but have not begun to be trained: one, where loaders have no length."""
    if steps_fetch(trainer):
        return 0
    fetched = int(trainer.fit_loop._data_fetcher.fetched)
    return fetched - begun_batches(trainer)


def steps_fetch(trainer: Any) -> bool:
    """Whether the step takes ``dataloader_iter``, and so fetches what it likes."""
    return hasattr(trainer.fit_loop._data_fetcher, "iterator_wrapper")


def begun_batches(trainer: Any) -> int:
    """The batches of this epoch whose training has begun."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.ready)


def trained_batches(trainer: Any) -> int:
    """The batches of this epoch that count as trained after a restart.

    The loops' ``reset_on_restart`` sets them back to what was completed, where a batch that lacks nothing but the end
    of ``on_train_batch_end`` counts as completed.
    """
    now = trainer.fit_loop.epoch_loop.batch_progress.current
    if now.processed == now.ready:
        return int(now.processed)
    return int(now.completed)


def set_back(checkpoint: dict[str, Any], trained: int) -> None:
    """Let Lightning go on from ``checkpoint`` after ``trained`` batches of its epoch, which are fewer than it has."""
    # Two sets of counters, of this epoch ("current") and of the run ("total"), each with the names "ready", "started",
    # "processed" and "completed". Between two batches the four of a set are equal.
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    total, current = progress["total"], progress["current"]
    in_earlier_epochs = total["ready"] - current["ready"]
    progress["total"] = dict.fromkeys(total, in_earlier_epochs + trained)
    progress["current"] = dict.fromkeys(current, trained)
    progress["is_last_batch"] = False


def validated_batches(trainer: Any) -> dict[str, Any]:
    """Lightning's counters of validation batches, as checkpoints have them."""
    counts: dict[str, Any] = trainer.fit_loop.epoch_loop.val_loop.batch_progress.state_dict()
    return copy.deepcopy(counts)


def set_before_validation(checkpoint: dict[str, Any], validated: dict[str, Any], in_step: bool) -> None:
    """Let Lightning go on from ``checkpoint``, saved during a validation, with the begin of that validation.

    Args:
        checkpoint: as Lightning made it.
        validated: :func:`validated_batches` of that begin.
        in_step: whether :func:`set_back` has put it before the validation's batch already.
    """
    loops = checkpoint["loops"]["fit_loop"]
    loops["epoch_loop.val_loop.batch_progress"] = validated
    # Of the batch that validation follows, nothing but its end is missing then: so a checkpoint of
    # `on_train_batch_end` looks, and `RestartPoint` begins the validation behind it.
    if not in_step:
        for counts in ("total", "current"):
            loops["epoch_loop.batch_progress"][counts]["completed"] -= 1


def is_restarted(trainer: Any) -> bool:
    """Whether a fit goes on from a checkpoint; until its first epoch ends."""
    return bool(trainer.fit_loop._loaded_from_state_dict)


def continues_epoch(trainer: Any) -> bool:
    """Whether it goes on in the middle of an epoch."""
    return bool(trainer.fit_loop.epoch_loop.restarting)


def trained_last_batch(trainer: Any) -> bool:
    """Whether the latest batch was its epoch's last, in this run or in the one that a checkpoint is from."""
    return bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)


def epoch_has_ended(trainer: Any) -> bool:
    """Whether no batch of this epoch is left."""
    if trained_last_batch(trainer):
        return True
    return bool(begun_batches(trainer) >= trainer.num_training_batches)


class RestartPoint:
    """Corrects where Lightning's loops go on from a checkpoint. Remove when they lose nothing.

    A checkpoint of ``on_train_batch_end`` that precedes a validation, or the epoch's end: Lightning leaves out both. A
    checkpoint of an epoch's end with ``max_steps``: it trains the epoch a second time.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._validates = self._ends = False

    def reset(self) -> None:
        """Before Lightning looks at its counters."""
        fit_loop = self._trainer.fit_loop
        epoch_loop = fit_loop.epoch_loop
        if _lacks_end(fit_loop.epoch_progress.total):
            fit_loop._restarting = epoch_loop.restarting = False
        elif fit_loop.restarting and _lacks_end(epoch_loop.batch_progress.total):
            self._finish_batch(epoch_loop)

    def _finish_batch(self, epoch_loop: Any) -> None:
        """Let the batch be one that validation, or nothing, has followed."""
        data_fetcher = self._trainer.fit_loop._data_fetcher
        self._validates = epoch_loop._should_check_val_fx(data_fetcher)
        self._ends = not self._validates and epoch_has_ended(self._trainer)
        if self._validates or self._ends:
            epoch_loop.batch_progress.increment_completed()
        # Lightning counts a batch that stepped behind its last hook, and the checkpoint was saved in that hook.
        if self._ends and not epoch_loop._should_accumulate():
            epoch_loop._batches_that_stepped += 1

    def begin(self) -> None:
        """Before the epoch's first batch, behind :meth:`reset`: undo in the loops what would leave out a validation."""
        epoch_loop = self._trainer.fit_loop.epoch_loop
        if self._validates:
            epoch_loop.val_loop.restarting = False  # it begins at its first batch
            epoch_loop.val_loop._restart_stage = "restarted_mid_evaluation"  # but it does begin
        if self._ends:
            epoch_loop._restarting = False
        self._validates = self._ends = False


def _lacks_end(counts: Any) -> bool:
    """Whether a checkpoint is from the last hook of an epoch or batch: it is processed, and not completed."""
    return bool(counts.ready == counts.started == counts.processed == counts.completed + 1)
