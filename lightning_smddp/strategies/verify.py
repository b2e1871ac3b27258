"""``lightning-smddp verify``: some batches of a user's module, in a pipeline and in one process that accumulates."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_smddp.pipeline.partition.self_check import Finding, VerificationError
from lightning_smddp.pytree import items
from lightning_smddp.strategies.lightning import AccumulationStrategy, PipelineStrategy
from lightning_smddp.strategies.pipeline import PipelineParallel
from lightning_smddp.strategies.pipeline_options import PartitionOptions
from lightning_smddp.strategies.tables import print_table

# Relative differences that rounding explains: of values, and of what a step changed in a tensor.
_VALUES = 1e-4
_UPDATES = 5e-3

STEPS = 4  # of training, and of validation
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


@dataclass(frozen=True)
class Difference:
    """One comparison.

    Attributes:
        name: of what.
        expected, actual: numbers, in one process and in the pipeline: values, or norms of tensors.
        relative: the difference.
        tolerance: that rounding explains.
        group: of the tensors that one step updated.
    """

    name: str
    expected: float
    actual: float
    relative: float
    tolerance: float
    group: str = ""

    @property
    def tensor(self) -> str:
        """Its name within the group."""
        return self.name.removeprefix(f"{self.group} of ")

    @property
    def matters(self) -> bool:
        """Whether it is more than rounding explains; NaN, which compares as False, matters."""
        return not self.relative <= self.tolerance

    def text(self) -> str:
        """Both values and their relative difference, in a line."""
        return _in_words(self.expected, self.actual, self.relative)


def _in_words(expected: float, actual: float, difference: float) -> str:
    return f"one process {expected:.7g}, pipeline {actual:.7g}, difference {difference:.1e}"


def compare_runs(alone: Mapping[str, Any], piped: Mapping[str, Any]) -> list[Difference]:
    """Of each step what it returned, logged and set in the module; how far it moved weights and buffers."""
    found = []
    steps, piped_steps = alone["training"], piped["training"]
    if len(steps) != len(piped_steps):
        count, piped_count = float(len(steps)), float(len(piped_steps))
        found.append(Difference("the number of training steps", count, piped_count, 1.0, 0.0))
    # What a step changed is the difference to the same run's state before it, so that what has gone wrong in one step
    # does not count in the next one's row again. Both runs begin with the same weights.
    before = piped_before = alone["initial"]
    for number, (step, piped_step) in enumerate(zip(steps, piped_steps, strict=False), start=1):
        found += _shown_in(f"step {number}", step, piped_step)
        after, piped_after = step["state"], piped_step["state"]
        found += _moved(f"step {number}, update", (before, after), (piped_before, piped_after))
        before, piped_before = after, piped_after
    validations = zip(alone["validation"], piped["validation"], strict=False)
    for number, (step, piped_step) in enumerate(validations, start=1):
        found += _shown_in(f"validation step {number}", step, piped_step)
    return found + _shown_in("at the end", alone["end"], piped["end"])


def _shown_in(where: str, alone: Mapping[str, Any], piped: Mapping[str, Any]) -> list[Difference]:
    found = _values(f"{where}, output", alone["outputs"], piped["outputs"])
    found += _values(f"{where}, logged", alone["logged"], piped["logged"])
    return found + _values(f"{where}, attribute", alone["attributes"], piped["attributes"])


def _values(where: str, alone: Mapping[str, Tensor], piped: Mapping[str, Tensor]) -> list[Difference]:
    found = []
    for name in dict.fromkeys([*alone, *piped]):  # names of both, each once
        label = where
        if name:
            label = f"{where} {name!r}"
        one, other = alone.get(name), piped.get(name)
        if one is None or other is None or one.shape != other.shape:
            found.append(Difference(label, _norm(one), _norm(other), float("inf"), _VALUES))
        else:
            relative = _apart(one, other) / max(_norm(one), 1e-8)
            found.append(Difference(label, _shown(one), _shown(other), relative, _VALUES))
    return found


def _moved(group: str, alone: tuple[Any, Any], piped: tuple[Any, Any]) -> list[Difference]:
    """Each tensor of the state that a step changed: the difference, in terms of the change.

    Args:
        group: the name of the group, in words.
        alone: the states before and after the step in one process.
        piped: those in the pipeline.
    """
    before, after = alone
    piped_before, piped_after = piped
    found = []
    for name, value in after.items():
        if name not in piped_after or name not in before or not value.is_floating_point():
            continue
        change = _apart(value, before[name])
        piped_change = _apart(piped_after[name], piped_before[name])
        if change or piped_change:
            # In terms of the step, not of the weight: an update that is wrong altogether is a small part of a weight.
            floor = 1e-6 * _norm(value)  # the change may be within rounding of the value itself
            relative = _apart(value, piped_after[name]) / max(change, floor, 1e-30)
            found.append(Difference(f"{group} of {name}", change, piped_change, relative, _UPDATES, group))
    return found


def _apart(one: Tensor, other: Tensor) -> float:
    difference = one.double() - other.double()
    return float(difference.norm())


def _norm(value: Tensor | None) -> float:
    if value is None:
        return float("nan")
    return float(value.double().norm())


def _shown(value: Tensor) -> float:
    """The number itself, with its sign, of one element; the norm of several."""
    if value.numel() == 1:
        return float(value)
    return _norm(value)


class _Recorder(Callback):
    """Writes to a file, on the first rank, what each step showed and left behind; and what the check found."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Of each step what it showed; "initial", the state before the first one, comes later.
        self.seen: dict[str, Any] = {
            "training": [],
            "validation": [],
            "counts": [],  # of micro-batches, in the order of all batches
            "loss_weight": "rows",
            "findings": [],
        }

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen["initial"] = _plain(pl_module.state_dict())

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Collective, so every rank calls it. The first one, which writes the file, gets all.
        state = trainer.strategy.lightning_module_state_dict()
        self.seen["training"].append({**self._shown(trainer, pl_module, outputs), "state": _plain(state)})
        if isinstance(trainer.strategy, PipelineParallel):
            self.seen["findings"] = [asdict(finding) for finding in trainer.strategy.findings]
            self.seen["loss_weight"] = trainer.strategy.chosen_loss_weight

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self.seen["validation"].append(self._shown(trainer, pl_module, outputs))

    def _shown(self, trainer: Trainer, pl_module: LightningModule, outputs: Any) -> dict[str, Any]:
        if isinstance(trainer.strategy, PipelineParallel):
            self.seen["counts"].append(trainer.strategy.last_microbatches)
        attributes = {name: value for name, value in vars(pl_module).items() if name not in _LIGHTNINGS}
        return {
            "outputs": _plain(outputs),
            "logged": _plain(dict(trainer.callback_metrics)),
            "attributes": _plain(attributes),
        }

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self.seen["end"] = self._shown(trainer, pl_module, None)
            torch.save(self.seen, self.path)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, VerificationError) and trainer.is_global_zero:
            show(exception.findings)


