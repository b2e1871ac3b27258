"""One process that accumulates gradients over micro-batches: what the numbers of a pipeline are, by definition.

Nothing here is of stages: a plain loop calls the user's step for one part of the batch after the other. Batches are cut
and weighed, and outputs put together, by the functions of plain values that a pipeline has for that. Tests of
pipelines, and ``lightning-smddp verify``, compare with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_smddp._compat.torch import forward_cache, set_forward_cache
from lightning_smddp.bridge.batches import loader_sizes
from lightning_smddp.bridge.loss_weights import LossWeight, given_weight
from lightning_smddp.bridge.step_record import reduce_logged, reduction_name
from lightning_smddp.pipeline.partition.microbatches import (
    MicroBatch,
    Splitter,
    UnclearBatchError,
    has_time_first,
    merge_outputs,
)
from lightning_smddp.seeding import Generators, mix, run_seed, seeded_modules, step_seed

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.strategies import SingleDeviceStrategy as _Base
else:
    _Base = object


@dataclass
class _Logged:
    """One call of ``self.log``: with what, and the number that it was then."""

    value: Any
    number: Tensor | None
    options: dict[str, Any]


@dataclass
class _Run:
    """The step's run on one micro-batch: what it returned and logged."""

    part: MicroBatch
    output: Any = None
    logs: dict[tuple[str, int], _Logged] = field(default_factory=dict)  # by name, and which call with it

    @property
    def loss(self) -> Tensor | None:
        found = self.output.get("loss") if isinstance(self.output, Mapping) else self.output
        return found if isinstance(found, Tensor) else None


