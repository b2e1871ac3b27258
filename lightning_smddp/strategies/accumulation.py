"""One process that accumulates gradients over micro-batches: what the numbers of a pipeline are, by definition.

Nothing here is of a pipeline, whose defects could hide in both: a plain loop calls the user's step for one part of the
batch after the other, and what the calls logged and returned is put together. Tests of pipelines, and
``lightning-smddp verify``, compare with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from statistics import mode
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_smddp._compat.torch import forward_cache, set_forward_cache
from lightning_smddp.patches import patched
from lightning_smddp.pytree import Path, items, members_of, tensors, with_members
from lightning_smddp.seeding import Generators, mix, run_seed, seeded_modules, step_seed

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.strategies import SingleDeviceStrategy as _Base
else:
    _Base = object

_IGNORED = -100  # the label that does not count
_LABELS = ("labels", "shifted_labels")
_REDUCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}


@dataclass
class _Logged:
    """One call of ``self.log``: in which run, with what, and the number that it was then."""

    run: _Run
    value: Any
    number: Tensor | None
    args: tuple[Any, ...]
    options: dict[str, Any]


@dataclass
class _Run:
    """The step's run on one micro-batch: what it weighs, returned and logged."""

    batch: Any
    rows: int
    weight: float
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

    Random numbers follow from the run's seed, the step, the micro-batch and the modules that draw.
    A training step that returns None for one micro-batch makes it not count; for all, Lightning skips the batch.

    Args:
        num_microbatches: of each batch, or a function that gives it for a number of rows; fewer where a batch has fewer
            rows. Bigger ones come first.
        loss_weight: what a micro-batch weighs: its ``"rows"``; its ``"labels"`` that are not -100, or
            ``"shifted_labels"``, the same without the first column; ``"sum"``: losses are added; the name of an entry
            of the batch, such as a mask, whose sum counts; or a function of the micro-batch.
        split_batch: called with a batch and a number of micro-batches, returns them as a list of pairs of a batch and
            its number of rows. By default the module's method of this name, else whatever has the length that most
            tensors have is cut.
        **kwargs: of Lightning's ``SingleDeviceStrategy``, such as ``device``.

    Raises:
        ValueError: a module optimizes manually; batches have no entry of that name.
        RuntimeError: tensors in outputs of micro-batches cannot be concatenated.
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
            raise ValueError("Micro-batches need automatic optimization: else use another strategy.")
        runs = self._run(super().training_step, *args, *kwargs.values())
        counting = [run for run in runs if run.output is not None]
        self._log(counting or runs)
        if not counting:
            return None
        if any(run.loss is None for run in counting):
            return counting[0].output  # which Lightning refuses
        output, loss = _combined([run.output for run in counting], counting), self._accumulated(counting)
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    def _accumulated(self, runs: Sequence[_Run]) -> Tensor:
        """The batch's loss, whose backward pass goes through one micro-batch after the other."""
        # So hooks of parameters run for each micro-batch, while Lightning's `backward` and its hooks come once.
        total = sum(run.weight for run in runs)
        shares = [1.0 if self.loss_weight == "sum" else run.weight / total for run in runs]
        # What counts nothing may be NaN, as a mean over no labels is.
        parts: list[tuple[Any, float]] = [(run.loss, share) for run, share in zip(runs, shares, strict=True) if share]

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
        return _combined([run.output for run in runs], runs)

    def _run(self, step: Callable[..., Any], batch: Any, *rest: Any) -> list[_Run]:
        parts = self._cut(batch)
        weights = self._weights(step.__name__, batch, parts)
        runs = [_Run(*part, weight) for part, weight in zip(parts, weights, strict=True)]
        indices = [index for index in rest if isinstance(index, int)]
        seed = step_seed(run_seed() % 2**31, step.__name__, self._module.current_epoch, *indices)
        with self._drawing() as generators:
            for number, run in enumerate(runs):
                generators.seed(mix(seed, number))
                with self._recording(run):
                    run.output = step(run.batch, *rest)
        return runs

    @contextmanager
    def _drawing(self) -> Iterator[Generators]:
        """Modules draw random numbers of their own, and what they draw counts for nothing outside."""
        generators = Generators(self._module, self.root_device)
        with generators.preserved(), seeded_modules(self._module, generators):
            yield generators

    # ---- a batch's parts ----

    def _cut(self, batch: Any) -> list[tuple[Any, int]]:
        """Micro-batches with their numbers of rows."""
        rows = _rows(batch)
        count = self.num_microbatches if isinstance(self.num_microbatches, int) else self.num_microbatches(rows)
        split = self.split_batch or getattr(self._module, "split_batch", None)
        if split is not None and count > 1:
            return list(split(batch, count))
        if min(rows, count) <= 1:  # also where it cannot be cut, as what is sparse
            return [(batch, rows)]
        ranges = torch.arange(rows).tensor_split(min(rows, count))  # the first ones one longer
        return [(_take(batch, rows, slice(int(r[0]), int(r[-1]) + 1)), len(r)) for r in ranges]

    def _weights(self, hook: str, batch: Any, parts: Sequence[tuple[Any, int]]) -> list[float]:
        """How much each part counts; its rows where nothing of the batch counts otherwise."""
        weights: list[float] = []
        if callable(self.loss_weight):
            weights = [float(self.loss_weight(part)) for part, _ in parts]
        elif self.loss_weight not in ("rows", "sum"):
            place = self._place_of_weights(batch)
            if place is not None:
                weights = [self._count(dict(items(part))[place]) for part, _ in parts]
            elif (
                hook == "training_step" and self.loss_weight not in _LABELS
            ):  # without a -100 as many count of each row
                raise ValueError(f"loss_weight={self.loss_weight!r} does not fit the batch, which has no such tensor.")
        return weights if sum(weights) > 0 else [size for _, size in parts]

    def _place_of_weights(self, batch: Any) -> Path | None:
        """Where the batch has what is counted: under its key; labels also where -100 is among integers."""
        name = "labels" if self.loss_weight in _LABELS else self.loss_weight
        found = _with_rows(batch)
        places = [path for path, _ in found if path[-1:] == (name,)]
        if name == "labels":
            places += [path for path, leaf in found if not leaf.is_floating_point() and bool(leaf.eq(_IGNORED).any())]
        return places[0] if places else None

    def _count(self, leaf: Tensor) -> float:
        if self.loss_weight == "shifted_labels":
            leaf = leaf[:, 1:]
        if self.loss_weight in _LABELS:
            leaf = leaf != _IGNORED
        return float(leaf.sum())

    # ---- logging ----

    @contextmanager
    def _recording(self, run: _Run) -> Iterator[None]:
        """Keep what ``self.log`` is called with."""
        calls = Counter[str]()

        def log(name: str, value: Any, *args: Any, **options: Any) -> None:
            if isinstance(value, Metric):
                number = forward_cache(value)
            else:
                number = torch.as_tensor(value, dtype=torch.get_default_dtype()).detach().reshape(())
            run.logs[name, calls[name]] = _Logged(run, value, number, args, options)
            calls[name] += 1

        with patched([(vars(self._module), "log", log)]):
            yield

    def _log(self, runs: Sequence[_Run]) -> None:
        """Log each name once, over those runs that logged it."""
        for key in dict.fromkeys(key for run in runs for key in run.logs):
            logs = [run.logs[key] for run in runs if key in run.logs]
            last, value = logs[-1], self._reduced(logs)
            options = {**last.options}
            if isinstance(last.value, Metric):
                set_forward_cache(last.value, value)  # of the step; that of an epoch is computed of its state
                value = last.value
            if options.get("batch_size") is not None:
                options["batch_size"] = sum(log.options["batch_size"] for log in logs)
            self._module.log(key[0], value, *last.args, **options)

    def _reduced(self, logs: Sequence[_Logged]) -> Any:
        last, numbers = logs[-1], [log.number for log in logs]
        if any(number is None for number in numbers):
            return last.number  # metrics that were updated alone
        fx = last.options.get("reduce_fx", "mean")
        reduction = _REDUCTIONS.get(getattr(fx, "__name__", fx))
        if self.loss_weight == "sum" and all(map(_is_loss, logs)):
            reduction = torch.sum
        if reduction is None or isinstance(last.value, Metric):
            weights = [log.options.get("batch_size") or log.run.weight for log in logs]
            return _mean(numbers, weights)
        return reduction(torch.stack(numbers))  # type: ignore[arg-type]


