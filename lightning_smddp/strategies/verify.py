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

from lightning_smddp.bridge.pipeline_options import PartitionOptions
from lightning_smddp.pipeline.partition.verify import Finding, VerificationError
from lightning_smddp.strategies.lightning import PipelineStrategy
from lightning_smddp.strategies.tables import print_table
from lightning_smddp.wire.pytree import items
from lightning_smddp.wording import counted

_VALUES, _UPDATES = 1e-4, 5e-3  # relative differences that rounding explains

STEPS = 2  # of training, and of validation
_LOADERS = ("train_dataloader", "val_dataloader")
_MOST_ROWS = 12
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
        return f"one process {self.expected:.7g}, pipeline {self.actual:.7g}, difference {self.relative:.1e}"


def compare_runs(alone: Mapping[str, Any], piped: Mapping[str, Any]) -> list[Difference]:
    """Losses and outputs of each training step, what it logged, how far it moved weights and buffers; validation."""
    found = []
    if len(alone["training"]) != len(piped["training"]):
        count, other = float(len(alone["training"])), float(len(piped["training"]))
        found.append(Difference("the number of training steps", count, other, 1.0, 0.0))
    before, other_before = alone["initial"], alone["initial"]
    for number, (one, other_step) in enumerate(zip(alone["training"], piped["training"], strict=False), start=1):
        found += _values(f"step {number}, output", one["outputs"], other_step["outputs"])
        found += _values(f"step {number}, logged", one["logged"], other_step["logged"])
        found += _moved(f"step {number}", (before, one["state"]), (other_before, other_step["state"]))
        before, other_before = one["state"], other_step["state"]
    for number, (first, second) in enumerate(zip(alone["validation"], piped["validation"], strict=False), start=1):
        found += _values(f"validation step {number}, output", first, second)
    return found + _values("after validation, logged", alone["logged"], piped["logged"])


