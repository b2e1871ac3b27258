"""``sharded=True``: each rank saves and loads its own part of a checkpoint, which is a directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor
from torch.optim import Optimizer

from lightning_smddp.checkpoint.directories import remove_directory
from lightning_smddp.checkpoint.parts import names_of
from lightning_smddp.checkpoint.sharded import has_manifest, is_sharded, load_sharded, local_path, save_sharded
from lightning_smddp.pipeline.structure import copied
from lightning_smddp.strategies.checkpoint_io import require_trainers
from lightning_smddp.strategies.saving import Saving


class ShardedSaving(Saving):
    """Saves directories where asked to, and loads them always.

    A strategy with ``sharded`` gives Lightning this rank's part of the module's and the optimizers' states: a
    checkpoint as ever, with less in it. Hooks of the user's see such a part, on every rank.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save this rank's part. Errors are raised on every rank.

        Raises:
            OSError, ValueError: see :func:`~lightning_smddp.checkpoint.sharded.save_sharded`.
            TypeError: ``storage_options`` were given.
        """
        if not self._reliability.sharded:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise TypeError(f"storage_options={storage_options!r} cannot be used with sharded=True: it takes no URLs.")
        if cast(Any, self)._interrupted() and not self.is_global_zero:
            return
        module = cast(Any, self.lightning_module)
        optimizers = self.optimizers if "optimizer_states" in checkpoint else []
        save_sharded(
            checkpoint if self._is_first_replica else None,
            filepath,
            names_of(module, [self._optimized(getattr(o, "optimizer", o)) for o in optimizers]),
            list(module.state_dict(keep_vars=True)) if self.is_global_zero else (),
            self._ranks,
        )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a file or a directory, in whatever layout it was saved. Collective for directories."""
        verified, self.verified_checkpoint = self.verified_checkpoint, None
        if not self._is_ours(checkpoint_path):
            return super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        loaded = load_sharded(checkpoint_path, self._ranks, weights_only, verify=str(checkpoint_path) != verified)
        require_trainers(loaded, checkpoint_path)
        self._loaded_from = checkpoint_path
        return loaded

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' states, which may be files mapped into memory: optimizers keep what they are given."""
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": copied(checkpoint["optimizer_states"])})

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a file or a directory."""
        if not self._is_ours(filepath):
            super().remove_checkpoint(filepath)
        elif self.is_global_zero:
            remove_directory(local_path(filepath))

    def _is_ours(self, path: Any) -> bool:
        """Whether there is a directory that is not for a CheckpointIO of the user's own."""
        return is_sharded(path) and (self._has_safe_files or has_manifest(path))

    @property
    def _is_first_replica(self) -> bool:
        """Whether this rank has a part of what is saved."""
        groups = getattr(self, "_groups", None)  # of pipelines
        return self.is_global_zero if groups is None else groups.replica == 0

    def _optimized(self, optimizer: Optimizer) -> Sequence[Tensor]:
        """All parameters of an optimizer of the whole module."""
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]
