"""Private parts of Lightning that running and resuming a job need: signals, epochs, launchers, hooks, loaders.

Written against Lightning 2.6. Remove each when strategies have hooks for it, and ranks agree on a stop.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

from torch import Tensor
from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter


@contextmanager
def own_stops(trainer: Any, install: Callable[[], None]) -> Iterator[None]:
    """Let ``install`` register signal handlers when Lightning has registered its own.

    Lightning's handler of SIGTERM broadcasts from within the handler, at another point on each rank, and every
    training batch begins with a broadcast of whether a signal came; neither happens in this context.
    """
    connector = trainer._signal_connector
    epoch_loop = trainer.fit_loop.epoch_loop

    # Attributes of the objects stand before the methods of their classes, and are gone again behind the context.
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
    package, _, _ = type(trainer._signal_connector).__module__.partition(".trainer")
    exceptions = sys.modules[f"{package}.utilities.exceptions"]
    error: BaseException = exceptions.SIGTERMException()
    return error


def will_step(trainer: Any) -> bool:
    """Whether the optimizer steps at the end of this batch: no gradients wait to be added to."""
    return not trainer.fit_loop.epoch_loop._should_accumulate()


def set_default_root(trainer: Any, directory: str) -> None:
    """Change ``trainer.default_root_dir``, which has no setter."""
    trainer._default_root_dir = directory


def set_num_threads_if_needed(launcher: Any, num_processes: int) -> None:
    """What Lightning's launchers do before they run anything."""
    # The class of `launcher` is ours, on top of Lightning's. The function is in the module of that one, in either
    # package.
    for cls in type(launcher).__mro__:
        if "subprocess_script" in cls.__module__:
            sys.modules[cls.__module__]._set_num_threads_if_needed(num_processes=num_processes)
            return
    raise AssertionError(f"{type(launcher)} is no launcher of Lightning's that starts a script")


def launchers_of(strategy: type[Any]) -> tuple[Any, Any]:
    """The launchers that start a script again, and that start processes by ``multiprocessing``, of Lightning's DDP."""
    module = sys.modules[strategy.__module__]
    return module._SubprocessScriptLauncher, module._MultiProcessingLauncher


@contextmanager
def keeps_user_samplers(trainer: Any, keep: bool) -> Iterator[None]:
    """With ``keep``, Lightning leaves samplers as they are. Its own switch is the Trainer's argument."""
    connector = trainer._accelerator_connector
    before = connector.use_distributed_sampler
    connector.use_distributed_sampler = before and not keep
    try:
        yield
    finally:
        connector.use_distributed_sampler = before


@contextmanager
def finetuning_by_identity(
    callbacks: Iterable[Any], parameters_of: Callable[[Any], Iterable[Tensor]]
) -> Iterator[None]:
    """Lightning's ``BaseFinetuning`` looks for parameters in an optimizer as objects, not by their values.

    ``filter_on_optimizer`` compares values, which parameters of other ranks do not have. Remove when it does not.
    ``parameters_of`` gives an optimizer's parameters, of all ranks.
    """
    # The classes that define it, each once, with what they have: the static method itself, as it has to be put back.
    before: dict[type, Any] = {}
    for callback in callbacks:
        for cls in type(callback).__mro__:
            if "filter_on_optimizer" in vars(cls):
                before[cls] = vars(cls)["filter_on_optimizer"]

    def filter_on_optimizer(optimizer: Any, params: Iterable[Any]) -> list[Any]:
        known = {id(parameter) for parameter in parameters_of(optimizer)}
        return [parameter for parameter in params if id(parameter) not in known]

    for cls in before:
        setattr(cls, "filter_on_optimizer", staticmethod(filter_on_optimizer))  # noqa: B010
    try:
        yield
    finally:
        for cls, function in before.items():
            setattr(cls, "filter_on_optimizer", function)  # noqa: B010


Around: TypeAlias = Callable[[str, Any], AbstractContextManager[Any]]


@contextmanager
def around_hooks(trainer: Any, around: Around) -> Iterator[None]:
    """Enter ``around(hook, owner)`` around each call of a hook of ``trainer``'s module and callbacks.

    Lightning calls all callbacks in one function; ours repeat its loops, as each callback is entered for itself.
    """
    call = _call_module(trainer)
    ours = _HookCalls(call, trainer, around)
    before = {name: getattr(call, name) for name in ours.functions}
    # They are functions of a module of Lightning's, so of all Trainers in the process: calls of others go on as before.
    for name, function in ours.functions.items():
        setattr(call, name, ours.for_this_trainer(function, before[name]))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(call, name, function)


def _call_module(trainer: Any) -> Any:
    """``lightning.pytorch.trainer.call``, or its twin, beside the Trainer that ``trainer`` is an instance of."""
    for cls in type(trainer).__mro__:
        name = f"{cls.__module__.rpartition('.')[0]}.call"
        if name.endswith(".trainer.call") and name in sys.modules:
            return sys.modules[name]
    raise AssertionError(f"{type(trainer)} is no Trainer of Lightning's")


