"""The user's step as the pipeline runs it: on one micro-batch, under the Trainer's precision, with its results kept."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_smddp._compat.torch import write_count
from lightning_smddp.bridge.step_record import StepRecorder
from lightning_smddp.pipeline.capture.graph import SplitError
from lightning_smddp.pipeline.capture.tracer import is_tracing
from lightning_smddp.pipeline.partition.microbatches import MicroBatch, attributes_of, signature
from lightning_smddp.pytree import copied, map_leaves, tensors
from lightning_smddp.seeding import Generators, mix

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

Scale: TypeAlias = float | Tensor  # the latter a scalar on the device


@dataclass(eq=False)
class LightningStep:
    """One of a LightningModule's step methods on a batch's micro-batches.

    Args:
        module: whose method.
        hook: its name.
        arguments: what Lightning passes besides the batch.
        precision: makes the context that Lightning enters around the step.
        recorder: keeps what the step does.
        scale: the loss is multiplied by it before backward.

    Attributes:
        keeps_casts: whether copies of weights are kept from one micro-batch to the next.
        seed: of the batch's random numbers, the same on all ranks of the pipeline; None until that is known.
        trains: whether there is a backward, and gradients.
        key: which step this is: its name, and the index of its dataloader where Lightning gives one.
    """

    module: LightningModule
    hook: str
    arguments: Sequence[Any]
    precision: Callable[[], AbstractContextManager[Any]]
    recorder: StepRecorder
    scale: Scale = 1.0
    keeps_casts: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        self.trains = self.hook == "training_step"
        self.key: Any = (self.hook, *self.arguments[1:])

    def unscaled(self, trains: bool = True) -> LightningStep:
        """The same step with its loss as it is: that of the check, or of the trial of weights, which runs forward only.

        Args:
            trains: whether there is a backward; without, its paths are kept apart from those of the training step.
        """
        step = copy.copy(self)
        step.scale = 1.0
        if not trains:
            step.trains = False
            step.key = (*self.key, "forward only")
        return step

    def __call__(self, microbatch: MicroBatch) -> Any:
        """Run the method once, as each stage does, and return what it returns.

        Each run gets containers and tensors of its own, so that what one does to the batch does not show in the next.
        The memory of tensors is shared, but for a step that was seen to write into it.
        """
        value = microbatch.value
        if self.key in self.recorder.changing_steps:
            value = copied(value)
        value = map_leaves(with_same_memory, value)
        with self.precision():
            if self.keeps_casts:
                torch.set_autocast_cache_enabled(True)  # up to the end of this context
            result = getattr(self.module, self.hook)(value, *self.arguments)
            return self.recorder.finish(result)

    def around(
        self,
        stage: int | None,
        index: int,
        microbatch: MicroBatch,
        keep: bool,
    ) -> AbstractContextManager[object]:
        """Around one run: see :meth:`StepRecorder.microbatch`. A new epoch's first one looks for new metrics."""
        if index == 0 and not (self.arguments and self.arguments[0]):
            self.recorder.metrics.find()
        return self.recorder.microbatch(stage, index, microbatch.size, microbatch.weight, keep)

    def seed_of(self, index: int) -> int:
        """The seed of the random numbers of micro-batch ``index``, the same on all ranks of the pipeline."""
        assert self.seed is not None
        return mix(self.seed, index)

    def forget(self) -> None:
        """Throw away what runs on micro-batches have left."""
        self.recorder.drop()

    @contextmanager
    def alone(self, microbatch: MicroBatch, generators: Generators, index: int = 0) -> Iterator[Callable[[], Any]]:
        """Gives a run of micro-batch ``index`` for nothing: what it logs, draws and does to metrics is thrown away."""

        def run() -> Any:
            generators.seed(self.seed_of(index))
            part = replace(microbatch, value=copied(microbatch.value))
            found = tensors(part.value)
            written = list(map(write_count, found))
            learning = self.recorder.scopes.learning() if is_tracing() else nullcontext()
            try:
                with self.around(None, index, part, keep=True), learning:
                    return self(part)
            finally:
                self.recorder.drop()
                if written != list(map(write_count, found)):
                    self.recorder.changing_steps.add(self.key)

        with generators.preserved(), torch.set_grad_enabled(self.trains):
            generators.seed(self.seed_of(index))  # as the run does: that is no draw of the step's
            yield run

    def loss(self, microbatch: MicroBatch, result: Any) -> Tensor | None:
        """This micro-batch's part of the batch's loss, times the scale; None where nothing of it counts."""
        if not self.trains or microbatch.weight == 0 or result is None:
            return None  # a mean over nothing is nan, and so would its gradient be
        return loss_of(result, self.hook) * (microbatch.weight * self.scale)


def may_keep_casts(kinds: set[torch.dtype | None], device: torch.device) -> bool:
    """Whether autocast, as it is entered now, may keep its copies of weights on paths with these ``cast_type``s."""
    return torch.is_autocast_enabled(device.type) and kinds == {torch.get_autocast_dtype(device.type)}


def loss_of(result: Any, hook: str = "training_step", detached: bool = False) -> Tensor:
    """The loss in what the step returned, as a tensor without dimensions.

    Args:
        result: what it returned.
        hook: name of the step.
        detached: the loss needs no gradient.

    Raises:
        SplitError: there is no loss, or it has no gradient.
    """
    loss = result.get("loss") if isinstance(result, dict) else result
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise SplitError(
            f"`{hook}` returned {signature(result)}: the loss has to be a scalar tensor, such as `loss.mean()`, "
            "alone or as 'loss' in a dict."
        )
    if not (loss.requires_grad or detached):
        raise SplitError(
            f"The loss that `{hook}` returned does not depend on any parameter that requires a gradient "
            "(requires_grad=False): it was detached, all of the last modules are frozen, or it is of a metric that "
            "does not say `is_differentiable = True`."
        )
    return loss.reshape(()) if loss.dim() else loss


def with_same_memory(value: Any) -> Any:
    """A copy of an object, whose tensors and arrays have the memory of the original's; itself if it has no copy.

    What is done to the copy (other attributes, ``requires_grad``) is not done to the original. Changes of numbers in
    place are, and what is done to objects in its attributes.
    """
    if isinstance(value, Tensor):
        return value if value.requires_grad else value.detach()
    if isinstance(value, np.ndarray):
        return value.view()
    try:
        copied = copy.copy(value)
    except Exception:  # whatever the object's own methods raise: it is used as it is
        return value
    for name, member in attributes_of(copied).items():
        vars(copied)[name] = map_leaves(_same_memory, member)
    return copied


def _same_memory(leaf: Any) -> Any:
    return with_same_memory(leaf) if isinstance(leaf, (Tensor, np.ndarray)) else leaf
