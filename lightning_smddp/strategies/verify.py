"""``lightning-smddp verify``: some batches of a user's module, in a pipeline and in one process."""

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
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lightning_smddp.pipeline.partition.verify import Finding, VerificationError
from lightning_smddp.strategies.lightning import PipelineStrategy
from lightning_smddp.strategies.pipeline_options import PartitionOptions
from lightning_smddp.strategies.tables import print_table
from lightning_smddp.wire.pytree import items
from lightning_smddp.wording import counted

# Relative differences that rounding explains: of values, and of what a step changed in a tensor.
_VALUES = 1e-4
_UPDATES = 5e-3

STEPS = 2  # of training, and of validation
_LOADERS = ("train_dataloader", "val_dataloader")
_MOST_ROWS = 12  # of a kind, in the table
_QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "max_steps": STEPS,
    "limit_val_batches": STEPS,
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
    """Losses and outputs of each training step, what it logged, how far it moved weights and buffers; validation."""
    found = []
    steps, piped_steps = alone["training"], piped["training"]
    if len(steps) != len(piped_steps):
        count, piped_count = float(len(steps)), float(len(piped_steps))
        found.append(Difference("the number of training steps", count, piped_count, 1.0, 0.0))
    # What a step changed is the difference to the same run's state before it, so that what has gone wrong in one step
    # does not count in the next one's row again. Both runs begin with the same weights.
    before = piped_before = alone["initial"]
    for number, (step, piped_step) in enumerate(zip(steps, piped_steps, strict=False), start=1):
        found += _values(f"step {number}, output", step["outputs"], piped_step["outputs"])
        found += _values(f"step {number}, logged", step["logged"], piped_step["logged"])
        after, piped_after = step["state"], piped_step["state"]
        found += _moved(f"step {number}, update", (before, after), (piped_before, piped_after))
        before, piped_before = after, piped_after
    validations = zip(alone["validation"], piped["validation"], strict=False)
    for number, (outputs, piped_outputs) in enumerate(validations, start=1):
        found += _values(f"validation step {number}, output", outputs, piped_outputs)
    found += _values("after validation, logged", alone["logged"], piped["logged"])
    return found


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
            "logged": {},
            "findings": [],
        }

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        initial = {}
        for name, value in pl_module.state_dict().items():
            initial[name] = value.detach().clone()
        self.seen["initial"] = initial

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Collective, so every rank calls it. The first one, which writes the file, gets all.
        copies = {}
        for name, value in trainer.strategy.lightning_module_state_dict().items():
            if isinstance(value, torch.Tensor):
                copies[name] = value.detach().clone()
        step = {
            "outputs": _plain(outputs),
            "state": copies,
            "logged": _plain(dict(trainer.callback_metrics)),
        }
        self.seen["training"].append(step)
        findings = getattr(trainer.strategy, "findings", [])  # of the check of the first batch; none in one process
        self.seen["findings"] = [asdict(finding) for finding in findings]

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self.seen["validation"].append(_plain(outputs))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self.seen["logged"] = _plain(dict(trainer.callback_metrics))
            torch.save(self.seen, self.path)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, VerificationError) and trainer.is_global_zero:
            show(exception.findings)


def verify(
    module: LightningModule,
    data: LightningDataModule | None,
    ranks: int,
    stages_per_rank: int | Literal["auto"] = "auto",
    **options: Any,
) -> int:
    """Train some batches under ``PipelineStrategy(**options)`` on ``ranks`` CPU processes, and print the comparison.

    Replicas get the same batches. Dropout is turned off, as its random numbers are others in a pipeline.

    Returns:
        0 if the pipeline computes what the module computes, 1 if not.
    """
    if not isinstance(module, LightningModule):
        print(f"{type(module).__name__} is no LightningModule: give the class that has the `training_step`.")
        return 1
    if data is None and not is_overridden("train_dataloader", module):
        print(f"{type(module).__name__} has no train_dataloader: give --datamodule module:Class.")
        return 1
    _without_dropout(module)
    # Three runs on the same batches, which are those that the user's loaders give in the first one: in one process, in
    # one process with another seed, and in the pipeline. What differs between the first two is random in the step
    # itself, and tells nothing of the pipeline.
    with tempfile.TemporaryDirectory(prefix="smddp_verify_") as directory:
        folder = Path(directory)
        alone, loaders = _alone(module, data, folder / "alone", {}, seed=0)
        again, _ = _alone(module, data, folder / "again", loaders, seed=1)
        partition = PartitionOptions(stages_per_rank=stages_per_rank)
        strategy = PipelineStrategy(start_method="spawn", partition=partition, **options)
        recorder = _Recorder(folder / "pipeline")
        _give(module if data is None else data, loaders)
        try:
            _fit(module, data, recorder, devices=ranks, strategy=strategy)
        except Exception as error:  # of a child, as text
            print(f"\n{error}")
            return 1
        piped = torch.load(recorder.path, weights_only=True)
    show([Finding(**finding) for finding in piped["findings"]])
    return _judge(alone, again, piped)


