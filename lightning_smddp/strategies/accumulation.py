"""One process that accumulates gradients over micro-batches: what the numbers of a pipeline are, by definition.

Nothing here is of a pipeline: a plain loop calls the user's step for one part of the batch after the other, and what
the calls logged and returned is put together. Tests of pipelines, and ``lightning-smddp verify``, compare with it.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from numbers import Number
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_smddp._compat.torch import forward_cache, set_forward_cache
from lightning_smddp.pytree import items, members_of, tensors, with_members
from lightning_smddp.seeding import Generators, mix, run_seed, seeded_modules, step_seed

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import SingleDeviceStrategy as _Base
else:
    _Base = object

_Context: TypeAlias = Callable[[], AbstractContextManager[Any]]

_IGNORED = -100  # the label that does not count
_LABELS = {"labels": 0, "shifted_labels": 1}  # loss_weight -> columns that no position predicts
_REDUCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}


@dataclass
class _Run:
    """The step's run on one micro-batch: what it weighs, returned and logged."""

    size: int
    weight: float
    output: Any = None
    logs: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)  # by name, and which call with it


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
        split_batch: called with a batch and a number of micro-batches, returns them as a list of batches, or of pairs
            of a batch and its number of rows. By default the module's method of this name, else whatever is as long as
            the batch's first tensor is cut.
        **kwargs: of Lightning's ``SingleDeviceStrategy``, such as ``device``.

    Raises:
        ValueError: ``num_microbatches`` is less than 1; a module optimizes manually; outputs of micro-batches cannot be
            put together (with their place and shapes).
    """

    def __init__(
        self,
        num_microbatches: int | Callable[[int], int],
        loss_weight: str | Callable[[Any], float] = "rows",
        split_batch: Callable[[Any, int], Sequence[Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(num_microbatches, int) and num_microbatches < 1:
            raise ValueError(f"num_microbatches={num_microbatches} has to be a number from 1.")
        super().__init__(**kwargs)
        self.num_microbatches = num_microbatches
        self.loss_weight = loss_weight
        self.split_batch = split_batch
        self._run_seed: int | None = None  # until the first batch of a run

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @override
    def setup(self, trainer: Trainer) -> None:
        """Set up a run."""
        super().setup(trainer)
        self._run_seed = None

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
        output = _combined([run.output for run in counting], counting)
        losses = [_loss_of(run.output) for run in counting]
        if any(loss is None for loss in losses):
            return output  # which Lightning refuses
        anchor = torch.zeros((), requires_grad=True)  # without an input that needs a gradient there is no backward
        loss = _AccumulatedLoss.apply(anchor, losses, self._shares(counting), self._drawing)  # type: ignore[no-untyped-call]
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Outputs of the micro-batches, put together."""
        return self._evaluated(self._run(super().validation_step, *args, *kwargs.values()))

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Outputs of the micro-batches, put together."""
        return self._evaluated(self._run(super().test_step, *args, *kwargs.values()))

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Outputs of the micro-batches, put together."""
        return self._evaluated(self._run(super().predict_step, *args, *kwargs.values()))

    def _evaluated(self, runs: list[_Run]) -> Any:
        self._log(runs)
        return _combined([run.output for run in runs], runs)

    def _run(self, step: Callable[..., Any], batch: Any, *rest: Any) -> list[_Run]:
        parts = self._cut(batch)
        sizes = [size for _, size in parts]
        weights = self._weights(batch, [part for part, _ in parts], sizes)
        runs = [_Run(size, weight) for size, weight in zip(sizes, weights, strict=True)]
        if self._run_seed is None:
            self._run_seed = run_seed() % 2**31
        indices = [index for index in rest if isinstance(index, int)]
        seed = step_seed(self._run_seed, step.__name__, self._module.current_epoch, *indices)
        with self._drawing() as generators:
            for number, (run, (part, _)) in enumerate(zip(runs, parts, strict=True)):
                generators.seed(mix(seed, number))
                with self._recording(run):
                    run.output = step(part, *rest)
        return runs

    @contextmanager
    def _drawing(self) -> Iterator[Generators]:
        """Modules draw random numbers of their own, and what they draw counts for nothing outside."""
        generators = Generators(self._module, self.root_device)
        with generators.preserved(), seeded_modules(self._module, generators):
            yield generators

    def _shares(self, runs: Sequence[_Run]) -> list[float]:
        """What each loss is multiplied by."""
        if self.loss_weight == "sum":
            return [1.0] * len(runs)
        total = sum(run.weight for run in runs)
        return [run.weight / total for run in runs]

    # ---- a batch's parts ----

    def _cut(self, batch: Any) -> list[tuple[Any, int]]:
        """Micro-batches with their numbers of rows."""
        rows = _rows(batch)
        count = self.num_microbatches if isinstance(self.num_microbatches, int) else self.num_microbatches(rows)
        split = self.split_batch or getattr(self._module, "split_batch", None)
        if split is not None and count > 1:
            parts = split(batch, count)
            return [part if _is_pair(part) else (part, _rows(part)) for part in parts]
        if min(rows, count) <= 1:  # also where it cannot be cut, as what is sparse
            return [(batch, rows)]
        ranges = torch.arange(rows).tensor_split(min(rows, count))  # the first ones one longer
        return [(_take(batch, rows, slice(int(r[0]), int(r[-1]) + 1)), len(r)) for r in ranges]

    def _weights(self, batch: Any, parts: Sequence[Any], sizes: list[int]) -> list[float]:
        """How much each part counts; its rows where nothing of the batch counts otherwise."""
        if self.loss_weight in ("rows", "sum"):
            return list(sizes)
        if callable(self.loss_weight):
            weights = [float(self.loss_weight(part)) for part in parts]
        elif self.loss_weight in _LABELS:
            first = _LABELS[self.loss_weight]
            path = _path_of_labels(batch)
            labels = [dict(items(part))[path] for part in parts]
            weights = [float((part[:, first:] if first else part).ne(_IGNORED).sum()) for part in labels]
        else:
            weights = [float(part[self.loss_weight].sum()) for part in parts]
        return weights if sum(weights) > 0 else list(sizes)

    # ---- logging ----

    @contextmanager
    def _recording(self, run: _Run) -> Iterator[None]:
        """Keep what ``self.log`` is called with; what Lightning refuses goes to Lightning."""
        module = self._module
        original, calls = module.log, Counter[str]()
        # A module may override it with other parameters, and hand them on.
        base: Any = next(base for base in type(module).__mro__ if base.__name__ == "LightningModule")
        signature = inspect.signature(base.log)

        def log(*args: Any, **kwargs: Any) -> None:
            given = dict(signature.bind(module, *args, **kwargs).arguments)
            del given["self"]
            name, value = given["name"], given["value"]
            if isinstance(value, Metric):
                given["cache"] = forward_cache(value)
            elif isinstance(value, Number) or (isinstance(value, Tensor) and value.numel() == 1):
                given["cache"] = torch.as_tensor(value, dtype=torch.get_default_dtype()).detach().reshape(())
            else:
                original(*args, **kwargs)
                return
            run.logs[name, calls[name]] = given
            calls[name] += 1

        module.log = log  # type: ignore[method-assign]
        try:
            yield
        finally:
            vars(module).pop("log")

    def _log(self, runs: Sequence[_Run]) -> None:
        """Log each name once, over those runs that logged it."""
        for key in dict.fromkeys(key for run in runs for key in run.logs):
            having = [run for run in runs if key in run.logs]
            logs = [run.logs[key] for run in having]
            given = {**logs[-1]}
            del given["cache"]
            value = self._reduced(logs, having)
            if isinstance(given["value"], Metric):
                set_forward_cache(given["value"], value)  # of the step; that of an epoch is computed of its state
            else:
                given["value"] = value
            if given.get("batch_size") is not None:
                given["batch_size"] = sum(log["batch_size"] for log in logs)
            self._module.log(**given)

    def _reduced(self, logs: Sequence[Mapping[str, Any]], runs: Sequence[_Run]) -> Any:
        values = [log["cache"] for log in logs]
        fx = logs[-1].get("reduce_fx", "mean")
        reduction = _REDUCTIONS.get(getattr(fx, "__name__", fx))
        if any(value is None for value in values):
            return values[-1]  # metrics that were updated alone
        if reduction is not None and not isinstance(logs[-1]["value"], Metric):
            return reduction(torch.stack(values))
        is_loss = [_is_same(log["value"], _loss_of(run.output)) for log, run in zip(logs, runs, strict=True)]
        if self.loss_weight == "sum" and all(is_loss):
            return torch.stack(values).sum()
        return _mean(values, [log.get("batch_size") or run.weight for log, run in zip(logs, runs, strict=True)])


