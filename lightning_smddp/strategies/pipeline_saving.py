"""Checkpoints of a pipeline: each rank has a part of the module and of the optimizers' states."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, cast

from torch.optim import Optimizer

from lightning_smddp.pipeline.full_state import load_full_state_dict
from lightning_smddp.strategies.exact_resume import ExactResume
from lightning_smddp.strategies.sharded import ShardedSaving
from lightning_smddp.strategies.staged_module import StagedModule


class PipelineSaving(ShardedSaving):
    """Saves and loads checkpoints of the whole module."""

    _exact_resume: ExactResume
    _staged: StagedModule | None
    _ended: StagedModule | None
    _restored: Mapping[str, Any] | None  # a checkpoint's weights, until setup

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Lightning restores before setup, into the whole module."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole module's state, on global rank 0; with ``sharded`` of each rank what it holds. Collective."""
        gather = not self._reliability.sharded
        return {} if cast(Any, self)._interrupted() else self._last_staged().state_dict(gather)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load a checkpoint of the whole module; what has no memory yet gets its values when it does."""
        self.require_fitting_model(checkpoint, strict)
        if self._staged is not None:
            self._staged.load_state_dict(checkpoint["state_dict"], strict)
            return
        module = self.lightning_module
        assert module is not None
        load_full_state_dict(module, checkpoint["state_dict"], strict)
        self._restored = checkpoint["state_dict"] if any(p.is_meta for p in module.parameters()) else None

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole optimizer's state, on global rank 0; with ``sharded`` of each rank its part. Collective."""
        gather = not self._reliability.sharded
        return {} if cast(Any, self)._interrupted() else self._last_staged().optimizer_state(optimizer, gather)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer states of the whole module, and what it takes to go on exactly."""
        if self._require_staged().divided is None:
            self.require_fitting_optimizers(checkpoint)
        self._exact_resume.take(checkpoint)
        self._require_staged().known_division = self._exact_resume.saved("division")
        self._require_staged().load_optimizer_states(checkpoint["optimizer_states"])

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save, with what it takes to go on exactly."""
        if cast(Any, self)._interrupted():
            self._say_not_saved(filepath)
            return
        self._exact_resume.add_to(checkpoint, {"division": self._last_staged().division_decision()})
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _say_not_saved(self, filepath: Any) -> None:
        if self.is_global_zero:
            warnings.warn(
                f"{filepath} is not saved: an exception ended the run, and each stage's weights are on another rank, "
                "which may be gone. Go on from the last checkpoint before it.",
                stacklevel=3,
            )

    def _last_staged(self) -> StagedModule:
        """That of the run; afterwards that of the last run, as checkpoints can be saved then too."""
        staged = self._staged or self._ended
        assert staged is not None, "setup() comes first"
        return staged

    def _require_staged(self) -> StagedModule:
        assert self._staged is not None, "setup() comes first"
        return self._staged