def _judge(alone: Mapping[str, Any], again: Mapping[str, Any], piped: Mapping[str, Any]) -> int:
    """Print how the pipeline's steps differ from one process's, and say the same in the last line."""
    between_seeds = compare_runs(alone, again)
    by_chance = {difference.name for difference in between_seeds if difference.matters}
    differences = compare_runs(alone, piped)
    certain = [difference for difference in differences if difference.name not in by_chance]
    wrong = [difference for difference in certain if difference.matters]
    if certain:
        print_table("verify: whole batches, step after step", _rows(certain, wrong))
    if wrong:
        first = wrong[0]
        print(f"The pipeline differs from one process, first in {first.name}: {first.text()}.")
        return 1
    if by_chance:
        print(
            "The loss and gradients of one micro-batch are those of one process. Whole batches could not be compared "
            f"in {counted(len(by_chance), 'respect')} (such as {min(by_chance)}), which differ from run to run in "
            "one process "
            "too: the step draws random numbers."
        )
        return 0
    trained = len(piped["training"])
    validated = len(piped["validation"])
    print(
        f"The pipeline computes what the module computes in one process: {trained} training and {validated} validation "
        "steps are the same."
    )
    return 0


def _rows(certain: Sequence[Difference], wrong: Sequence[Difference]) -> list[tuple[str, str]]:
    """One page: what differs, then values, and of the tensors that a step updated the one that is furthest off."""
    values = []
    worst: dict[str, Difference] = {}  # by group
    for difference in certain:
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


def _alone(
    module: LightningModule, data: LightningDataModule | None, path: Path, loaders: dict[str, Any], seed: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run of copies in this process; and the batches that it saw, by the hook that gave them."""
    module, data = copy.deepcopy((module, data))  # in one call: what they share stays shared
    loaders = dict(loaders)
    source = module if data is None else data
    if loaders:
        _give(source, loaders)
    else:
        for name in _LOADERS:
            if is_overridden(name, source):
                hook = getattr(source, name)
                setattr(source, name, functools.partial(_keep, hook, loaders, name))
    torch.manual_seed(seed)
    _fit(module, data, _Recorder(path), devices=1, strategy="auto")
    return torch.load(path, weights_only=True), loaders


def _fit(
    module: LightningModule, data: LightningDataModule | None, recorder: _Recorder, devices: int, strategy: Any
) -> None:
    trainer = Trainer(devices=devices, strategy=strategy, callbacks=[recorder], **_QUIET)
    trainer.fit(module, datamodule=data)


def _keep(hook: Any, loaders: dict[str, Any], name: str) -> Any:
    """What ``hook`` gives, cut to some batches and kept."""
    loaders[name] = _cut(hook())
    return loaders[name]


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


def _give(source: LightningModule | LightningDataModule, loaders: Mapping[str, Any]) -> None:
    for name, batches in loaders.items():
        setattr(source, name, functools.partial(_given, batches))


def _given(batches: Any) -> Any:
    return batches


def _without_dropout(module: nn.Module) -> None:
    """Set every probability to 0: ``p`` of dropout modules, and numbers that others call ``dropout`` or the like."""
    for child in module.modules():
        is_dropout = "dropout" in type(child).__name__.lower()
        for name, value in list(vars(child).items()):
            is_probability = "drop" in name.lower() or (is_dropout and name == "p")
            if is_probability and isinstance(value, float):
                setattr(child, name, 0.0)


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
