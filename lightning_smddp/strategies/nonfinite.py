"""``on_nonfinite``: between the backward pass and the optimizer's step, for the Trainer strategies and Fabric's."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp.communication.nonfinite import NonFiniteWatch, agreed, diagnosis, refuse
from lightning_smddp.wording import counted


class NonFiniteGuard:
    """Stops a step, or leaves it out, when a gradient of any rank is not finite.

    Args:
        mode: ``"error"``, ``"skip"`` or ``"ignore"``.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.skipped = 0

    def check(
        self,
        optimizer: Any,
        found: Mapping[str, str] | None,
        where: str,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Before ``optimizer`` steps. Collective if gradients are bad.

        Args:
            optimizer: about to step.
            found: what is wrong on this rank, by parameter; None if no rank of ``group`` has found anything.
            where: the step, in words.
            group: the ranks that come here together; None is all.

        Raises:
            NonFiniteGradientError: on every rank of ``group``, with ``mode="error"``.
        """
        if found is None:
            return
        group = group or dist.group.WORLD
        assert group is not None
        # The text takes a collective, which all ranks of the group come to: they have skipped as many steps.
        text = ""
        if self.mode == "error" or not self.skipped:
            text = diagnosis(found, where, group)
        self.left_out(text)
        for parameters in optimizer.param_groups:
            for parameter in parameters["params"]:
                parameter.grad = None  # optimizers pass by parameters without a gradient

    def left_out(self, text: str) -> None:
        """All ranks leave out a step, for the reason ``text``, which is not needed but for the first one.

        Raises:
            NonFiniteGradientError: with ``mode="error"``.
        """
        if self.mode == "error":
            raise refuse(text)
        self.skipped += 1
        if self.mode == "skip" and self.skipped == 1 and dist.get_rank() == 0:
            warnings.warn(f"{text} This step is left out on all ranks (on_nonfinite='skip').", stacklevel=3)

    def report(self) -> str | None:
        """What was left out, at the end."""
        if not self.skipped or self.mode != "skip":
            return None
        return f"on_nonfinite='skip' left out {counted(self.skipped, 'step')}"


def by_watch(watch: NonFiniteWatch) -> Mapping[str, str] | None:
    """Findings where buckets are averaged over all ranks: no message is needed."""
    if not watch.spoiled():
        return None
    return watch.take_findings()


def by_asking(found: Mapping[str, str] | None, device: torch.device) -> Mapping[str, str] | None:
    """Findings where ranks have different gradients; ``found``: None if this rank's are fine. Collective."""
    assert dist.group.WORLD is not None
    if not agreed(found is not None, dist.group.WORLD, device):
        return None
    return found or {}


def after_changes(
    brought: Mapping[str, str], now: Mapping[str, str] | None, group: dist.ProcessGroup, device: torch.device
) -> Mapping[str, str] | None:
    """Findings where the user's code has had the averaged gradients in its hands. Collective.

    Args:
        brought: what was wrong with this rank's own gradients before averaging.
        now: what is wrong now; None if nothing is.
        group: the ranks that come here together.
        device: for messages.
    """
    # Answers are the same on all ranks, so all of them ask the second question, or none.
    if not agreed(now is not None, group, device):
        return None
    if agreed(bool(brought), group, device):
        return brought  # it names the rank; now all ranks have the same
    return now or {}


@contextmanager
def before_step(optimizer: Any, look: Callable[[], None]) -> Iterator[None]:
    """In this context ``optimizer.step`` calls ``look`` behind its closure, just before it changes parameters.

    Lightning's closure ends with the hooks that may change gradients: ``on_before_optimizer_step`` and
    ``configure_gradient_clipping``.
    """
    original = optimizer.step
    was_changed = "step" in vars(optimizer)  # a learning rate scheduler has wrapped it, say

    @functools.wraps(original)
    def step(closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        if closure is None:
            look()
            return original(**options)

        def looked() -> Any:
            result = closure()
            look()
            return result

        return original(closure=looked, **options)

    optimizer.step = step
    try:
        yield
    finally:
        del optimizer.step
        if was_changed:
            optimizer.step = original


def is_changed_hook(owner: Any, hook: str) -> bool:
    """Whether a module or callback has a hook of the user's in place of Lightning's own."""
    module = getattr(getattr(owner, hook, None), "__module__", None)
    return not str(module).startswith(("lightning.", "pytorch_lightning."))


def changes_gradients(trainer: Any, *hooks: str) -> bool:
    """Whether the user's code gets the gradients in one of ``hooks``."""
    for owner in (trainer.lightning_module, *trainer.callbacks):
        for hook in hooks:
            if hasattr(owner, hook) and is_changed_hook(owner, hook):
                return True
    return False


def changes_batch(trainer: Any) -> bool:
    """Whether the user's code moves a batch to the device, or gets it there."""
    owners = [trainer.lightning_module, getattr(trainer, "datamodule", None)]
    hooks = ("transfer_batch_to_device", "on_after_batch_transfer")
    return any(is_changed_hook(owner, hook) for owner in owners if owner is not None for hook in hooks)


def loss_watchers(trainer: Any) -> list[Any]:
    """Callbacks that end a run when the loss is not finite: Lightning's ``SpikeDetection`` and what is made of it."""
    return [callback for callback in trainer.callbacks if _is_spike_detection(callback)]


def _is_spike_detection(callback: Any) -> bool:
    for cls in type(callback).__mro__:
        if cls.__name__ == "SpikeDetection" and cls.__module__.endswith("fabric.utilities.spike"):
            return True
    return False


def let_watchers_judge(trainer: Any, loss: Any, batch: Any) -> None:
    """Call :func:`loss_watchers` as at the end of the batch, which will not come. Collective where there are any."""
    if not isinstance(loss, Tensor):
        return  # manual optimization, where the batch goes on
    for callback in loss_watchers(trainer):
        outputs = {"loss": loss.detach()}
        batch_idx = trainer.fit_loop.epoch_loop.batch_idx
        callback.on_train_batch_end(trainer, trainer.lightning_module, outputs, batch, batch_idx)
