"""A LightningModule as a Trainer has it at its first training batch: with data, optimizers and precision."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_smddp.sharding.optimizer_shards import unwrapped


class UnplannableError(ValueError):
    """Nothing can be predicted for a module; the message says why and what to change."""


@dataclass(frozen=True)
class FirstBatch:
    """What there is when Lightning calls ``training_step`` for the first time.

    Attributes:
        module: the LightningModule.
        batch: as the step gets it.
        arguments: the step's others.
        optimizers: as the user built them.
        precision: makes the context that Lightning enters around the step.
    """

    module: Any
    batch: Any
    arguments: Sequence[Any]
    optimizers: Sequence[Optimizer]
    precision: Callable[[], AbstractContextManager[Any]]


class _LookedError(Exception):
    """Ends the run: what was wanted has been seen."""


_QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "max_steps": 1,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def look_at_first_batch(module: Any, datamodule: Any, precision: Any, look: Callable[[FirstBatch], None]) -> None:
    """Call ``look`` in place of the first training step of a run on one CPU process, which ends there.

    Raises:
        UnplannableError: there is no such step, with the cure.
    """
    package = _package_of(module)
    _require_data(module, datamodule, package)
    strategies = import_module(f"{package}.strategies")

    # Lightning's own loop comes to the first batch, so that hooks, loaders, optimizers and precision are those of a
    # run. There the exception ends it.
    class Looks(strategies.SingleDeviceStrategy):  # type: ignore[name-defined, misc]
        def training_step(self, batch: Any, *arguments: Any) -> Any:
            optimizers = [unwrapped(optimizer) for optimizer in self.optimizers]
            context = self.precision_plugin.train_step_context
            _require_automatic(module)
            look(FirstBatch(module, batch, arguments, optimizers, context))
            raise _LookedError

    # Given, so that Lightning looks for no launcher's variables: this is no rank of a job.
    environment = import_module(f"{package}.plugins.environments").LightningEnvironment()
    with _without_remarks():
        trainer = import_module(package).Trainer(
            strategy=Looks(torch.device("cpu")),
            precision=precision,
            plugins=[environment],
            **_QUIET,
        )
        try:
            trainer.fit(module, datamodule=datamodule)
        except _LookedError:
            return
    raise UnplannableError(
        f"The train_dataloader of {type(module).__name__} gave no batch: nothing was traced. Give it data, or a "
        "datamodule that has some."
    )


@contextmanager
def _without_remarks() -> Iterator[None]:
    """Lightning logs what it thinks of its own Trainer, which is nobody's here. Warnings stay."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.INFO))
    try:
        yield
    finally:
        logging.disable(before)


def _package_of(module: Any) -> str:
    """Whichever Lightning the module's class comes from."""
    for base in type(module).__mro__:
        if base.__name__ == "LightningModule":
            package, _, _ = base.__module__.partition(".core")
            return package
    what = f"the class {module.__name__}" if isinstance(module, type) else f"a {type(module).__name__}"
    cure = "Give an instance of the class that has the `training_step`, or a function that returns one."
    if isinstance(module, nn.Module):
        cure = "Put it into a LightningModule with a `training_step`."
    raise UnplannableError(f"{what} is no LightningModule. {cure}")


def _require_data(module: Any, datamodule: Any, package: str) -> None:
    is_overridden = import_module(f"{package}.utilities.model_helpers").is_overridden
    if datamodule is None and not is_overridden("train_dataloader", module):
        raise UnplannableError(
            f"{type(module).__name__} has no train_dataloader, so there is no batch to trace: give a datamodule "
            "(--datamodule package.module:Class)."
        )


def _require_automatic(module: Any) -> None:
    if not module.automatic_optimization:
        raise UnplannableError(
            f"{type(module).__name__} optimizes by hand (automatic_optimization=False): where its backward begins and "
            "ends is not known. Its memory can be measured with one process."
        )
