"""``lightning-smddp verify``: some batches of a user's module, in a pipeline and in one process that accumulates."""

from __future__ import annotations

import copy
import functools
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_smddp.pipeline.partition.self_check import Finding
from lightning_smddp.pytree import items
from lightning_smddp.strategies.lightning import AccumulationStrategy, PipelineStrategy
from lightning_smddp.strategies.tables import print_table

# Relative differences that rounding explains: of values, and of what a step changed in a tensor.
_VALUES = 1e-4
_UPDATES = 5e-3
_ROUNDING = 1e-6  # of a tensor: a change may be within it

STEPS = 4  # of training, and of validation
_UPDATE = "update of "
_LIGHTNINGS = frozenset(vars(LightningModule()))  # attributes that every module has
_LOADERS = ("train_dataloader", "val_dataloader")
_MOST_ROWS = 12  # of a kind, in the table
_QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "num_sanity_val_steps": 0,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}

Seen: TypeAlias = dict[str, tuple[Tensor, float]]
"""By name what a step showed, and what counts as nothing in it."""


@dataclass(frozen=True)
class Difference:
    """One comparison: of what, numbers (or norms of tensors) in both runs, the relative difference, what is allowed."""

    step: str
    name: str
    expected: float
    actual: float
    relative: float
    tolerance: float

    @property
    def matters(self) -> bool:
        """Whether it is more than rounding explains; NaN, which compares as False, matters."""
        return not self.relative <= self.tolerance

    def text(self) -> str:
        """Both values and their relative difference, in a line."""
        return _in_words(self.expected, self.actual, self.relative)


def _in_words(expected: float, actual: float, difference: float) -> str:
    return f"one process {expected:.7g}, pipeline {actual:.7g}, difference {difference:.1e}"


def compare_runs(alone: Mapping[str, Seen], piped: Mapping[str, Seen]) -> list[Difference]:
    """Step after step, by name: what it returned, logged and set in the module, and how it changed the module's state.

    A step's change is compared, in terms of the change: an update that is wrong altogether is a small part of a weight,
    and what has gone wrong in one step does not count in the next one's again.
    """
    found = []
    for step in dict.fromkeys([*alone, *piped]):  # of both, each once
        one, other = alone.get(step, {}), piped.get(step, {})
        for name in dict.fromkeys([*one, *other]):
            value, nothing = one.get(name, (None, 0.0))
            piped_value, _ = other.get(name, (None, 0.0))
            tolerance = _UPDATES if name.startswith(_UPDATE) else _VALUES
            relative = float("inf")
            if value is not None and piped_value is not None and value.shape == piped_value.shape:
                relative = float((value - piped_value).norm()) / max(float(value.norm()), nothing)
            found.append(Difference(step, name, _shown(value), _shown(piped_value), relative, tolerance))
    return found


def _shown(value: Tensor | None) -> float:
    """The number itself, with its sign, of one element; the norm of several."""
    if value is None:
        return float("nan")
    return float(value) if value.numel() == 1 else float(value.norm())