def _values(where: str, one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[Difference]:
    found = []
    for name in dict.fromkeys([*one, *other]):
        label = f"{where} {name!r}" if name else where
        first, second = one.get(name), other.get(name)
        if first is None or second is None or first.shape != second.shape:
            found.append(Difference(label, _norm(first), _norm(second), float("inf"), _VALUES))
        else:
            found.append(_difference(label, first, second, _norm(first), _VALUES))
    return found


def _moved(where: str, one: tuple[Any, Any], other: tuple[Any, Any]) -> list[Difference]:
    """Each tensor of the state that a step changed: the difference, in terms of the change."""
    found = []
    for name, value in one[1].items():
        if name not in other[1] or name not in one[0] or not value.is_floating_point():
            continue
        change = float((value.double() - one[0][name].double()).norm())
        other_change = float((other[1][name].double() - other[0][name].double()).norm())
        if change or other_change:
            # In terms of the step, not of the weight: an update that is wrong altogether is a small part of a weight.
            apart = float((value.double() - other[1][name].double()).norm())
            floor = 1e-6 * float(value.double().norm())  # the change may be within rounding of the value itself
            relative = apart / max(change, floor, 1e-30)
            group = f"{where}, update"
            found.append(Difference(f"{group} of {name}", change, other_change, relative, _UPDATES, group))
    return found


def _difference(label: str, one: Tensor, other: Tensor, scale: float, tolerance: float) -> Difference:
    apart = float((one.double() - other.double()).norm())
    relative = apart / max(scale, 1e-8)
    shown = [float(value) if value.numel() == 1 else _norm(value) for value in (one, other)]
    return Difference(label, shown[0], shown[1], relative, tolerance)


def _norm(value: Tensor | None) -> float:
    return float("nan") if value is None else float(value.double().norm())


class _Recorder(Callback):
    """Writes to a file, on the first rank, what each step showed and left behind; and what the check found."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen: dict[str, Any] = {"training": [], "validation": [], "logged": {}, "findings": []}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen["initial"] = {name: value.detach().clone() for name, value in pl_module.state_dict().items()}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        state = trainer.strategy.lightning_module_state_dict()  # of all ranks
        copies = {name: value.detach().clone() for name, value in state.items() if isinstance(value, torch.Tensor)}
        step = {
            "outputs": _plain(outputs),
            "state": copies,
            "logged": _plain(dict(trainer.callback_metrics)),
        }
        self.seen["training"].append(step)
        self.seen["findings"] = [asdict(finding) for finding in getattr(trainer.strategy, "findings", [])]

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
    with tempfile.TemporaryDirectory(prefix="smddp_verify_") as directory:
        alone, loaders = _alone(module, data, Path(directory) / "alone", {}, seed=0)
        again, _ = _alone(module, data, Path(directory) / "again", loaders, seed=1)
        partition = PartitionOptions(stages_per_rank=stages_per_rank, fallback="error")
        strategy = PipelineStrategy(start_method="spawn", partition=partition, **options)
        recorder = _Recorder(Path(directory) / "pipeline")
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
    by_chance = {difference.name for difference in compare_runs(alone, again) if difference.matters}
    differences = compare_runs(alone, piped)
    certain = [difference for difference in differences if difference.name not in by_chance]
    wrong = [difference for difference in certain if difference.matters]
    if certain:
        print_table("verify: whole batches, step after step", _rows(certain, wrong))
    count, validated = len(piped["training"]), len(piped["validation"])
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
    print(
        f"The pipeline computes what the module computes in one process: {count} training and {validated} validation "
        "steps are the same."
    )
    return 0


def _rows(certain: Sequence[Difference], wrong: Sequence[Difference]) -> list[tuple[str, str]]:
    """One page: what differs, then values, and of the tensors that a step updated the one that is furthest off."""
    values = [difference for difference in certain if difference not in wrong and not difference.group]
    worst: dict[str, Difference] = {}
    for difference in certain:
        if difference.group and difference not in wrong:
            other = worst.get(difference.group)
            if other is None or difference.relative > other.relative:
                worst[difference.group] = difference
    rows = [("DIFFERS: " + difference.name, difference.text()) for difference in wrong[:_MOST_ROWS]]
    if len(wrong) > _MOST_ROWS:
        rows.append(("DIFFERS", f"{len(wrong) - _MOST_ROWS} more"))
    rows += [(difference.name, difference.text()) for difference in values[:_MOST_ROWS]]
    if len(values) > _MOST_ROWS:
        rows.append(("the same", f"{len(values) - _MOST_ROWS} more values"))
    return rows + [(f"{group}, worst: {found.tensor}", found.text()) for group, found in worst.items()]


# ---- runs ------------------------------------------------------------------------------------------------------------


def _alone(
    module: LightningModule, data: LightningDataModule | None, path: Path, loaders: dict[str, Any], seed: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run of copies in this process; and the batches that it saw, by the hook that gave them."""
    module, data = copy.deepcopy((module, data))
    loaders = dict(loaders)
    source = module if data is None else data
    if loaders:
        _give(source, loaders)
    else:
        for name in _LOADERS:
            if is_overridden(name, source):
                setattr(source, name, functools.partial(_keep, getattr(source, name), loaders, name))
    torch.manual_seed(seed)
    _fit(module, data, _Recorder(path), devices=1, strategy="auto")
    return torch.load(path, weights_only=True), loaders


def _fit(
    module: LightningModule, data: LightningDataModule | None, recorder: _Recorder, devices: int, strategy: Any
) -> None:
    Trainer(devices=devices, strategy=strategy, callbacks=[recorder], **_QUIET).fit(module, datamodule=data)


def _keep(hook: Any, loaders: dict[str, Any], name: str) -> Any:
    """What ``hook`` gives, cut to some batches and kept."""
    loaders[name] = _first(hook())
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


def _first(loader: Any) -> Any:
    if isinstance(loader, Mapping):
        return {key: _first(value) for key, value in loader.items()}
    if isinstance(loader, (list, tuple)):
        return [_first(value) for value in loader]
    sampler = getattr(loader, "batch_sampler", None)
    batch_size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
    return _Batches(list(islice(loader, STEPS)), batch_size)


def _give(source: LightningModule | LightningDataModule, loaders: Mapping[str, Any]) -> None:
    for name, batches in loaders.items():
        setattr(source, name, functools.partial(_given, batches))


def _given(batches: Any) -> Any:
    return batches


def _without_dropout(module: nn.Module) -> None:
    for child in module.modules():
        attributes = [name for name, value in vars(child).items() if isinstance(value, float)]
        is_dropout = "dropout" in type(child).__name__.lower()
        for name in attributes:
            if "drop" in name.lower() or (is_dropout and name == "p"):
                setattr(child, name, 0.0)


def _plain(structure: Any) -> dict[str, Any]:
    """Tensors and numbers in a structure, by their places."""
    found: dict[str, Any] = {}
    for path, leaf in items(structure):
        if isinstance(leaf, (bool, int, float)):
            leaf = torch.tensor(leaf)
        if isinstance(leaf, torch.Tensor):
            found[".".join(map(str, path))] = leaf.detach().cpu().clone()
    return found


def show(findings: Sequence[Finding]) -> None:
    """A row for the loss and for each unit."""
    rows = []
    for finding in findings:
        name = finding.name
        if finding.stage is not None:
            name += f" (stage {finding.stage})"
        numbers = f"one process {finding.expected:.7g}, pipeline {finding.actual:.7g}"
        rows.append((name, f"{numbers}, difference {finding.difference:.1e}"))
    print_table("verify: one micro-batch's loss, and the norm of each unit's gradient", rows)
