"""Private parts of Lightning's loops and torch's loaders that resuming needs. Remove each when it has a public face.

Written against Lightning 2.6.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter


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