class _Recorder(Callback):
    """Writes to a file, on the first rank, what each step showed and changed; and what the check found."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps: dict[str, Seen] = {}
        self.state: dict[str, Tensor] = {}  # before the next step
        self.counts: list[int] = []  # of micro-batches, in the order of all batches
        self.of_strategy: dict[str, Any] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.state = _plain(pl_module.state_dict())

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        # Collective, so every rank calls it. The first one, which writes the file, gets all.
        state = _plain(trainer.strategy.lightning_module_state_dict())
        seen = self._shown(self._next("step"), trainer, pl_module, outputs)
        for name, value in state.items():
            before = self.state.get(name)
            if before is not None and not torch.equal(value, before):
                seen[f"{_UPDATE}{name}"] = value - before, _ROUNDING * float(value.norm())
        self.state = state
        if isinstance(trainer.strategy, PipelineStrategy):
            findings = [asdict(finding) for finding in trainer.strategy.findings]
            self.of_strategy = {"findings": findings, "loss_weight": trainer.strategy.chosen_loss_weight}

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        self._shown(self._next("validation step"), trainer, pl_module, outputs)

    def _next(self, kind: str) -> str:
        return f"{kind} {1 + sum(name.startswith(kind) for name in self.steps)}"

    def _shown(self, step: str, trainer: Trainer, pl_module: LightningModule, outputs: Any) -> Seen:
        if isinstance(trainer.strategy, PipelineStrategy):
            self.counts.append(trainer.strategy.last_microbatches)
        attributes = {name: value for name, value in vars(pl_module).items() if name not in _LIGHTNINGS}
        kinds = {"output": outputs, "logged": dict(trainer.callback_metrics), "attribute": attributes}
        seen: Seen = {}
        for kind, values in kinds.items():
            for name, value in _plain(values).items():
                seen[f"{kind} {name!r}" if name else kind] = value, 1e-8
        self.steps[step] = seen
        return seen

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self._shown("at the end", trainer, pl_module, None)
            torch.save({"steps": self.steps, "counts": self.counts, **self.of_strategy}, self.path)


def verify(
    module: LightningModule,
    data: LightningDataModule | None,
    ranks: int,
    pipeline: PipelineStrategy,
    callbacks: Sequence[Callback] = (),
) -> int:
    """Train some batches under ``pipeline`` on ``ranks`` CPU processes, and print the comparison.

    It is compared with one process that accumulates gradients over the same micro-batches. Replicas get the same
    batches.

    Returns:
        0 if the pipeline computes what the module computes, 1 if not.
    """
    if not isinstance(module, LightningModule):
        print(f"{type(module).__name__} is no LightningModule: give the class that has the `training_step`.")
        return 1
    if data is None and not is_overridden("train_dataloader", module):
        print(f"{type(module).__name__} has no train_dataloader: give --datamodule module:Class.")
        return 1
    # All runs are on the same batches, which are those that the user's loaders give in one process.
    for name, loader in _first_batches(module, data).items():
        setattr(module if data is None else data, name, functools.partial(_given, loader))
    with tempfile.TemporaryDirectory(prefix="smddp_verify_") as folder:
        path = Path(folder, "pipeline")
        try:
            _fit(module, data, path, callbacks, devices=ranks, strategy=pipeline)
        except Exception as error:  # of a rank, with its traceback as text
            *_, own = re.split(r"\n(?=[A-Z][\w.]*(?:Error|Exception)\b)", str(error))
            print(f"\n{own}")
            return 1
        piped: dict[str, Any] = torch.load(path, weights_only=True)
        # As many micro-batches as the pipeline made of each batch, with the weights that it found.
        counts = iter(piped["counts"])
        weight = pipeline.options.loss_weight
        accumulation = AccumulationStrategy(
            num_microbatches=lambda rows: next(counts),
            loss_weight=piped["loss_weight"] if weight == "auto" else weight,
        )
        _fit(module, data, Path(folder, "alone"), callbacks, devices=1, strategy=accumulation)
        alone: dict[str, Any] = torch.load(Path(folder, "alone"), weights_only=True)
    show([Finding(**finding) for finding in piped["findings"]])
    return _judge(alone["steps"], piped["steps"])


def _judge(alone: Mapping[str, Seen], piped: Mapping[str, Seen]) -> int:
    """Print how the pipeline's steps differ from one process's, and say the same in the last line."""
    differences = compare_runs(alone, piped)
    wrong = [difference for difference in differences if difference.matters]
    print_table("verify: four batches", _rows(differences, wrong))
    if wrong:
        first = wrong[0]
        print(f"The pipeline differs from one process, first in {first.step}, {first.name}: {first.text()}.")
        return 1
    validated = sum(step.startswith("validation") for step in piped)
    print(
        "The pipeline computes what one process computes that accumulates gradients over the same micro-batches: "
        f"{len(piped) - validated - 1} training and {validated} validation steps are the same."
    )
    return 0


def _rows(differences: Sequence[Difference], wrong: Sequence[Difference]) -> list[tuple[str, str]]:
    """One page: what differs, step after step; then by name the step in which it is furthest off."""
    rows = [(f"DIFFERS: {difference.step}, {difference.name}", difference.text()) for difference in wrong[:_MOST_ROWS]]
    if len(wrong) > _MOST_ROWS:
        rows.append(("DIFFERS", f"{len(wrong) - _MOST_ROWS} more"))
    furthest: dict[str, Difference] = {}  # by name; one for all updates
    for difference in differences:
        name = _UPDATE if difference.name.startswith(_UPDATE) else difference.name
        other = furthest.get(name)
        if not difference.matters and (other is None or difference.relative > other.relative):
            furthest[name] = difference
    shown = list(furthest.values())[: 2 * _MOST_ROWS]
    rows += [(f"{difference.step}, {difference.name}", difference.text()) for difference in shown]
    if len(furthest) > len(shown):
        rows.append(("the same", f"{len(furthest) - len(shown)} more values"))
    return rows


# ---- runs ------------------------------------------------------------------------------------------------------------


def _fit(
    module: LightningModule,
    data: LightningDataModule | None,
    path: Path,
    callbacks: Sequence[Callback],
    devices: int,
    strategy: Any,
) -> None:
    """Train a copy for some steps; what was seen of it is at ``path``."""
    module, data, callbacks = copy.deepcopy((module, data, list(callbacks)))  # what they share stays shared
    seed_everything(0, verbose=False)  # on new processes, too
    options = {**_QUIET, "max_steps": STEPS, "limit_val_batches": STEPS}
    trainer = Trainer(devices=devices, strategy=strategy, callbacks=[*callbacks, _Recorder(path)], **options)
    trainer.fit(module, datamodule=data)


def _first_batches(module: LightningModule, data: LightningDataModule | None) -> dict[str, Any]:
    """Loaders of the first batches of the user's loaders, by the hook that gives these: Lightning calls it in a run."""
    module, data = copy.deepcopy((module, data))
    source = module if data is None else data
    found: dict[str, Any] = {}
    for name in _LOADERS:
        if is_overridden(name, source):
            setattr(source, name, functools.partial(_keep, getattr(source, name), found, name))
    trainer = Trainer(devices=1, max_epochs=1, limit_train_batches=1, limit_val_batches=1, **_QUIET)
    trainer.fit(module, datamodule=data)
    return found