class _AccumulatedLoss(torch.autograd.Function):
    """The sum of losses by their shares; backward goes through one micro-batch after the other, as accumulation does.

    So hooks of parameters run for each micro-batch, while Lightning's ``backward`` and its hooks come once. It runs
    within ``drawing``, as what is checkpointed draws again.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, losses: list[Tensor], shares: list[float], drawing: _Context) -> Tensor:
        ctx.drawing = drawing
        # What counts nothing may be NaN, as a mean over no labels is.
        ctx.parts = [(loss, share) for loss, share in zip(losses, shares, strict=True) if share]
        return torch.stack([loss.detach() * share for loss, share in ctx.parts]).sum(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        with ctx.drawing():
            for loss, share in ctx.parts:
                loss.backward(gradient * share)
        return None, None, None, None


def _mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """The weighted mean, without what weighs nothing: a mean over no labels is NaN."""
    pairs = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
    return sum(value * weight for value, weight in pairs) / sum(weights)


def _loss_of(output: Any) -> Tensor | None:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss if isinstance(loss, Tensor) else None


def _is_same(value: Any, loss: Tensor | None) -> bool:
    """Whether ``value`` is the loss, detached or not."""
    return loss is not None and isinstance(value, Tensor) and value.data_ptr() == loss.data_ptr()


# ---- rows of a batch -------------------------------------------------------------------------------------------------


def _rows(batch: Any) -> int:
    """The length of the first tensor in a batch."""
    return next((len(tensor) for tensor in tensors(batch) if tensor.dim()), 1)


def _take(value: Any, rows: int, part: slice) -> Any:
    """Part of a batch: of its tensors, and of its lists with an entry for each of the rows."""
    if isinstance(value, Tensor):
        return value[part] if value.dim() and len(value) == rows else value
    is_fields = any(tensor.dim() and len(tensor) == rows for tensor in tensors(value))
    if isinstance(value, (list, tuple)) and len(value) == rows and not is_fields:
        return value[part]
    members = members_of(value)
    if members is None:
        return value
    return with_members(value, [(key, _take(member, rows, part)) for key, member in members])


def _is_pair(part: Any) -> bool:
    return type(part) is tuple and len(part) == 2 and type(part[1]) is int


def _path_of_labels(batch: Any) -> Any:
    """Where a batch has its labels: under this key, else the first integers with -100 among them."""
    found = [(path, leaf) for path, leaf in items(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    named = [path for path, _ in found if path and path[-1] == "labels"]
    ignoring = [path for path, leaf in found if not leaf.is_floating_point() and bool(leaf.eq(_IGNORED).any())]
    if not named and not ignoring:
        raise ValueError(f"loss_weight='labels': the batch has no 'labels', and no integers with {_IGNORED}.")
    return (named or ignoring)[0]


# ---- outputs of micro-batches ----------------------------------------------------------------------------------------


def _combined(outputs: list[Any], runs: Sequence[_Run], path: str = "the output") -> Any:
    """One output of those of micro-batches."""
    first = outputs[0]
    sizes = [run.size for run in runs]
    if len(outputs) == 1:
        return first
    if all(isinstance(output, Tensor) for output in outputs):
        return _combined_tensors(outputs, runs, path)
    if all(isinstance(output, float) for output in outputs):
        return _mean(outputs, [run.weight for run in runs])
    if all(type(output) is int for output in outputs):
        return sum(outputs)
    if isinstance(first, list) and [len(output) for output in outputs] == sizes:
        return [entry for output in outputs for entry in output]
    members = [dict(members_of(output) or ()) for output in outputs]
    if members[0] and all(member.keys() == members[0].keys() for member in members):
        combined = [(key, _combined([m[key] for m in members], runs, f"{path}[{key!r}]")) for key in members[0]]
        return with_members(first, combined)
    if any(tensors(output) for output in outputs):
        raise ValueError(f"{path} differs in its structure between micro-batches: {outputs}.")
    return outputs[-1]


def _combined_tensors(outputs: list[Tensor], runs: Sequence[_Run], path: str) -> Tensor:
    first = outputs[0]
    shapes = [list(output.shape) for output in outputs]
    if not any(shapes) and first.is_floating_point():
        return _mean(outputs, [run.weight for run in runs])  # type: ignore[no-any-return]
    if not any(shapes):
        return torch.stack(outputs).sum()
    rests = {tuple(shape[1:]) for shape in shapes}
    rows = {sum(shape[:1]) / run.size for shape, run in zip(shapes, runs, strict=True)}  # of each row of the batch
    if all(shapes) and len(rests) == 1 and len(rows) == 1 and rows.pop().is_integer():
        return torch.cat(outputs)
    if all(torch.equal(output, first) for output in outputs):
        return first
    raise ValueError(f"{path} has shapes {shapes} for micro-batches of {[run.size for run in runs]} rows.")