def verify(
    module: LightningModule,
    data: LightningDataModule | None,
    ranks: int,
    stages_per_rank: int | Literal["auto"] = "auto",
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> int:
    """Train some batches under ``PipelineStrategy(**options)`` on ``ranks`` CPU processes, and print the comparison.

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
    partition = PartitionOptions(stages_per_rank=stages_per_rank)
    pipeline = PipelineStrategy(start_method="spawn", partition=partition, **options)
    with tempfile.TemporaryDirectory(prefix="smddp_verify_") as folder:
        try:
            _fit(module, data, Path(folder, "pipeline"), callbacks, devices=ranks, strategy=pipeline)
        except Exception as error:  # of a child, as text
            print(f"\n{error}")
            return 1
        piped: dict[str, Any] = torch.load(Path(folder, "pipeline"), weights_only=True)
        # As many micro-batches as the pipeline made of each batch, with the weights that it found.
        counts = iter(piped["counts"])
        weight = options.get("loss_weight", "auto")
        accumulation = AccumulationStrategy(
            num_microbatches=lambda rows: next(counts),
            loss_weight=piped["loss_weight"] if weight == "auto" else weight,
        )
        _fit(module, data, Path(folder, "alone"), callbacks, devices=1, strategy=accumulation)
        alone: dict[str, Any] = torch.load(Path(folder, "alone"), weights_only=True)
    show([Finding(**finding) for finding in piped["findings"]])
    return _judge(alone, piped)


def _judge(alone: Mapping[str, Any], piped: Mapping[str, Any]) -> int:
    """Print how the pipeline's steps differ from one process's, and say the same in the last line."""
    differences = compare_runs(alone, piped)
    wrong = [difference for difference in differences if difference.matters]
    print_table("verify: step after step", _rows(differences, wrong))
    if wrong:
        first = wrong[0]
        print(f"The pipeline differs from one process, first in {first.name}: {first.text()}.")
        return 1
    trained = len(piped["training"])
    validated = len(piped["validation"])
    print(
        "The pipeline computes what one process computes that accumulates gradients over the same micro-batches: "
        f"{trained} training and {validated} validation steps are the same."
    )
    return 0


def _rows(differences: Sequence[Difference], wrong: Sequence[Difference]) -> list[tuple[str, str]]:
    """One page: what differs, then values, and of the tensors that a step updated the one that is furthest off."""
    values = []
    worst: dict[str, Difference] = {}  # by group
    for difference in differences:
        if difference in wrong:
            continue
        if not difference.group:
            values.append(difference)
            continue
        other = worst.get(difference.group)
        if other is None or difference.relative > other.relative:
            worst[difference.group] = difference
    rows = [(f"DIFFERS: {difference.name}", difference.text()) for difference in wrong[:_MOST_ROWS]]
    if len(wrong) > _MOST_ROWS:
        rows.append(("DIFFERS", f"{len(wrong) - _MOST_ROWS} more"))
    rows += [(difference.name, difference.text()) for difference in values[:_MOST_ROWS]]
    if len(values) > _MOST_ROWS:
        rows.append(("the same", f"{len(values) - _MOST_ROWS} more values"))
    for group, difference in worst.items():
        rows.append((f"{group}, worst: {difference.tensor}", difference.text()))
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
    batches = list(islice(loader, STEPS))
    return _Batches(batches, batch_size)


def _given(batches: Any) -> Any:
    return batches


def _plain(structure: Any) -> dict[str, Any]:
    """Tensors and numbers in a structure, by their places."""
    found: dict[str, Any] = {}
    for path, leaf in items(structure):
        if isinstance(leaf, (bool, int, float)):
            leaf = torch.tensor(leaf)
        if isinstance(leaf, torch.Tensor):
            name = ".".join(map(str, path))
            found[name] = leaf.detach().cpu().clone()
    return found


def show(findings: Sequence[Finding]) -> None:
    """A row for the loss and for each unit."""
    rows = []
    for finding in findings:
        name = finding.name
        if finding.stage is not None:
            name += f" (stage {finding.stage})"
        rows.append((name, _in_words(finding.expected, finding.actual, finding.difference)))
    print_table("verify: one micro-batch's loss, and the norm of each unit's gradient", rows)