def _keep(hook: Any, found: dict[str, Any], name: str) -> Any:
    """What ``hook`` gives, cut to some batches and kept."""
    found[name] = _cut(hook())
    return found[name]


class _Batches:
    """A loader of batches that are there; a list of lists would be a list of loaders.

    It says the rows of a batch where the user's loader does, so that batches are cut as in training.
    """

    def __init__(self, batches: list[Any], batch_size: int | None) -> None:
        self.batches, self.batch_size = batches, batch_size

    def __iter__(self) -> Iterator[Any]:
        return iter(copy.deepcopy(self.batches))  # a step may change its batch

    def __len__(self) -> int:
        return len(self.batches)


def _cut(loader: Any) -> Any:
    """The first batches of a loader, or of each in a collection of them."""
    if isinstance(loader, Mapping):
        return {key: _cut(value) for key, value in loader.items()}
    if isinstance(loader, (list, tuple)):
        return [_cut(value) for value in loader]
    sampler = getattr(loader, "batch_sampler", None)
    batch_size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
    return _Batches(list(islice(loader, STEPS)), batch_size)


def _given(batches: Any) -> Any:
    return batches


def _plain(structure: Any) -> dict[str, Tensor]:
    """Tensors and numbers in a structure, by their places, in double precision."""
    found: dict[str, Tensor] = {}
    for path, leaf in items(structure):
        if isinstance(leaf, (bool, int, float, Tensor)):
            found[".".join(map(str, path))] = torch.as_tensor(leaf).detach().to("cpu", torch.float64, copy=True)
    return found


def show(findings: Sequence[Finding]) -> None:
    """A row for the loss and for each unit."""
    rows = []
    for finding in findings:
        name = finding.name if finding.stage is None else f"{finding.name} (stage {finding.stage})"
        rows.append((name, _in_words(finding.expected, finding.actual, finding.difference)))
    print_table("verify: one micro-batch's loss, and the norm of each unit's gradient", rows)
