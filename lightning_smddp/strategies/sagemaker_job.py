"""In a SageMaker job: checkpoints, the final model and the reason of a failure go where SageMaker looks for them.

Nothing here does anything outside of a job. See ``docs/sagemaker.md``.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_smddp._compat.trainer import set_default_root
from lightning_smddp.checkpoint.locations import locate
from lightning_smddp.checkpoint.reading import verify_checkpoint
from lightning_smddp.checkpoint.sharded import consolidate, is_sharded
from lightning_smddp.checkpoint.temporary import temporary_name
from lightning_smddp.communication.errors import RankFailedError
from lightning_smddp.sagemaker.folders import MODEL, Folders, failure_file, point_at, write_failure
from lightning_smddp.strategies.tables import say
from lightning_smddp.supervision.failure import text_of

if TYPE_CHECKING:
    from lightning_smddp.strategies.base import TrainerStrategy

_STARTED = time.time()
_trainers = count(1)  # of this script, in the order in which it makes them


class SageMakerJob:
    """What a strategy does for the job that it runs in. A strategy calls it where hooks come.

    Attributes:
        newest_in: the folder with the file ``newest``, if checkpoints go there.
        failed: whether the run has.
    """

    def __init__(self, strategy: TrainerStrategy) -> None:
        self.strategy = strategy
        self.newest_in: Path | None = None
        self.failed = False
        self._folders: Folders | None = None
        self._number, self._made_in = 1, ""
        self._resumes_by_default, self._resumed_by_default = True, False  # in the first fit, and in the last one
        self._trainer: Any = None  # until the run ends
        self._saved: dict[str, int] | None = None  # checkpoint -> its step

    # ---- start ----

    def trainer_made(self) -> None:
        """A Trainer has been made, and knows this strategy."""
        self._number, self._made_in = next(_trainers), os.getcwd()

    def start(self) -> None:
        """The process group is up: take SageMaker's folders where the script has named none."""
        strategy, module = self.strategy, self.strategy.lightning_module
        self._folders = Folders.of(os.environ, strategy.num_nodes, self._number)
        if self._folders is None or module is None:
            return
        self._trainer, self.failed, self._saved = module.trainer, False, {}
        if strategy._supervision.supervisor is not None:
            strategy._supervision.supervisor.at_emergency(self.write_failure)
        moved = self._take_folders(self._folders)
        self.newest_in = self._folders.checkpoints if moved else None
        if self._trainer.state.fn == "fit":
            self._begin_fit(self._folders, moved)

    def _begin_fit(self, folders: Folders, moved: bool) -> None:
        """Go on from an earlier start of the job in the Trainer's first fit; a second one has weights already."""
        strategy = self.strategy
        by_default = self._resumes_by_default and strategy._resume is None and (moved or self._number == 1)
        self._resumes_by_default = False
        if by_default or self._resumed_by_default:
            strategy._resume = "auto" if by_default else None
        self._resumed_by_default = by_default
        if strategy.is_global_zero:
            where = folders.checkpoints if moved else "the script's own directories"
            how = "; resume='auto', as the script does not say ('never' starts from scratch)" if by_default else ""
            say(f"SageMaker: checkpoints in {where}, the final model in {folders.model}{how}.")

    def _take_folders(self, folders: Folders) -> bool:
        """Let checkpoints go there, unless the Trainer was given a directory; whether any does."""
        root, weights = str(folders.checkpoints), str(folders.checkpoints / "weights")
        if self.newest_in is None and self._trainer.default_root_dir != self._made_in:
            return False
        ours = (None, root, weights)
        callbacks = [c for c in self._trainer.checkpoint_callbacks if getattr(c, "dirpath", "") in ours]
        if callbacks and self.strategy._reliability.sharded and not folders.is_shared:
            raise ValueError(
                f"sharded=True needs a directory that all {self.strategy.num_nodes} hosts see, and {root} is each "
                "host's own. Give ModelCheckpoint(dirpath=...) one on a shared file system, such as FSx for Lustre, or "
                "leave sharded out."
            )
        for callback in callbacks:
            # Resuming takes the newest file of a directory, which must not be one of weights alone.
            callback.dirpath = weights if _only_weights(callback) else root
        everything = not self._trainer.checkpoint_callbacks
        if self._trainer.loggers or everything:  # else LightningCLI would find its config.yaml there at the next start
            set_default_root(self._trainer, root)
        return bool(callbacks) or everything

    # ---- checkpoints ----

    def saved(self, checkpoint: Mapping[str, Any], filepath: Any) -> None:
        """A checkpoint of this step is at ``filepath``; where it can be resumed from, ``newest`` names it."""
        if self._folders is None or self._saved is None:
            return
        self._saved[str(filepath)] = int(checkpoint.get("global_step", -1))
        if self.newest_in is not None and self.strategy.is_global_zero and "optimizer_states" in checkpoint:
            self.strategy._saving.afterwards(partial(point_at, self.newest_in, filepath))

    # ---- the final model ----

    @property
    def _gives_model(self) -> bool:
        """Whether it is up to us: checkpoints are saved, and not into the model's folder."""
        if self._folders is None or self._trainer is None or self.failed or self._trainer.state.fn != "fit":
            return False
        callbacks = self._trainer.checkpoint_callbacks
        return bool(callbacks) and not any(_is_inside(c, self._folders.model) for c in callbacks)

    def training_ends(self) -> None:
        """Save the final weights, if they are what the model is, and no checkpoint has them."""
        sharded = self.strategy._reliability.sharded
        if not self._gives_model or sharded or next(_best(self._trainer), None) is not None:
            return
        assert self._folders is not None
        assert self._saved is not None
        step = self._trainer.global_step
        if all(self._saved.get(path) != step for path in _last(self._trainer)):
            self._trainer.save_checkpoint(str(self._folders.model / MODEL))

    def end(self) -> None:
        """Put the final model where SageMaker takes it from. Collective. Errors are raised on every rank."""
        if self._gives_model and not self.strategy._interrupted:
            self.strategy._saving.finish()
            self.strategy._saving.ranks.first(self._put_model)
        self._trainer = None

    def _put_model(self) -> None:
        assert self._folders is not None
        target = str(self._folders.model / MODEL)
        if target in (self._saved or {}):  # by on_train_end
            return
        found = [*_best(self._trainer), *_last(self._trainer), str(self.strategy._saving.loaded_from or "")]
        path = next((path for path in found if path and _exists(path)), None)
        if path is not None:
            self._folders.model.mkdir(parents=True, exist_ok=True)
            copy = consolidate if is_sharded(path) else _copy
            copy(path, target)

    # ---- failures ----

    def write_failure(self, error: BaseException | None = None) -> None:
        """The job's first failure, if the ranks know one; else ``error``."""
        supervisor = self.strategy._supervision.supervisor
        path = failure_file(os.environ)
        if path is None:
            return
        if supervisor is not None and supervisor.failure is not None:
            error = supervisor.failure.error()
        if isinstance(error, RankFailedError):
            write_failure(path, str(error), _STARTED)
        elif error is not None:
            write_failure(path, text_of(error), _STARTED)