class AccumulateMicroBatches(_Base):
    """Train on one device, each batch in micro-batches: the numbers that a pipeline of as many micro-batches has.

    As Lightning's ``accumulate_grad_batches`` does over batches, steps run once for each micro-batch, in order, and
    gradients are those of ``sum(w * loss) / sum(w)``. Hooks, logging, ``global_step`` and the optimizer come once per
    batch. ``self.log`` reduces the micro-batches' values by its ``reduce_fx``, means by the same weights, or by
    ``batch_size=`` where it is given. Metrics are updated by each micro-batch. What a step returns is put together:
    rows are concatenated, floating scalars averaged, integers and integer tensors without dimensions added.

    Random numbers follow from the run's seed, the step, the micro-batch and the modules that draw, see ``seeding.py``.
    A training step that returns None for one micro-batch makes it not count; for all, Lightning skips the batch.

    Args:
        num_microbatches: of each batch, or a function that gives it for a number of rows; fewer where a batch has fewer
            rows. Bigger ones come first.
        loss_weight: what a micro-batch weighs: its ``"rows"``; its ``"labels"`` that are not -100, or
            ``"shifted_labels"``, the same without the first column; ``"sum"``: losses are added; the name of an entry
            of the batch, such as a mask, whose sum counts; or a function of the micro-batch.
        split_batch: called with a batch and a number of micro-batches, returns them as a list of pairs of a batch and
            its number of rows. By default the module's method of this name, if it has one.
        **kwargs: of Lightning's ``SingleDeviceStrategy``, such as ``device``.

    Raises:
        ValueError: a module optimizes manually; outputs cannot be put together.
    """

    def __init__(
        self,
        num_microbatches: int | Callable[[int], int],
        loss_weight: str | Callable[[Any], float] = "rows",
        split_batch: Callable[[Any, int], Sequence[Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.num_microbatches = num_microbatches
        self.loss_weight = loss_weight
        self.split_batch = split_batch

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    # ---- the steps ----

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The weighted mean of the micro-batches' losses, with the rest of what they returned."""
        if not self._module.automatic_optimization:
            raise ValueError(
                "Micro-batches need automatic optimization: with manual optimization use another strategy."
            )
        runs = self._run(super().training_step, *args, *kwargs.values())
        counting = [run for run in runs if run.output is not None]
        self._log(counting or runs)
        if not counting:
            return None
        if any(run.loss is None for run in counting):
            return counting[0].output  # which Lightning refuses
        output, loss = self._merged(counting), self._accumulated(counting)
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    def _accumulated(self, runs: Sequence[_Run]) -> Tensor:
        """The batch's loss, whose backward pass goes through one micro-batch after the other."""
        # So hooks of parameters run for each micro-batch, while Lightning's `backward` and its hooks come once.
        total = 1.0 if self.loss_weight == "sum" else sum(run.part.weight for run in runs)
        # What counts nothing may be NaN, as a mean over no labels is.
        parts: list[tuple[Any, float]] = [(run.loss, run.part.weight / total) for run in runs if run.part.weight]

        def backward(gradient: Tensor) -> None:
            with self._drawing():  # what is checkpointed draws again
                for loss, share in parts:
                    loss.backward(gradient * share)

        loss = torch.stack([loss.detach() * share for loss, share in parts]).sum(0).requires_grad_()
        loss.register_hook(backward)
        return loss

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Outputs of the micro-batches, put together."""
        return self._evaluated(super().validation_step, *args, *kwargs.values())

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Outputs of the micro-batches, put together."""
        return self._evaluated(super().test_step, *args, *kwargs.values())

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Outputs of the micro-batches, put together."""
        return self._evaluated(super().predict_step, *args, *kwargs.values())

    def _evaluated(self, step: Callable[..., Any], *args: Any) -> Any:
        runs = self._run(step, *args)
        self._log(runs)
        return self._merged(runs)

    def _merged(self, runs: Sequence[_Run]) -> Any:
        return merge_outputs([run.output for run in runs], [run.part.size for run in runs], self._weights(runs))

    def _weights(self, runs: Sequence[_Run]) -> list[float]:
        """Of means: where losses are added, rows."""
        return [float(run.part.size) if self.loss_weight == "sum" else run.part.weight for run in runs]

    def _run(self, step: Callable[..., Any], batch: Any, *rest: Any) -> list[_Run]:
        runs = [_Run(part) for part in self._cut(step.__name__, batch, rest)]
        indices = [index for index in rest if isinstance(index, int)]
        seed = step_seed(run_seed() % 2**31, step.__name__, self._module.current_epoch, *indices)
        with self._drawing() as generators:
            for number, run in enumerate(runs):
                generators.seed(mix(seed, number))
                with self._recording(run):
                    run.output = step(run.part.value, *rest)
        return runs

    @contextmanager
    def _drawing(self) -> Iterator[Generators]:
        """Modules draw random numbers of their own, and what they draw counts for nothing outside."""
        generators = Generators(self._module, self.root_device)
        with generators.preserved(), seeded_modules(self._module, generators):
            yield generators

    def _cut(self, hook: str, batch: Any, arguments: Sequence[Any]) -> Sequence[MicroBatch]:
        """Weighted micro-batches; one where rows are not clear."""
        split = self.split_batch or getattr(self._module, "split_batch", None)
        splitter = Splitter(split_batch=split, time_first=has_time_first(self._module))
        rows = 1
        with suppress(UnclearBatchError):
            rows = splitter.rows(batch, loader_sizes(self._module.trainer, hook, arguments))
        count = self.num_microbatches if isinstance(self.num_microbatches, int) else self.num_microbatches(rows)
        parts = [splitter.whole(batch)]
        if count > 1:
            with suppress(UnclearBatchError):
                parts = splitter.split(batch, count, rows)
        try:
            weight = given_weight(self.loss_weight, batch)
        except ValueError:  # there are no such labels
            if hook == "training_step":
                raise
            weight = None
        return (weight or LossWeight()).apply(parts)

    # ---- logging ----

    @contextmanager
    def _recording(self, run: _Run) -> Iterator[None]:
        """Keep what ``self.log`` is called with."""
        calls = Counter[str]()
        # Lightning's, of either package: the module's own may take `*args`.
        base: Any = next(base for base in type(self._module).__mro__ if base.__name__ == "LightningModule")
        names = list(signature(base.log).parameters)[3:]  # behind self, name and value

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            options = dict(zip(names, args, strict=False), **kwargs)
            if isinstance(value, Metric):
                number = forward_cache(value)
            else:
                number = torch.as_tensor(value, dtype=torch.get_default_dtype()).detach().reshape(())
            run.logs[name, calls[name]] = _Logged(value, number, options)
            calls[name] += 1

        self._module.log = log  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self._module.log

    def _log(self, runs: Sequence[_Run]) -> None:
        """Log each name once, over those runs that logged it."""
        for key in dict.fromkeys(key for run in runs for key in run.logs):
            having = [run for run in runs if key in run.logs]
            logs = [run.logs[key] for run in having]
            options, value = {**logs[-1].options}, logs[-1].value
            reduced = self._reduced(logs, having)
            if isinstance(value, Metric):
                set_forward_cache(value, reduced)  # of the step; that of an epoch is computed of its state
            else:
                value = reduced
            if options.get("batch_size") is not None:
                options["batch_size"] = sum(log.options["batch_size"] for log in logs)
            self._module.log(key[0], value, **options)

    def _reduced(self, logs: Sequence[_Logged], runs: Sequence[_Run]) -> Any:
        last, numbers = logs[-1], [log.number for log in logs]
        if any(number is None for number in numbers):
            return last.number  # metrics that were updated alone
        reduction = None if isinstance(last.value, Metric) else reduction_name(last.options.get("reduce_fx", "mean"))
        if self.loss_weight == "sum" and all(_is_loss(log.value, run) for log, run in zip(logs, runs, strict=True)):
            reduction = "sum"
        weights = self._weights(runs)
        if last.options.get("batch_size") is not None:
            weights = [log.options["batch_size"] for log in logs]
        return reduce_logged(reduction or "mean", numbers, weights)


def _is_loss(value: Any, run: _Run) -> bool:
    """Whether ``value`` is the loss, detached or not."""
    return run.loss is not None and isinstance(value, Tensor) and value.data_ptr() == run.loss.data_ptr()
