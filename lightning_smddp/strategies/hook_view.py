"""Lightning's hooks see the whole of a partitioned module: what user code in them runs within, and what does not.

A rank has only its own part's parameters. Within the view every parameter is there on each rank, and operations on it
are collective. So user's hooks run within it; where such a hook calls the strategy, its code leaves the view until it
returns, as it is written for this rank's part::

    Trainer -> on_after_backward (view: all parameters) -> trainer.save_checkpoint (no view: own part) -> back in view
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any

from lightning_smddp.strategies.checks import is_changed_hook

if TYPE_CHECKING:
    from lightning_smddp.bridge.partitioned_module import PartitionedModule
    from lightning_smddp.bridge.pipelined_module import PipelinedModule

# Before there are stages or after the module is whole again, about data, on one rank alone; or they run optimizers.
_OUTSIDE = frozenset({
    "configure_callbacks", "configure_model", "configure_optimizers", "configure_sharded_model",
    "on_after_batch_transfer", "on_before_batch_transfer", "on_exception", "on_load_checkpoint", "optimizer_zero_grad",
    "predict_dataloader", "prepare_data", "setup", "teardown", "test_dataloader", "train_dataloader",
    "transfer_batch_to_device", "val_dataloader",
})  # fmt: skip

# Come with each batch, as others do that end so. What ranks wait for at the end of others waits until training goes on.
_EACH_BATCH = frozenset({
    "backward", "configure_gradient_clipping", "lr_scheduler_step", "on_after_backward", "on_before_backward",
    "on_before_optimizer_step", "on_before_zero_grad", "optimizer_step",
})  # fmt: skip

# What hooks may call of the strategy: its own code, which is about this rank's part.
_OF_THE_STRATEGY = (
    "all_gather", "backward", "barrier", "broadcast", "lightning_module_state_dict", "optimizer_state",
    "optimizer_step", "post_backward", "pre_backward", "predict_step", "reduce", "reduce_boolean_decision",
    "save_checkpoint", "test_step", "training_step", "validation_step",
)  # fmt: skip


def let_hooks_call(strategy: Any) -> None:
    """Let those methods of the class ``strategy`` leave the view of its objects (``_hook_view``) while they run."""
    for name in _OF_THE_STRATEGY:
        setattr(strategy, name, _outside(getattr(strategy, name)))


def _outside(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(strategy: Any, *args: Any, **kwargs: Any) -> Any:
        return strategy._hook_view.call_outside(method, strategy, *args, **kwargs)

    return call


class HookView:
    """Puts hooks and callbacks of a Trainer's run into the view of the module that it trains.

    Args:
        strategy: of the Trainer.
    """

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self._waiting: ExitStack | None = None  # of a hook within which the module is partitioned
        self._depth = 0  # of calls of the strategy

    def call_outside(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call the strategy's own code outside of the view, and go back into it."""
        self._depth += 1
        try:
            with self._left():
                result = method(*args, **kwargs)
        finally:
            self._depth -= 1
        # A hook may have begun before the module was partitioned, which a step in it has done.
        partitioned = self._partitioned()
        if self._depth == 0 and self._waiting is not None and partitioned is not None:
            self._waiting.enter_context(partitioned.inside_view())
            self._waiting = None
        return result

    def settle(self) -> None:
        """Answer the first rank, if it is still in a hook. Collective if it may be."""
        partitioned = self._partitioned()
        if partitioned is not None and not self.strategy._interrupted:
            partitioned.view.settle()

    def _partitioned(self) -> PartitionedModule | None:
        pipelined: PipelinedModule | None = self.strategy._pipelined
        return None if pipelined is None else pipelined.partitioned

    def _left(self) -> AbstractContextManager[None]:
        partitioned = self._partitioned()
        if partitioned is None or self.strategy._interrupted:
            return nullcontext()
        if partitioned.view.is_entered or partitioned.view.pending:
            return partitioned.outside_view()
        return nullcontext()

    def around(self, hook: str, owners: list[Any]) -> AbstractContextManager[Any]:
        """What Lightning is to enter around the call of the ``hook`` of one of ``owners``."""
        waits = hook not in _EACH_BATCH and not hook.endswith(("_batch_start", "_batch_end"))
        is_users = any(is_changed_hook(owner, hook, _LIGHTNINGS) for owner in owners)
        if not (waits or is_users) or hook in _OUTSIDE:
            return nullcontext()
        # Behind an exception the other ranks are somewhere else, or gone: nobody would meet this one. Hooks are still
        # called, such as `on_save_checkpoint` where a checkpoint is due on exceptions.
        if self.strategy._pipelined is None or self.strategy._interrupted:
            return nullcontext()
        partitioned = self._partitioned()
        if partitioned is not None and waits:
            partitioned.view.settle()
        if not is_users:
            return nullcontext()
        if partitioned is None:
            return self._until_partitioned()
        return partitioned.inside_view(waits)

    @contextmanager
    def _until_partitioned(self) -> Iterator[None]:
        """The first ``optimizer_step``: the module is partitioned by the step in it, and what follows sees the view."""
        with ExitStack() as stack:
            # The hook is under way without a view, as there is none yet. The step in it makes one, `call_outside`
            # enters it on this stack, and it is left when the hook ends.
            before, self._waiting = self._waiting, stack
            try:
                yield
            finally:
                self._waiting = before


# Modules of Lightning whose hooks look at no parameter.
_WITHOUT_PARAMETERS = (
    "callbacks.batch_size_finder", "callbacks.callback", "callbacks.device_stats_monitor", "callbacks.early_stopping",
    "callbacks.gradient_accumulation_scheduler", "callbacks.lr_finder", "callbacks.lr_monitor",
    "callbacks.model_checkpoint", "callbacks.model_summary", "callbacks.on_exception_checkpoint", "callbacks.progress",
    "callbacks.rich_model_summary", "callbacks.throughput_monitor", "callbacks.timer", "core.",
)  # fmt: skip
_LIGHTNINGS = tuple(
    f"{package}.{module}" for package in ("lightning.pytorch", "pytorch_lightning") for module in _WITHOUT_PARAMETERS
)