class _HookCalls:
    """What ``lightning.pytorch.trainer.call`` does, with a context around each hook."""

    def __init__(self, call: Any, trainer: Any, around: Around) -> None:
        self.call = call
        self.trainer = trainer
        self.around = around
        self.module_hook = call._call_lightning_module_hook
        self.functions: dict[str, Callable[..., Any]] = {
            "_call_lightning_module_hook": self.of_module,
            "_call_callback_hooks": self.of_callbacks,
            "_call_callbacks_on_save_checkpoint": self.on_save_checkpoint,
            "_call_callbacks_state_dict": self.state_dicts,
        }

    def for_this_trainer(self, ours: Callable[..., Any], lightnings: Callable[..., Any]) -> Callable[..., Any]:
        def chosen(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            if trainer is not self.trainer:
                return lightnings(trainer, *args, **kwargs)
            return ours(*args, **kwargs)

        return chosen

    def of_module(self, hook: str, *args: Any, pl_module: Any = None, **kwargs: Any) -> Any:
        with self.around(hook, pl_module or self.trainer.lightning_module):
            return self.module_hook(self.trainer, hook, *args, pl_module=pl_module, **kwargs)

    def of_callbacks(self, hook: str, *args: Any, monitoring_callbacks: Any = None, **kwargs: Any) -> None:
        # At an epoch's end Lightning comes twice: for the others first, then for EarlyStopping and checkpoints, which
        # look at what those have logged.
        chosen = list(self.trainer.callbacks)
        if monitoring_callbacks is not None:
            monitors = (self.call.EarlyStopping, self.call.Checkpoint)
            chosen = [callback for callback in chosen if isinstance(callback, monitors) == monitoring_callbacks]
        arguments = (self.trainer, self.trainer.lightning_module, *args)
        self._each(hook, chosen, arguments, kwargs)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        arguments = (self.trainer, self.trainer.lightning_module, checkpoint)
        self._each("on_save_checkpoint", self.trainer.callbacks, arguments, {})

    def state_dicts(self) -> dict[str, Any]:
        found = {}
        for callback in self.trainer.callbacks:
            with self.around("state_dict", callback):
                state = callback.state_dict()
            if state:
                found[callback.state_key] = state
        return found

    def _each(self, hook: str, callbacks: Iterable[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        module = self.trainer.lightning_module
        if module is not None:
            before = module._current_fx_name
            module._current_fx_name = hook  # `self.log` looks here for what hook it is called in
        for callback in callbacks:
            function = getattr(callback, hook)
            if not callable(function):
                continue
            action = f"[Callback]{callback.state_key}.{hook}"
            profile = self.trainer.profiler.profile(action)
            with profile, self.around(hook, callback):
                function(*args, **kwargs)
        if module is not None:
            module._current_fx_name = before


# ---- resuming ----


def at_resume_start(trainer: Any, choose: Callable[[Any], Any]) -> None:
    """Let ``choose`` replace the path of the checkpoint that the next run starts from (None: from none).

    Lightning decides before the process group is up, and without a look at whether the file is valid.
    """
    connector = trainer._checkpoint_connector

    def resume_start(checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        del connector.resume_start  # the method of its class is there again
        connector.resume_start(choose(checkpoint_path), *args, **kwargs)

    connector.resume_start = resume_start


def requeue_checkpoint(trainer: Any) -> str | None:
    """The newest file that Lightning wrote when Slurm requeued the job, which it resumes from unasked."""
    path: str | None = trainer._checkpoint_connector._hpc_resume_path
    return path


def begin_next_epoch(trainer: Any) -> None:
    """The checkpoint lies between two epochs. With ``max_steps`` Lightning trains the one before it again."""
    trainer.fit_loop._restarting = False
    trainer.fit_loop.epoch_loop.restarting = False


def finish_batch(trainer: Any) -> None:
    """The checkpoint was saved in a batch's ``on_train_batch_end``: Lightning leaves out a validation behind it."""
    epoch_loop = trainer.fit_loop.epoch_loop
    if epoch_loop._should_check_val_fx(trainer.fit_loop._data_fetcher):
        epoch_loop.val_loop.restarting = False  # it begins at its first batch
        epoch_loop.val_loop._restart_stage = "restarted_mid_evaluation"  # but it does begin
    elif not epoch_loop._should_accumulate():
        epoch_loop._batches_that_stepped += 1


def end_epoch(trainer: Any) -> None:
    """The checkpoint lies behind the last batch of an epoch: Lightning would ask for one more."""
    trainer.fit_loop._data_fetcher.done = True


def make_iterators(trainer: Any) -> None:
    """Of a resumed run, where training begins: Lightning makes them before that, and not again."""
    fit_loop = trainer.fit_loop
    fit_loop._resuming_from_checkpoint = False  # it makes those of a new epoch, but for the first
    if fit_loop.epoch_loop.restarting or trainer.current_epoch == 0:
        for loader in fit_loop._combined_loader.flattened:
            sys.modules[type(fit_loop).__module__]._set_sampler_epoch(loader, trainer.current_epoch)
        iter(fit_loop._data_fetcher)


def training_loaders(trainer: Any) -> Any:
    """The ``CombinedLoader`` of the training loaders, which may be the user's own; None if there is none."""
    return trainer.fit_loop._combined_loader


def skip_batch(iterator: Iterator[Any]) -> None:
    """Leave a batch out: by its indices alone where nothing else goes by loading it. Raises ``StopIteration``."""
    if isinstance(iterator, _SingleProcessDataLoaderIter) and iterator._dataset_kind == _DatasetKind.Map:
        iterator._next_index()
    else:
        next(iterator)
