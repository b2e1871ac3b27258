"""A resumed run that goes on as if it had never stopped: the same samples and random numbers, to the bit.

Lightning saves the state of loaders that have one: ours (``resumable_loader.py``), and those of the user's that have
their own. It would write the first rank's alone. So every rank's are gathered, with the random numbers of now, under
one key of the checkpoint, and each rank gets its own back before Lightning looks. See ``docs/checkpoints.md``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_smddp._compat.trainer import begin_next_epoch, end_epoch, finish_batch, make_iterators, training_loaders
from lightning_smddp.communication.objects import gather
from lightning_smddp.resume.auto_resume import continuing
from lightning_smddp.resume.resumable_loader import RandomStates, ResumableLoader, warn_of_repetition

CHECKPOINT_KEY = "smddp_resume"
_VERSION = 2
# Lightning's counters in a checkpoint: of epochs, of an epoch's batches, and of those of a validation in it. They count
# what is ready, started, processed, and completed, which is behind its last hook.
_EPOCHS = "epoch_progress"
_BATCHES = "epoch_loop.batch_progress"
_VALIDATED = "epoch_loop.val_loop.batch_progress"


class ExactResume:
    """One run's part in checkpoints. A strategy calls the public methods where hooks come."""

    def __init__(self) -> None:
        self._trainer: Any = None
        self._states: RandomStates  # from `begin` on: generators do not travel to ranks that are spawned
        self._epoch = -1  # in which the loaders were made
        self._saved: Mapping[str, Any] = {}
        self._is_waiting = False  # a checkpoint is loaded, and training has not started
        self._corrections: list[Callable[[Any], None]] = []  # of Lightning's loops, when training starts

    def begin(self, trainer: Any, device: torch.device, resume: str | None) -> None:
        """All ranks are connected, and no checkpoint is loaded yet. ``resume`` is the strategy's option."""
        ExactResume.__init__(self)
        self._trainer = trainer
        self._states = RandomStates(device)
        if resume == "auto" and trainer.state.fn == "fit":
            continuing(trainer)

    def process(self, loader: Any, make: Callable[[Any, RandomStates], Any] | None = None) -> Any:
        """What Lightning is given for a loader of the user's: what has no state gets one. ``make`` makes it for all."""
        trainer = self._trainer
        has_state = isinstance(loader, ResumableLoader) or (make is None and hasattr(loader, "load_state_dict"))
        if trainer is None or not trainer.training or has_state:
            return loader
        if self._epoch != trainer.current_epoch:  # with `reload_dataloaders_every_n_epochs`, others than before
            self._epoch = trainer.current_epoch
            self._states.of_loaders.clear()
        self._states.look_into(loader)
        return (make or ResumableLoader)(loader, self._states)

    def close(self) -> None:
        """The run is over: Lightning has the user's own loaders again, which may be in a collection of the user's."""
        if self._is_waiting and not self._trainer.interrupted:
            rank_zero_info("The checkpoint's run had ended: there was nothing to train. Raise max_epochs or max_steps.")
        combined = self._trainer and training_loaders(self._trainer)
        if combined is not None:
            loaders = combined.flattened
            combined.flattened = [each.loader if isinstance(each, ResumableLoader) else each for each in loaders]

    # ---- saving ----

    def add_to(self, checkpoint: dict[str, Any], decisions: Mapping[str, Any]) -> None:
        """Add what resuming needs, and the strategy's ``decisions`` (anything that JSON carries). Collective.

        Only the first rank's ``checkpoint`` gets it. Nothing is added to checkpoints of weights alone, nor after an
        exception, when other ranks may be gone.
        """
        loaders = self._take_out(checkpoint)
        trainer, loops = self._trainer, checkpoint["loops"]["fit_loop"]
        if trainer is None or trainer.interrupted or "optimizer_states" not in checkpoint:
            return
        self._set_back([state for state in loaders if "created" in state], loops[_BATCHES])
        ranks = gather({"now": self._states.capture(), "loaders": loaders if _has_rest(loops) else []})
        if trainer.global_rank == 0:
            checkpoint[CHECKPOINT_KEY] = {
                "version": _VERSION,
                "layout": self._layout,
                "in_validation": trainer.validating and not _is_over(loops[_VALIDATED]),
                "decisions": json.dumps(dict(decisions)),
                "ranks": ranks,
            }

    def _take_out(self, checkpoint: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The states of this rank's loaders. A Trainer with another strategy takes those of its own loaders alone."""
        state = checkpoint["loops"]["fit_loop"]["state_dict"]
        loaders: list[dict[str, Any]] = state.get("combined_loader", [])
        if any("created" in loader for loader in loaders):
            del state["combined_loader"]
        return loaders

    def _set_back(self, states: Sequence[dict[str, Any]], batches: Mapping[str, Any]) -> None:
        """To the batches that are trained: one more is fetched in mid-step, and where loaders have no length."""
        fetched = max((state["count"] for state in states), default=0)
        done = _done(batches["current"])
        for state in states:
            behind = min(state["count"], done) if state.get("ended") else state["count"] - fetched + done
            state["count"] = max(0, behind)
            if self._trainer.num_training_batches != float("inf"):
                state["latest"] = None

    @property
    def _layout(self) -> list[Any]:
        """What has to be equal for an exact continuation."""
        trainer = self._trainer
        replicas = trainer.distributed_sampler_kwargs["num_replicas"]
        return [trainer.world_size, replicas, trainer.strategy.root_device.type]

    # ---- resuming ----

    def take(self, checkpoint: Mapping[str, Any]) -> None:
        """A checkpoint is loaded: if a fit starts from it, its loops get what is this rank's."""
        trainer, states = self._trainer, self._states
        loops = checkpoint.get("loops", {}).get("fit_loop", {})
        if trainer is None or trainer.state.fn != "fit" or _VALIDATED not in loops:
            return
        self._is_waiting = True
        saved = checkpoint.get(CHECKPOINT_KEY, {})
        layout = saved["layout"] if saved.get("version") == _VERSION else "not known"
        if layout == self._layout:
            self._saved = saved
            own = saved["ranks"][trainer.global_rank]
            states.pending = own["now"]
            loops["state_dict"]["combined_loader"] = own["loaders"]
        self._correct(loops)
        begun = loops[_BATCHES]["current"]["completed"] % trainer.accumulate_grad_batches
        if _has_rest(loops) and begun:  # Lightning steps after each multiple of it, and divides by it
            batches = f"{trainer.accumulate_grad_batches - begun} of {trainer.accumulate_grad_batches} batches"
            rank_zero_warn(f"The run is not continued exactly: its first step has the gradients of {batches}.")
        if _has_rest(loops) and "combined_loader" not in loops["state_dict"]:
            warn_of_repetition(f"ranks, replicas, device are {self._layout}, those of the checkpoint's data {layout}")

    def _correct(self, loops: Mapping[str, Any]) -> None:
        """Let nothing in Lightning's counters be half done, and note what it would do wrong all the same."""
        batches = loops[_BATCHES]
        counts = batches["current"]
        if self._saved.get("in_validation") or counts["completed"] < counts["processed"] == counts["ready"]:
            self._corrections = [finish_batch]
        batches["is_last_batch"] = _is_over(batches)
        if not _is_in_epoch(loops):
            self._corrections = [begin_next_epoch]
            _settle(loops[_EPOCHS])
        if _is_in_epoch(loops) and batches["is_last_batch"]:
            self._corrections.append(end_epoch)
        elif self._states.pending is not None:
            self._corrections.append(make_iterators)
        _settle(batches)
        _settle(loops[_VALIDATED])

    def saved(self, key: str) -> Any:
        """What :meth:`add_to` got as ``decisions[key]``, if this run has the layout of that one; else None."""
        return json.loads(self._saved.get("decisions", "{}")).get(key)

    def on_train_start(self) -> None:
        """Put random numbers back, before the first hook of an epoch."""
        states, corrections = self._states, self._corrections
        self._corrections, self._is_waiting = [], False
        if states.pending is not None:
            states.restore(states.pending)
            states.pending = None
        for correct in corrections:
            correct(self._trainer)


def _is_in_epoch(loops: Mapping[str, Any]) -> bool:
    epochs = loops[_EPOCHS]["current"]
    return bool(epochs["started"] > epochs["processed"])


def _is_over(batches: Mapping[str, Any]) -> bool:
    """Whether no batch is at work, and none follows."""
    return bool(batches["is_last_batch"] and batches["current"]["processed"] == batches["current"]["ready"])


def _has_rest(loops: Mapping[str, Any]) -> bool:
    """Whether batches of a begun epoch are to be trained."""
    return _is_in_epoch(loops) and not _is_over(loops[_BATCHES])


def _done(counts: Mapping[str, int]) -> int:
    """The last hook of a batch or epoch counts as behind it; all before that comes again."""
    return counts["processed" if counts["processed"] == counts["ready"] else "completed"]


def _settle(progress: Mapping[str, Any]) -> None:
    for counts in (progress["total"], progress["current"]):
        counts.update(dict.fromkeys(counts, _done(counts)))
