"""``lightning-smddp verify``: some batches of a user's module, in a pipeline and in one process that accumulates."""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from torch import Tensor

from lightning_smddp.choice.first_batch import QUIET
from lightning_smddp.pytree import items
from lightning_smddp.strategies.lightning import AccumulationStrategy, PipelineStrategy
from lightning_smddp.strategies.tables import print_table

# Relative differences that rounding explains: of values, and of what a step changed in a tensor.
_VALUES = 1e-4
_UPDATES = 5e-3
_NOTHING = 1e-8
_ABSENT = torch.tensor(float("nan"))

STEPS = 4  # of training, and of validation
_UPDATE = "update of "
_LIGHTNINGS = frozenset(vars(LightningModule()))  # attributes that every module has
_MOST_ROWS = 12  # of what differs, in the table
_OPTIONS: dict[str, Any] = {
    **QUIET,
    "max_steps": STEPS,
    "limit_train_batches": STEPS,
    "limit_val_batches": STEPS,
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,  # replicas get the same batches
}

Seen: TypeAlias = dict[str, Tensor]
"""By name what a step showed."""


def differences(alone: Mapping[str, Seen], piped: Mapping[str, Seen]) -> Iterator[tuple[str, str]]:
    """Where the two differ by more than rounding explains, step after step: the place, and both values in words.

    Compared is what a step returned, logged and set in the module, and how it changed the module's state, in terms of
    the change: an update that is wrong altogether is a small part of a weight, and what has gone wrong in one step does
    not count in the next one's again.
    """
    for step in {**alone, **piped}:  # of both, each once
        one, other = alone.get(step, {}), piped.get(step, {})
        for name in {**one, **other}:
            value, piped_value = one.get(name, _ABSENT), other.get(name, _ABSENT)
            relative = float("inf")
            if value.shape == piped_value.shape:
                relative = float((value - piped_value).norm()) / max(float(value.norm()), _NOTHING)
            tolerance = _UPDATES if name.startswith(_UPDATE) else _VALUES
            if not relative <= tolerance:  # NaN, too
                # The number itself, with its sign, of one element; the norm of several.
                expected, actual = (float(v if v.numel() == 1 else v.norm()) for v in (value, piped_value))
                text = f"one process {expected:.7g}, pipeline {actual:.7g}, difference {relative:.1e}"
                yield f"{step}, {name}", text


class _Recorder(Callback):
    """Writes to a file, on the first rank, what each step showed and changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps: dict[str, Seen] = {}
        self.state: dict[str, Tensor] = {}  # before the next step
        self.counts: list[int] = []  # of micro-batches, in the order of all batches
        self.loss_weight = "rows"  # that the pipeline found

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.state = _plain(pl_module.state_dict())

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        # Collective, so every rank calls it. The first one, which writes the file, gets all.
        state = _plain(trainer.strategy.lightning_module_state_dict())
        seen = self._add("step", trainer, pl_module, outputs)
        for name, value in state.items():
            if name in self.state and not torch.equal(value, self.state[name]):
                seen[f"{_UPDATE}{name}"] = value - self.state[name]
        self.state = state

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self._add("validation step", trainer, pl_module, outputs)

    def _add(self, kind: str, trainer: Trainer, pl_module: LightningModule, outputs: Any) -> Seen:
        strategy = trainer.strategy
        if isinstance(strategy, PipelineStrategy):
            batcher = strategy._last_pipelined().batcher
            self.counts.append(batcher.count)
            self.loss_weight = batcher.chosen.kind if batcher.chosen is not None else "rows"
        attributes = {name: value for name, value in vars(pl_module).items() if name not in _LIGHTNINGS}
        kinds = {"output": outputs, "logged": dict(trainer.callback_metrics), "attribute": attributes}
        seen: Seen = {}
        for what, values in kinds.items():
            for name, value in _plain(values).items():
                seen[f"{what} {name!r}" if name else what] = value
        self.steps[f"{kind} {1 + sum(name.startswith(kind) for name in self.steps)}"] = seen
        return seen

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self._add("end", trainer, pl_module, None)
            torch.save({"steps": self.steps, "counts": self.counts, "loss_weight": self.loss_weight}, self.path)


def verify(
    module: LightningModule,
    data: LightningDataModule | None,
    ranks: int,
    pipeline: PipelineStrategy,
    callbacks: Sequence[Callback] = (),
) -> int:
    """Train some batches under ``pipeline`` on ``ranks`` CPU processes, and print the comparison.

    It is compared with one process that accumulates gradients over the same micro-batches.

    Returns:
        0 if the pipeline computes what the module computes, 1 if not.
    """
    given = module, data, callbacks
    try:
        piped = _fit(*given, devices=ranks, strategy=pipeline)
    except Exception as error:  # of a rank, with its traceback as text
        *_, own = re.split(r"\n(?=[\w.]*(?:Error|Exception)\b)", str(error))
        print(f"\n{own}")
        return 1
    # As many micro-batches as the pipeline made of each batch, with the weights that it found.
    counts = iter(piped["counts"])
    accumulation = AccumulationStrategy(lambda rows: next(counts), loss_weight=piped["loss_weight"])
    alone, steps = _fit(*given, devices=1, strategy=accumulation)["steps"], piped["steps"]
    wrong = list(differences(alone, steps))
    if wrong:
        print_table("verify: what differs", wrong[:_MOST_ROWS])
        place, text = wrong[0]
        print(f"The pipeline differs from one process, first in {place}: {text}.")
        return 1
    validated = sum(step.startswith("validation") for step in steps)
    print(
        "The pipeline computes what one process computes that accumulates gradients over the same micro-batches: "
        f"{len(steps) - validated - 1} training and {validated} validation steps are the same."
    )
    return 0


def _fit(
    module: LightningModule, data: LightningDataModule | None, callbacks: Sequence[Callback], **options: Any
) -> dict[str, Any]:
    """Train a copy for some steps; returns what was seen of it."""
    module, data, callbacks = copy.deepcopy((module, data, list(callbacks)))  # what they share stays shared
    seed_everything(0, verbose=False)  # on new processes, too: so all runs have the same batches
    with tempfile.TemporaryDirectory(prefix="smddp_verify_") as folder:
        path = Path(folder, "seen")
        Trainer(callbacks=[*callbacks, _Recorder(path)], **{**_OPTIONS, **options}).fit(module, datamodule=data)
        seen: dict[str, Any] = torch.load(path, weights_only=True)
    return seen


def _plain(structure: Any) -> dict[str, Tensor]:
    """Tensors and numbers in a structure, by their places, in double precision."""
    return {
        ".".join(map(str, path)): torch.as_tensor(leaf).detach().to("cpu", torch.float64, copy=True)
        for path, leaf in items(structure)
        if isinstance(leaf, (bool, int, float, Tensor))
    }
