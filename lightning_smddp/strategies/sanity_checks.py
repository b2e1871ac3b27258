"""What the Trainer strategies do at the start and around each step, so that no error stays silent."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lightning_smddp.communication.consistency import check_same_lengths, check_same_optimizers
from lightning_smddp.communication.nonfinite import NonFinite, agreed
from lightning_smddp.strategies.nonfinite import before_step

if TYPE_CHECKING:
    from lightning_smddp.strategies.base import TrainerStrategy


class SanityChecks:
    """Comparisons between ranks, and a look at the gradients before each step."""

    def __init__(self, strategy: TrainerStrategy) -> None:
        self.strategy = strategy
        self._compared_epoch: int | None = None

    @property
    def watches_gradients(self) -> bool:
        """Whether to look for NaN and inf."""
        return self.strategy._guard.watches(self.strategy.precision_plugin)

    def require_same_optimizers(self) -> None:
        """Raise ``ValueError`` on every rank if their optimizers or schedules differ. Collective."""
        schedulers = [
            f"{type(config.scheduler).__name__} every {config.frequency} {config.interval}, monitor={config.monitor}"
            for config in self.strategy.lr_scheduler_configs
        ]
        check_same_optimizers(self.strategy._module, self.strategy.optimizers, schedulers)

    def training_starts(self) -> None:
        """The first epoch's batches are compared, whichever it is."""
        self._compared_epoch = None

    def training_batch_starts(self) -> None:
        """At the first batch of an epoch, compare how many there are on each rank."""
        trainer = self.strategy._trainer
        if trainer.current_epoch != self._compared_epoch:
            self._compared_epoch = trainer.current_epoch
            check_same_lengths(_batches(trainer), trainer.current_epoch)

    def around_step(self, optimizer: Any, closure: Callable[[], Any], step: Callable[[Callable[[], Any]], Any]) -> Any:
        """Look at the gradients between the backward pass and the update.

        Args:
            optimizer: about to step.
            closure: Lightning's, of the training step and the backward pass.
            step: takes a closure, and steps.
        """
        if not self.watches_gradients or not dist.is_initialized():
            return step(closure)
        # Clipping by norm, behind the closure, spreads what is not finite over all parameters: so names are from before
        # it. A hook behind the closure may clean gradients: so what was found there is looked for again.
        #   optimizer.step: closure() -> found -> hooks, clipping -> judge -> update
        found: NonFinite | None = None

        def looked() -> Any:
            nonlocal found
            result = closure()
            found = self.strategy._find_nonfinite(optimizer)
            return result

        def judge() -> None:
            left = found if self._is_left(found, optimizer) else None
            self.strategy._guard.check(optimizer, left, self.where(), self.strategy._nonfinite_group)

        with before_step(optimizer, judge):
            return step(looked)

    def _is_left(self, found: NonFinite | None, optimizer: Any) -> bool:
        """Whether any rank still has what was ``found``: hooks may have cleaned it on some. Collective then."""
        if found is None:
            return False
        left = self.strategy._find_nonfinite(optimizer)
        return agreed(left is not None, self.strategy._nonfinite_group, self.strategy.root_device)

    def where(self) -> str:
        """The step that runs, in words."""
        trainer = self.strategy._trainer
        batch = trainer.fit_loop.epoch_loop.batch_idx
        return f"step {trainer.global_step} (epoch {trainer.current_epoch}, batch {batch})"


def _batches(trainer: Any) -> float:
    """Training batches of this rank in an epoch, as far as is known; inf if it is not."""
    length = float("inf")
    if hasattr(trainer.train_dataloader, "batch_sampler"):
        with suppress(TypeError, NotImplementedError):  # several loaders, or a stream
            length = len(trainer.train_dataloader)
    return float(min(trainer.num_training_batches, length))
