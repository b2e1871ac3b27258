"""Checkpoints of the Trainer strategies: written so that a valid one always exists, checked before they are used.

The way of ``trainer.save_checkpoint(path)``:

1. Lightning collects the checkpoint on every rank; a pipeline gathers its parts on the first rank
   (``pipeline/state/state_dict.py``, ``optimizer.py``), or with ``sharded`` gives each rank its own. The state of
   optimizers whose work ranks share is put together by ``sharding/optimizer_states.py``.
2. ``TrainerStrategy.save_checkpoint`` adds what an exact resume and compression need, and calls :meth:`Saving.save`.
3. A plain file is written by the first rank: Lightning's ``save_checkpoint``, ``SafeFiles`` (``checkpoint_io.py``; in a
   thread with ``async_save``), ``checkpoint/locations.py`` (path or URL), ``checkpoint/files.py`` (beside its place,
   verified, renamed).
   With ``sharded`` every rank writes to a directory: ``checkpoint/sharded.py``, by the same rules.

On resume Lightning calls ``load_checkpoint``, which takes either by what is there (:meth:`Saving.load`), then
``load_model_state_dict`` and ``load_optimizer_state_dict``. A checkpoint always has the names of the whole module, so
a pipeline's rank takes its own part of it (``bridge/partitioned_module.py``: at once, or when the stages are known).
Which checkpoint it is with ``resume="auto"`` is found by ``resume/auto_resume.py`` before; samples and random numbers
are put back by ``resume/exact_resume.py`` behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lightning_smddp.checkpoint.compatibility import (
    OptimizerOutline,
    check_compatibility,
    compare_optimizers,
    require_none,
)
from lightning_smddp.checkpoint.files import remove_directory
from lightning_smddp.checkpoint.parts import names_of
from lightning_smddp.checkpoint.ranks import Ranks
from lightning_smddp.checkpoint.sharded import has_manifest, is_sharded, load_sharded, local_path, save_sharded
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

    def require_no_links(self, trainer: Any) -> None:
        """Raise ``ValueError`` if a checkpoint callback would link to files that are not written yet."""
        for callback in trainer.checkpoint_callbacks:
            if getattr(callback, "save_last", None) != "link":
                continue
            if self._has_safe_files and self.strategy.checkpoint_io.asynchronous:
                raise ValueError(
                    f"{type(callback).__name__}(save_last='link') cannot be used with async_save=True: links are made "
                    "before the file that they point to is written. Use save_last=True, or async_save=False."
                )

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
        self.ranks.first(self._settle)

    def _settle(self) -> None:
        if self._has_safe_files:
            self.strategy.checkpoint_io.teardown()

    @property
    def ranks(self) -> Ranks:
        """Those that save and load together: all, or this one alone after an exception, when others may be gone."""
        group = None
        if dist.is_initialized() and not self.strategy._interrupted:
            group = dist.group.WORLD
        return Ranks(group, self.strategy.root_device)

    # ---- files and directories ----

    def save(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any, save: Callable[..., None]) -> None:
        """Save, by Lightning's ``save`` on the first rank or this rank's part. Errors are raised on every rank.

        Raises:
            OSError, ValueError: see :func:`~lightning_smddp.checkpoint.sharded.save_sharded`.
            TypeError: ``storage_options`` were given with ``sharded``.
        """
        strategy = self.strategy
        if not strategy._reliability.sharded:
            self.ranks.first(partial(save, checkpoint, filepath, storage_options))
            return
        if storage_options is not None:
            raise TypeError(f"storage_options={storage_options!r} cannot be used with sharded=True: it takes no URLs.")
        if strategy._interrupted and not strategy.is_global_zero:
            return
        module = strategy.lightning_module
        assert module is not None
        # The parameters of each optimizer, in the order in which its state numbers them.
        optimized = []
        if "optimizer_states" in checkpoint:
            for optimizer in strategy.optimizers:
                plain = unwrapped(optimizer)
                optimized.append(strategy._optimized(plain))
        # Each rank writes what it holds, and of what several hold the first one of them. The order of names is that of
        # the whole module, which the first rank knows.
        own_part = None
        if strategy._has_part_to_save:
            own_part = checkpoint
        keys: Sequence[str] = ()
        if strategy.is_global_zero:
            keys = list(module.state_dict(keep_vars=True))
        save_sharded(own_part, filepath, names_of(module, optimized), keys, self.ranks)

    def load(self, path: Any, weights_only: bool | None, load: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        """What a Trainer has saved, in whatever layout: a file by Lightning's ``load``. Collective for directories."""
        verified = self.strategy.verified_checkpoint
        self.strategy.verified_checkpoint = None  # it may be another one by the next time
        if self._is_ours(path):
            loaded = load_sharded(path, self.ranks, weights_only, verify=str(path) != verified)
        else:
            loaded = load(path, weights_only=weights_only)
        require_trainers(loaded, path)
        self.loaded_from = path
        return loaded

    def remove(self, path: Any, remove: Callable[[Any], None]) -> None:
        """Remove a directory, or a file by Lightning's ``remove``."""
        if not self._is_ours(path):
            remove(path)
        elif self.strategy.is_global_zero:
            remove_directory(local_path(path))

    def _is_ours(self, path: Any) -> bool:
        """Whether there is a directory that is not for a CheckpointIO of the user's own."""
        return is_sharded(path) and (self._has_safe_files or has_manifest(path))

    # ---- what is loaded ----

    def require_fitting_model(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Raise ``CheckpointError`` if names or shapes differ from the module's, before anything is changed."""
        assert self.strategy.lightning_module is not None
        check_compatibility(checkpoint, self.strategy.lightning_module, (), strict, self.source)

    def require_fitting_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Raise ``CheckpointError`` if the optimizers, which hold all parameters, are others than the checkpoint's."""
        outlines = []
        for optimizer in self.strategy.optimizers:
            plain = unwrapped(optimizer)
            outlines.append(OptimizerOutline.of(plain))
        differences = compare_optimizers(outlines, checkpoint["optimizer_states"])
        require_none(differences, self.source)

    @property
    def source(self) -> str:
        """Path of the checkpoint that is loaded, or words for it, for messages."""
        return str(self.loaded_from or "the checkpoint")


def _wraps_another(io: Any) -> bool:
    """Whether it is one such as Lightning's ``AsyncCheckpointIO``."""
    return any(cls.__name__ == "_WrappingCheckpointIO" for cls in type(io).__mro__)
