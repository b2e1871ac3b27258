"""In a SageMaker job: checkpoints, the final model and the reason of a failure go where SageMaker looks for them.

Nothing here does anything outside of a job. See ``docs/sagemaker.md``.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_smddp.checkpoint.convert import consolidate
from lightning_smddp.checkpoint.places import locate
from lightning_smddp.checkpoint.reading import verify_checkpoint
from lightning_smddp.checkpoint.sharded import is_sharded
from lightning_smddp.checkpoint.temporary import temporary_name
from lightning_smddp.communication.errors import RankFailedError
from lightning_smddp.sagemaker.folders import MODEL, Folders, failure_file, point_at, write_failure
from lightning_smddp.strategies._compat_runs import is_control_flow, is_stop, set_default_root
from lightning_smddp.strategies.reliability import ReliabilityOptions
from lightning_smddp.strategies.saving import Saving
from lightning_smddp.strategies.supervised import Supervised
from lightning_smddp.strategies.tables import say
from lightning_smddp.supervision.failure import Failure, text_of

if TYPE_CHECKING:

    class _Base(Supervised, Saving):  # what a strategy puts this class in front of
        pass
else:
    _Base = object

_STARTED = time.time()
_trainers = count(1)  # of this script, in the order in which it makes them


class SageMakerFolders(_Base):
    """Comes before the classes that it extends: ``class Strategy(SageMakerFolders, Supervised, ..., Saving)``."""

    _reliability: ReliabilityOptions
    sagemaker: Folders | None = None
    newest_in: Path | None = None  # the folder with the file ``newest``, if checkpoints go there
    _number, _made_in = 1, ""
    _resumes_by_default, _resumed_by_default = True, False  # in the first fit, and in the last one
    _in_job: Any = None  # the trainer, until the run ends
    _failed = False
    _saved: dict[str, int] | None = None  # checkpoint -> its step

    # ---- start ----

    def _configure_launcher(self) -> None:
        """A Trainer has been made."""
        super()._configure_launcher()
        self._number, self._made_in = next(_trainers), os.getcwd()

    def setup_environment(self) -> None:
        """Start, and take SageMaker's folders where the script has named none."""
        super().setup_environment()
        module = self.lightning_module
        self.sagemaker = Folders.of(os.environ, self.num_nodes, self._number)
        if self.sagemaker is None or module is None:
            return
        self._in_job, self._failed, self._saved = module.trainer, False, {}
        if self._supervisor is not None:
            self._supervisor.at_emergency(self._write_failure)
        moved = self._take_folders(self.sagemaker)
        self.newest_in = self.sagemaker.checkpoints if moved else None
        if self._in_job.state.fn == "fit":
            self._begin_fit(self.sagemaker, moved)

    def _begin_fit(self, folders: Folders, moved: bool) -> None:
        """Go on from an earlier start of the job in the Trainer's first fit; a second one has weights already."""
        by_default = self._resumes_by_default and self._reliability.resume is None and (moved or self._number == 1)
        self._resumes_by_default = False
        if by_default or self._resumed_by_default:
            self._reliability = replace(self._reliability, resume="auto" if by_default else None)
        self._resumed_by_default = by_default
        if self.is_global_zero:
            where = folders.checkpoints if moved else "the script's own directories"
            how = "; resume='auto', as the script does not say ('never' starts from scratch)" if by_default else ""
            say(f"SageMaker: checkpoints in {where}, the final model in {folders.model}{how}.")

    def _take_folders(self, folders: Folders) -> bool:
        """Let checkpoints go there, unless the Trainer was given a directory; whether any does."""
        root, weights = str(folders.checkpoints), str(folders.checkpoints / "weights")
        if self.newest_in is None and self._in_job.default_root_dir != self._made_in:
            return False
        callbacks = [c for c in self._in_job.checkpoint_callbacks if getattr(c, "dirpath", "") in (None, root, weights)]
        if callbacks and self._reliability.sharded and not folders.is_shared:
            raise ValueError(
                f"sharded=True needs a directory that all {self.num_nodes} hosts see, and {root} is each host's own. "
                "Give ModelCheckpoint(dirpath=...) one on a shared file system, such as FSx for Lustre, or leave "
                "sharded out."
            )
        for callback in callbacks:
            # Resuming takes the newest file of a directory, which must not be one of weights alone.
            callback.dirpath = weights if _only_weights(callback) else root
        everything = not self._in_job.checkpoint_callbacks
        if self._in_job.loggers or everything:  # else LightningCLI would find its config.yaml there at the next start
            set_default_root(self._in_job, root)
        return bool(callbacks) or everything

    # ---- checkpoints ----

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save, then let ``newest`` name it."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.sagemaker is None or self._saved is None:
            return
        self._saved[str(filepath)] = int(checkpoint.get("global_step", -1))
        if self.newest_in is not None and self.is_global_zero and "optimizer_states" in checkpoint:
            point = partial(point_at, self.newest_in, filepath)
            if self._has_safe_files:
                self.checkpoint_io.afterwards(point)
            else:
                point()

    # ---- the final model ----

    @property
    def _gives_model(self) -> bool:
        """Whether it is up to us: checkpoints are saved, and not into the model's folder."""
        if self.sagemaker is None or self._in_job is None or self._failed or self._in_job.state.fn != "fit":
            return False
        callbacks = self._in_job.checkpoint_callbacks
        return bool(callbacks) and not any(_is_inside(c, self.sagemaker.model) for c in callbacks)

    def on_train_end(self) -> None:
        """Save the final weights, if they are what the model is, and no checkpoint has them."""
        super().on_train_end()
        if not self._gives_model or self._reliability.sharded or next(_best(self._in_job), None) is not None:
            return
        assert self.sagemaker is not None
        assert self._saved is not None
        step = self._in_job.global_step
        if all(self._saved.get(path) != step for path in _last(self._in_job)):
            self._in_job.save_checkpoint(str(self.sagemaker.model / MODEL))

    def teardown(self) -> None:
        """Put the final model where SageMaker takes it from. Collective. Errors are raised on every rank."""
        if self._gives_model and not self._interrupted():
            self.finish_saving()
            self._ranks.first(self._put_model)
        self._in_job = None
        super().teardown()

    def _put_model(self) -> None:
        assert self.sagemaker is not None
        target = str(self.sagemaker.model / MODEL)
        if target in (self._saved or {}):  # by on_train_end
            return
        found = [*_best(self._in_job), *_last(self._in_job), str(self._loaded_from or "")]
        path = next((path for path in found if path and _exists(path)), None)
        if path is not None:
            self.sagemaker.model.mkdir(parents=True, exist_ok=True)
            (consolidate if is_sharded(path) else _copy)(path, target)

    # ---- failures ----

    def _explain(self, error: BaseException) -> BaseException:
        self._failed = True
        return super()._explain(error)

    def _follow(self, failure: Failure) -> None:
        self._write_failure(failure.error())  # the launcher may end this process while it waits
        super()._follow(failure)

    def on_exception(self, exception: BaseException) -> None:
        """Leave SageMaker word of what has failed, also before there is a process group."""
        super().on_exception(exception)
        if not is_stop(exception) and not is_control_flow(exception):
            self._write_failure(exception)

    def _write_failure(self, error: BaseException | None = None) -> None:
        """The job's first failure, if the ranks know one; else ``error``."""
        failure = None if self._supervisor is None else self._supervisor.failure
        path = failure_file(os.environ)
        if path is not None and failure is not None:
            write_failure(path, str(failure.error()), _STARTED)
        elif path is not None and error is not None:
            write_failure(path, str(error) if isinstance(error, RankFailedError) else text_of(error), _STARTED)


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
