"""Checkpoints of both Trainer strategies: written so that a valid one always exists, checked before they are used."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist

from lightning_smddp.checkpoint.fits import OptimizerOutline, check_fits, compare_optimizers, require_none
from lightning_smddp.checkpoint.ranks import Ranks
from lightning_smddp.strategies.checkpoint_io import require_trainers
from lightning_smddp.strategies.reliability import ReliabilityOptions

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object


class Saving(_Base):
    """Saves and loads by :class:`~lightning_smddp.strategies.checkpoint_io.SafeFiles`, unless the user gave another."""

    _reliability: ReliabilityOptions
    _safe_files: type[Any]
    _loaded_from: Any = None  # the path of the last checkpoint
    verified_checkpoint: str | None = None  # a path: what is loaded next from there need not be verified again

    @property
    def checkpoint_io(self) -> Any:
        """The user's, or ours."""
        given: Any = self._checkpoint_io
        if given is None:
            self._checkpoint_io = given = self._make_checkpoint_io()
        elif _wraps_another(given) and given.checkpoint_io is None:
            given.checkpoint_io = self._make_checkpoint_io()
        return given

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        self._checkpoint_io = io

    def _make_checkpoint_io(self) -> Any:
        return self._safe_files(asynchronous=self._reliability.async_save)

    @property
    def _has_safe_files(self) -> bool:
        """Whether the CheckpointIO is ours."""
        return isinstance(self.checkpoint_io, self._safe_files)

    def require_no_links(self, trainer: Any) -> None:
        """Raise ``ValueError`` if a checkpoint callback would link to files that are not written yet."""
        linking = [c for c in trainer.checkpoint_callbacks if getattr(c, "save_last", None) == "link"]
        if linking and self._has_safe_files and self.checkpoint_io.asynchronous:
            raise ValueError(
                f"{type(linking[0]).__name__}(save_last='link') cannot be used with async_save=True: links are made "
                "before the file that they point to is written. Use save_last=True, or async_save=False."
            )

    @property
    def _ranks(self) -> Ranks:
        """Those that save and load together: all, or this one alone after an exception, when others may be gone."""
        together = dist.is_initialized() and not cast(Any, self)._interrupted()
        return Ranks(dist.group.WORLD if together else None, self.root_device)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save on the first rank. Its error is raised on every rank."""
        self._ranks.first(partial(super().save_checkpoint, checkpoint, filepath, storage_options))

    def finish_saving(self) -> None:
        """Wait for what is written in the background. Its error is raised on every rank. Collective."""
        self._ranks.first(self._settle)

    def _settle(self) -> None:
        if self._has_safe_files:
            self.checkpoint_io.teardown()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Raise what ended a save in the background."""
        if getattr(self._checkpoint_io, "failure", None) is not None:
            self.checkpoint_io.raise_failure()
        super().on_train_batch_start(batch, batch_idx)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load what a Trainer has saved."""
        loaded = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        require_trainers(loaded, checkpoint_path)
        self._loaded_from = checkpoint_path
        return loaded

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the module's state, after a look at whether it fits."""
        self.require_fitting_model(checkpoint, strict)
        super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' states, after a look at whether they fit."""
        self.require_fitting_optimizers(checkpoint)
        super().load_optimizer_state_dict(checkpoint)

    def require_fitting_model(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Raise ``CheckpointError`` if names or shapes differ from the module's, before anything is changed."""
        assert self.lightning_module is not None
        check_fits(checkpoint, self.lightning_module, (), strict, self._source)

    def require_fitting_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Raise ``CheckpointError`` if the optimizers, which hold all parameters, are others than the checkpoint's."""
        outlines = [OptimizerOutline.of(getattr(o, "optimizer", o)) for o in self.optimizers]
        require_none(compare_optimizers(outlines, checkpoint["optimizer_states"]), self._source)

    @property
    def _source(self) -> str:
        return str(self._loaded_from or "the checkpoint")


def _wraps_another(io: Any) -> bool:
    """Whether it is one such as Lightning's ``AsyncCheckpointIO``."""
    return any(cls.__name__ == "_WrappingCheckpointIO" for cls in type(io).__mro__)