def _only_weights(callback: Any) -> bool:
    return bool(getattr(callback, "save_weights_only", False))


def _is_inside(callback: Any, folder: Path) -> bool:
    directory = getattr(callback, "dirpath", None)
    return directory is not None and Path(os.path.abspath(directory)).is_relative_to(folder)


def _best(trainer: Any) -> Iterator[str]:
    """Checkpoints with the best value of a metric."""
    for callback in trainer.checkpoint_callbacks:
        if getattr(callback, "monitor", None) is not None and callback.best_model_path:
            yield callback.best_model_path


def _last(trainer: Any) -> Iterator[str]:
    """The last checkpoints: without a metric, the best one is the last one."""
    for callback in trainer.checkpoint_callbacks:
        paths = [getattr(callback, "best_model_path", ""), getattr(callback, "last_model_path", "")]
        yield from filter(None, paths)


def _exists(path: str) -> bool:
    fs, name = locate(path)
    return os.path.exists(name) if fs is None else bool(fs.exists(name))


def _copy(path: str, target: str) -> None:
    """Copy a file or URL, and compare its hash before it gets its name."""
    fs, name = locate(path)
    temporary = os.path.join(os.path.dirname(target), temporary_name(MODEL))
    try:
        if fs is None:
            shutil.copyfile(name, temporary)
        else:
            fs.get_file(name, temporary)
        verify_checkpoint(temporary)
        os.replace(temporary, target)
    finally:
        Path(temporary).unlink(missing_ok=True)
