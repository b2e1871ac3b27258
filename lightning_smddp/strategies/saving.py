"""Checkpoints of the Trainer strategies: written so that a whole one always exists.

The way of ``trainer.save_checkpoint(path)``:

1. Lightning collects the checkpoint on every rank; a pipeline gathers its parts on the first rank
   (``pipeline/state/state_dict.py``, ``optimizer.py``), or with ``sharded`` gives each rank its own. The state of
   optimizers whose work ranks share is put together by ``sharding/optimizer_states.py``.
2. ``TrainerStrategy.save_checkpoint`` adds what an exact resume and compression need, and calls :meth:`Saving.save`.
3. A plain file is written by the first rank: the CheckpointIO, ``SafeFiles`` (``checkpoint_io.py``; in a
   thread with ``async_save``), ``checkpoint/files.py``. With ``sharded`` every rank writes to a directory:
   ``checkpoint/sharded.py``, by ``torch.distributed.checkpoint``.

On resume Lightning calls ``load_checkpoint``, which takes either by what is there (:meth:`Saving.load`), then
``load_model_state_dict`` and ``load_optimizer_state_dict``. A checkpoint always has the names of the whole module, so
a pipeline's rank takes its own part of it (``bridge/partitioned_module.py``: at once, or when the stages are known); of
a directory no more is read (``checkpoint/stored.py``). Which checkpoint it is with ``resume="auto"`` is found by
``resume/auto_resume.py`` before; samples and random numbers are put back by ``resume/exact_resume.py`` behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lightning_smddp.checkpoint import files, sharded
from lightning_smddp.checkpoint.errors import CheckpointError
from lightning_smddp.checkpoint.parts import names_of
from lightning_smddp.communication.objects import first
from lightning_smddp.sharding.optimizer_shards import unwrapped
from lightning_smddp.strategies.checkpoint_io import require_trainers

if TYPE_CHECKING:
    from lightning_smddp.strategies.base import TrainerStrategy


class Saving:
    """Saves and loads by :class:`~lightning_smddp.strategies.checkpoint_io.SafeFiles`, unless the user gave another.

    With ``sharded``, each rank saves and loads its own part of a checkpoint, which is a directory: the strategy gives
    Lightning this rank's part of the module's and the optimizers' states, a checkpoint as ever with less in it. Hooks
    of the user's see such a part, on every rank. Directories are loaded with and without it.

    Attributes:
        loaded_from: the path of the last checkpoint that was loaded.
    """

    def __init__(self, strategy: TrainerStrategy) -> None:
        self.strategy = strategy
        self.loaded_from: Any = None

    # ---- the CheckpointIO ----

    def choose_io(self, given: Any) -> Any:
        """The user's CheckpointIO, with ours in it if it wraps another; ours if ``given`` is None."""
        if given is None:
            return self._make_io()
        if _wraps_another(given) and given.checkpoint_io is None:
            given.checkpoint_io = self._make_io()
        return given

    def _make_io(self) -> Any:
        return self.strategy._safe_files(asynchronous=self.strategy._reliability.async_save)

    @property
    def _has_safe_files(self) -> bool:
        """Whether the CheckpointIO is ours, which can be asked to finish; the user's own may do as it likes."""
        return isinstance(self.strategy.checkpoint_io, self.strategy._safe_files)

    def raise_failure(self) -> None:
        """Raise what ended a save in the background."""
        io: Any = self.strategy._checkpoint_io
        if getattr(io, "failure", None) is not None:
            io.raise_failure()

    def afterwards(self, action: Callable[[], None]) -> None:
        """Call ``action`` when what was saved last is complete: at once, unless it is written in the background."""
        if self._has_safe_files:
            self.strategy.checkpoint_io.afterwards(action)
        else:
            action()

    def finish(self) -> None:
        """Wait for what is written in the background. Its error is raised on every rank. Collective."""
        if self._has_safe_files:
            self.on_first(self.strategy.checkpoint_io.teardown)

    def on_first(self, act: Callable[[], None]) -> None:
        """Call ``act`` on the first rank, and raise its error on all. Collective, but behind an exception.

        Then other ranks may be gone.
        """
        if not self.strategy._interrupted:
            first(act)
        elif self.strategy.is_global_zero:
            act()

    # ---- files and directories ----

    def save(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        """Save, by the CheckpointIO on the first rank or this rank's part. Errors are raised on every rank.

        Raises:
            OSError, ValueError: see :func:`lightning_smddp.checkpoint.sharded.save`.
            TypeError: ``storage_options`` were given with ``sharded``.
        """
        strategy = self.strategy
        # Behind an exception only those strategies save of which the first rank has all.
        if not strategy._reliability.sharded or strategy._interrupted:
            write = strategy.checkpoint_io.save_checkpoint
            self.on_first(partial(write, checkpoint, filepath, storage_options=storage_options))
            return
        if storage_options is not None:
            raise TypeError(f"storage_options={storage_options!r} cannot be used with sharded=True: it takes no URLs.")
        module = strategy.lightning_module
        assert module is not None
        # The parameters of each optimizer, in the order in which its state numbers them.
        optimizers = strategy.optimizers if "optimizer_states" in checkpoint else []
        optimized = [strategy._optimized(unwrapped(optimizer)) for optimizer in optimizers]
        own_part = checkpoint if strategy._has_part_to_save else None
        order = list(module.state_dict(keep_vars=True)) if strategy.is_global_zero else ()
        sharded.save(own_part, filepath, names_of(module, optimized), order=order)

    def load(self, path: Any, weights_only: bool | None) -> dict[str, Any]:
        """What a Trainer has saved, in whatever layout: a file by the CheckpointIO."""
        if self._is_ours(path):
            loaded = sharded.load(path, weights_only)
        else:
            torch.cuda.empty_cache()  # as Lightning does
            loaded = self.strategy.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        require_trainers(loaded, path)
        self.loaded_from = path
        return loaded

    def remove(self, path: Any) -> None:
        """Remove a directory, or a file by the CheckpointIO, on the first rank."""
        if not self.strategy.is_global_zero:
            return
        if self._is_ours(path):
            files.remove(path)
        else:
            self.strategy.checkpoint_io.remove_checkpoint(path)

    def _is_ours(self, path: Any) -> bool:
        """Whether there is a directory that is not for a CheckpointIO of the user's own."""
        return sharded.is_sharded(path) and (self._has_safe_files or sharded.is_ours(path))

    def require_as_many_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Raise ``CheckpointError`` where Lightning would leave out what is too much."""
        saved, ours = len(checkpoint["optimizer_states"]), len(self.strategy.optimizers)
        if saved != ours:
            path = self.loaded_from or "the checkpoint"
            raise CheckpointError(path, f"has {saved} optimizers, the model has {ours}", "Build the same ones.")


def _wraps_another(io: Any) -> bool:
    """Whether it is one such as Lightning's ``AsyncCheckpointIO``."""
    return any(cls.__name__ == "_WrappingCheckpointIO" for cls in type(io).__mro__)
