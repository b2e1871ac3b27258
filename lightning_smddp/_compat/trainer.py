"""Private parts of Lightning that running and resuming a job need: signals, epochs, launchers, hooks, loaders.

Written against Lightning 2.6. Remove each when strategies have hooks for it, and ranks agree on a stop.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter

from lightning_smddp.patches import patched


@contextmanager
def own_stops(trainer: Any, install: Callable[[], None], end_epoch: Callable[[], None]) -> Iterator[None]:
    """Let ``install`` register signal handlers when Lightning has registered its own.

    Lightning's handler of SIGTERM broadcasts from within the handler, at another point on each rank, and every
    training batch begins with a broadcast of whether a signal came; neither happens in this context. ``end_epoch`` is
    called when the batches of an epoch are over, before any hook.
    """
    connector = trainer._signal_connector
    epoch_loop = trainer.fit_loop.epoch_loop

    # Attributes of the objects stand before the methods of their classes, and are gone again behind the context.
    def register() -> None:
        type(connector).register_signal_handlers(connector)
        install()

    def run(data_fetcher: Any) -> None:
        type(epoch_loop).run(epoch_loop, data_fetcher)
        end_epoch()

    signals = (vars(connector), "register_signal_handlers", register)
    broadcasts = (vars(epoch_loop), "_broadcast_sigterm_tensor", lambda: None)
    with patched([signals, broadcasts, (vars(epoch_loop), "run", run)]):
        yield


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


def set_num_threads_if_needed(launcher: Any) -> None:
    """What Lightning's launchers do before they run anything."""
    home = sys.modules[type(launcher).__module__]  # of either package
    home._set_num_threads_if_needed(num_processes=launcher.num_processes)


def keeps_user_samplers(trainer: Any) -> AbstractContextManager[None]:
    """Within it Lightning leaves samplers as they are. Its own switch is the Trainer's argument."""
    return patched([(vars(trainer._accelerator_connector), "use_distributed_sampler", False)])


Around: TypeAlias = Callable[[str, list[Any]], AbstractContextManager[Any]]


@contextmanager
def around_hooks(trainer: Any, around: Around) -> Iterator[None]:
    """Enter ``around(hook, owners)`` around each call of a hook of ``trainer``'s module and callbacks.

    Lightning calls each within ``trainer.profiler.profile("[Callback]<its key>.<hook>")``, or ``[LightningModule]...``,
    but for ``state_dict`` of callbacks, which it calls within ``"save_checkpoint"``. Callbacks of one key are all among
    ``owners``. Remove when a strategy is asked for such a context.
    """
    profile = trainer.profiler.profile

    def within(callback: Any) -> Callable[..., Any]:
        own = callback.state_dict

        @functools.wraps(own)
        def state_dict(*args: Any, **kwargs: Any) -> Any:
            with around("state_dict", [callback]):
                return own(*args, **kwargs)

        return state_dict

    @contextmanager
    def both(action: str, context: AbstractContextManager[Any]) -> Iterator[Any]:
        with profile(action) as value, context:
            yield value

    def profiled(action: str) -> AbstractContextManager[Any]:
        kind, _, rest = action.partition("]")
        key, _, hook = rest.rpartition(".")
        if kind == "[LightningModule":
            return both(action, around(hook, [trainer.lightning_module]))
        if kind == "[Callback":
            return both(action, around(hook, [each for each in trainer.callbacks if each.state_key == key]))
        if action == "save_checkpoint":
            return both(action, patched((vars(each), "state_dict", within(each)) for each in trainer.callbacks))
        return profile(action)  # type: ignore[no-any-return]

    with patched([(vars(trainer.profiler), "profile", profiled)]):
        yield


def require_hooks_found(trainer: Any) -> None:
    """Raise ``RuntimeError`` within ``around_hooks`` if hooks are called with a rank's own part without a word."""
    if "profile" not in vars(trainer.profiler):
        raise RuntimeError("trainer.profiler was replaced in a run, and hooks are found by it: use Trainer(profiler=).")


def training_results(trainer: Any) -> Any:
    """What is kept of the values that training hooks log: metrics, by torchmetrics' class."""
    return trainer.fit_loop.epoch_loop._results.values()


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
    fit_loop._load_combined_loader_states()  # loaders that `estimated_stepping_batches` made came before their states
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