def _mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """The weighted mean, without what weighs nothing: a mean over no labels is NaN."""
    return sum(value * weight for value, weight in zip(values, weights, strict=True) if weight) / sum(weights)


def _is_loss(logged: _Logged) -> bool:
    """Whether it is the loss, detached or not."""
    value, loss = logged.value, logged.run.loss
    return loss is not None and isinstance(value, Tensor) and value.data_ptr() == loss.data_ptr()


# ---- rows of a batch -------------------------------------------------------------------------------------------------


def _with_rows(batch: Any) -> list[tuple[Path, Tensor]]:
    """The tensors of a batch that have dimensions."""
    return [(path, leaf) for path, leaf in items(batch) if isinstance(leaf, Tensor) and leaf.dim()]


def _rows(batch: Any) -> int:
    """The length that most tensors of a batch have, but for those in inner lists, which may be of a row each."""
    lengths = [len(leaf) for path, leaf in _with_rows(batch) if not any(isinstance(key, int) for key in path[1:])]
    return mode(lengths or [1])


def _take(value: Any, rows: int, part: slice) -> Any:
    """Part of a batch: of its tensors, of objects that slice as these do, of its lists with an entry for each row."""
    if isinstance(value, Tensor):
        return value[part] if value.dim() and len(value) == rows else value
    is_fields = any(tensor.dim() and len(tensor) == rows for tensor in tensors(value))
    if isinstance(value, (list, tuple)) and len(value) == rows and not is_fields:
        return value[part]
    if not isinstance(value, (dict, list, tuple, str, bytes)):
        with suppress(Exception):  # whatever an object raises that has no rows
            taken = value[part]
            if type(taken) is type(value) and len(value) == rows:
                return taken
    members = members_of(value)
    if members is None:
        return value
    return with_members(value, [(key, _take(member, rows, part)) for key, member in members])


# ---- outputs of micro-batches ----------------------------------------------------------------------------------------


def _combined(outputs: list[Any], runs: Sequence[_Run]) -> Any:
    """One output of those of micro-batches."""
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if isinstance(first, Tensor):
        return _combined_tensors(outputs, runs)
    if type(first) is float:
        return _mean(outputs, [run.weight for run in runs])
    if type(first) is int:
        return sum(outputs)
    if isinstance(first, list) and all(len(output) == run.rows for output, run in zip(outputs, runs, strict=True)):
        return sum(outputs, [])
    members = [dict(members_of(output) or ()) for output in outputs]
    if not members[0]:
        return outputs[-1]
    return with_members(first, [(key, _combined([member[key] for member in members], runs)) for key in members[0]])


def _combined_tensors(outputs: list[Tensor], runs: Sequence[_Run]) -> Tensor:
    first = outputs[0]
    if not first.dim():
        mean: Tensor = _mean(outputs, [run.weight for run in runs])
        return mean if first.is_floating_point() else torch.stack(outputs).sum()
    for_each_row = {len(output) / run.rows for output, run in zip(outputs, runs, strict=True)}
    if len(for_each_row) > 1 and all(torch.equal(output, first) for output in outputs):
        return first
    return torch.cat(outputs)
