"""A LightningModule as a Trainer has it at its first training batch: with data, optimizers and precision."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from lightning_smddp.sharding.optimizer_shards import unwrapped

T = TypeVar("T")


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
    """Ends the run: what was wanted has been seen, and is its argument."""


QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "max_steps": 1,
    "limit_val_batches": 0,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Of a Trainer that nobody is to notice."""


def look_at_first_batch(module: Any, datamodule: Any, precision: Any, look: Callable[[FirstBatch], T]) -> T:
    """Call ``look`` in place of the first training step of a run on one CPU process, which ends there.

    Raises:
        UnplannableError: there is no such step, with the cure.
    """
    package = _package_of(module)
    name = type(module).__name__
    strategies = import_module(f"{package}.strategies")

    # Lightning's own loop comes to the first batch, so that hooks, loaders, optimizers and precision are those of a
    # run. There the exception ends it.
    class Looks(strategies.SingleDeviceStrategy):  # type: ignore[name-defined, misc]
        def training_step(self, batch: Any, *arguments: Any) -> Any:
            if not module.automatic_optimization:
                raise UnplannableError(
                    f"{name} optimizes by hand (automatic_optimization=False): where its backward begins and ends is "
                    "not known. Its memory can be measured with one process."
                )
            optimizers = [unwrapped(optimizer) for optimizer in self.optimizers]
            context = self.precision_plugin.train_step_context
            raise _LookedError(look(FirstBatch(module, batch, arguments, optimizers, context)))

    # Given, so that Lightning looks for no launcher's variables: this is no rank of a job.
    environment = import_module(f"{package}.plugins.environments").LightningEnvironment()
    strategy = Looks(torch.device("cpu"))
    before = logging.root.manager.disable
    logging.disable(max(before, logging.INFO))  # what Lightning thinks of its own Trainer; warnings stay
    try:
        trainer = import_module(package).Trainer(strategy=strategy, precision=precision, plugins=[environment], **QUIET)
        trainer.fit(module, datamodule=datamodule)
    except _LookedError as looked:
        found: T = looked.args[0]
        return found
    finally:
        logging.disable(before)
    raise UnplannableError(
        f"The train_dataloader of {name} gave no batch: nothing was traced. Give it data, or a datamodule that has "
        "some."
    )


def _package_of(module: Any) -> str:
    """Whichever Lightning the module's class comes from."""
    homes = [base.__module__ for base in type(module).__mro__ if base.__name__ == "LightningModule"]
    if homes:
        return homes[0].partition(".core")[0]
    raise UnplannableError(
        f"A {type(module).__name__} is no LightningModule. Give an instance of the class that has the `training_step`, "
        "or a function that returns one."
    )
