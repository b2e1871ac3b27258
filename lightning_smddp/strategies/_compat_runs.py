"""Private parts of Lightning that running a job needs: its signals, the ends of epochs and runs, its launchers.

Written against Lightning 2.6. Remove each when strategies have hooks for it, and ranks agree on a stop.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def own_stops(trainer: Any, install: Callable[[], None]) -> Iterator[None]:
    """Let ``install`` register signal handlers when Lightning has registered its own.

    Lightning's handler of SIGTERM broadcasts from within the handler, at another point on each rank, and every
    training batch begins with a broadcast of whether a signal came; neither happens in this context.
    """
    connector, epoch_loop = trainer._signal_connector, trainer.fit_loop.epoch_loop

    def register() -> None:
        type(connector).register_signal_handlers(connector)
        install()

    connector.register_signal_handlers = register
    epoch_loop._broadcast_sigterm_tensor = lambda: None
    try:
        yield
    finally:
        vars(connector).pop("register_signal_handlers", None)
        vars(epoch_loop).pop("_broadcast_sigterm_tensor", None)


@contextmanager
def after_training_epoch(trainer: Any, action: Callable[[], None]) -> Iterator[None]:
    """Call ``action`` when the batches of an epoch are over, before any hook."""
    epoch_loop = trainer.fit_loop.epoch_loop

    def run(data_fetcher: Any) -> None:
        type(epoch_loop).run(epoch_loop, data_fetcher)
        action()

    epoch_loop.run = run
    try:
        yield
    finally:
        vars(epoch_loop).pop("run", None)


def no_batch_follows(trainer: Any) -> bool:
    """Whether an epoch's training is over: its data, or the steps of the run, or it was told to stop."""
    epoch_loop = trainer.fit_loop.epoch_loop
    return bool(epoch_loop.batch_progress.is_last_batch or epoch_loop.done)


def received_stop(trainer: Any) -> None:
    """Let the loops end the run behind this batch, as if SIGTERM had come now: they raise ``SIGTERMException``."""
    trainer._signal_connector.received_sigterm = True


def is_stop(error: BaseException) -> bool:
    """Whether it is Lightning's ``SIGTERMException``, of either package."""
    return _is_lightnings(error, "SIGTERMException")


def is_control_flow(error: BaseException) -> bool:
    """Whether Lightning's tuner ends a run that it has started, as it does on all ranks."""
    return _is_lightnings(error, "_TunerExitException")


def _is_lightnings(error: BaseException, name: str) -> bool:
    cls = type(error)
    return cls.__name__ == name and cls.__module__.endswith(".utilities.exceptions")


def stop_exception(trainer: Any) -> BaseException:
    """A ``SIGTERMException`` of the package that ``trainer`` comes from."""
    package = type(trainer._signal_connector).__module__.partition(".trainer")[0]
    error: BaseException = sys.modules[f"{package}.utilities.exceptions"].SIGTERMException()
    return error


def will_step(trainer: Any) -> bool:
    """Whether the optimizer steps at the end of this batch: no gradients wait to be added to."""
    return not trainer.fit_loop.epoch_loop._should_accumulate()


def set_default_root(trainer: Any, directory: str) -> None:
    """Change ``trainer.default_root_dir``, which has no setter."""
    trainer._default_root_dir = directory


def set_num_threads_if_needed(launcher: Any, num_processes: int) -> None:
    """What Lightning's launchers do before they run anything."""
    package = next(cls.__module__ for cls in type(launcher).__mro__ if "subprocess_script" in cls.__module__)
    sys.modules[package]._set_num_threads_if_needed(num_processes=num_processes)


def launchers_of(strategy: type[Any]) -> tuple[Any, Any]:
    """The launchers that start a script again, and that start processes by ``multiprocessing``, of Lightning's DDP."""
    module = sys.modules[strategy.__module__]
    return module._SubprocessScriptLauncher, module._MultiProcessingLauncher


def barriers_without_groups(applies: Callable[[], bool], wait: Callable[[], None]) -> None:
    """Where ``applies()``, let Lightning's barrier around ``prepare_data`` call ``wait`` instead of making a group.

    It makes one of gloo, for every fit, which AWS's backend does not stand. Remove when strategies provide it.
    """
    for package in ("lightning.fabric", "lightning_fabric"):
        module = sys.modules.get(f"{package}.utilities.distributed")
        if module is None or hasattr(module._InfiniteBarrier, "original"):
            continue
        original = module._InfiniteBarrier.__enter__

        def enter(self: Any, original: Callable[[Any], Any] = original) -> Any:
            if not applies():
                return original(self)
            self.barrier = wait
            return self

        module._InfiniteBarrier.original, module._InfiniteBarrier.__enter__ = original, enter
