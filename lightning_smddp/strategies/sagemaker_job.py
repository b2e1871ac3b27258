"""In a SageMaker job: checkpoints, the final model and the reason of a failure go where SageMaker looks for them.

Nothing here does anything outside of a job. See ``docs/sagemaker.md``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsspec.core import url_to_fs

from lightning_smddp._compat.trainer import set_default_root
from lightning_smddp.checkpoint.files import copy
from lightning_smddp.checkpoint.sharded import consolidate, is_sharded
from lightning_smddp.communication.objects import RankFailedError
from lightning_smddp.sagemaker.folders import MODEL, Folders, failure_file, point_at, write_failure
from lightning_smddp.strategies.tables import say
from lightning_smddp.supervision.board import text_of

if TYPE_CHECKING:
    from lightning_smddp.strategies.base import TrainerStrategy

_STARTED = time.time()
_trainers = count(1)  # of this script, in the order in which it makes them


class SageMakerJob:
    """What a strategy does for the job that it runs in. A strategy calls it where hooks come.

    Attributes:
        newest_in: the folder with the file ``newest``, if checkpoints go there.
    """

    def __init__(self, strategy: TrainerStrategy) -> None:
        self.strategy = strategy
        self.newest_in: Path | None = None
        self._folders: Folders | None = None
        self._number = 1  # of the Trainer among the script's
        self._made_in = ""  # the working directory at that time
        self._given_resume = strategy._resume
        self._is_first_fit = True
        self._trainer: Any = None  # until the run ends
        self._has_final_model = False

    # ---- start ----

    def trainer_made(self) -> None:
        """A Trainer has been made, and knows this strategy."""
        self._number = next(_trainers)
        self._made_in = os.getcwd()

    def start(self) -> None:
        """The process group is up: take SageMaker's folders where the script has named none."""
        strategy = self.strategy
        module = strategy.lightning_module
        self._folders = Folders.of(os.environ, strategy.num_nodes, self._number)
        if self._folders is None or module is None:
            return
        self._trainer = module.trainer
        self._has_final_model = False
        supervisor = strategy._supervision.supervisor
        if supervisor is not None:
            supervisor.shutdown.clean_ups.append(self.write_failure)
        moved = self._take_folders(self._folders)
        self.newest_in = self._folders.checkpoints if moved else None
        if self._trainer.state.fn == "fit":
            self._begin_fit(self._folders, moved)

    def _begin_fit(self, folders: Folders, moved: bool) -> None:
        """Go on from an earlier start of the job in the Trainer's first fit; a second one has weights already."""
        strategy = self.strategy
        # The script's own directories may be shared by several Trainers: only the first one may go on from what is
        # there. Those below SageMaker's folder are each Trainer's own.
        has_own_directory = moved or self._number == 1
        by_default = self._is_first_fit and self._given_resume is None and has_own_directory
        self._is_first_fit = False
        strategy._resume = "auto" if by_default else self._given_resume
        if strategy.is_global_zero:
            where = str(folders.checkpoints) if moved else "the script's own directories"
            how = "; resume='auto', as the script does not say ('never' starts from scratch)" if by_default else ""
            say(f"SageMaker: checkpoints in {where}, the final model in {folders.model}{how}.")

    def _take_folders(self, folders: Folders) -> bool:
        """Let checkpoints go there, unless the Trainer was given a directory; whether any does."""
        root = str(folders.checkpoints)
        weights = str(folders.checkpoints / "weights")
        # Without `default_root_dir` a Trainer takes the working directory. In a second fit it is the folder already.
        if self.newest_in is None and self._trainer.default_root_dir != self._made_in:
            return False
        moves = False
        for callback in self._trainer.checkpoint_callbacks:
            if getattr(callback, "dirpath", "") in (None, root, weights):  # none given, or ours of an earlier fit
                moves = True
                # Resuming takes the newest file of a directory, which must not be one of weights alone.
                callback.dirpath = weights if getattr(callback, "save_weights_only", False) else root
        if moves and self.strategy._reliability.sharded and self.strategy.num_nodes > 1:
            raise ValueError(
                f"sharded=True needs a directory that all {self.strategy.num_nodes} hosts see, and {root} is each "
                "host's own. Give ModelCheckpoint(dirpath=...) one on a shared file system, such as FSx for Lustre."
            )
        saves_nothing = not self._trainer.checkpoint_callbacks  # but for a stop's, which goes to the root directory
        # Where there is no logger LightningCLI writes its config.yaml into the root directory, and would find it there
        # at the next start.
        if self._trainer.loggers or saves_nothing:
            set_default_root(self._trainer, root)
        return moves or saves_nothing

    # ---- checkpoints ----

    def saved(self, checkpoint: Mapping[str, Any], filepath: Any) -> None:
        """A checkpoint is at ``filepath``; where it can be resumed from, ``newest`` names it."""
        if self.newest_in is not None and self.strategy.is_global_zero and "optimizer_states" in checkpoint:
            self.strategy._saving.own.afterwards(partial(point_at, self.newest_in, filepath))

    # ---- the final model ----

    @property
    def _gives_model(self) -> bool:
        """Whether it is up to us: checkpoints are saved."""
        if self._folders is None or self._trainer is None or self._trainer.state.fn != "fit":
            return False
        return bool(self._trainer.checkpoint_callbacks) and not self.strategy._session.failed

    def training_ends(self) -> None:
        """Save the final weights, unless a metric says which are the best."""
        if self._gives_model and not self.strategy._reliability.sharded and not _best(self._trainer):
            assert self._folders is not None
            self._trainer.save_checkpoint(str(self._folders.model / MODEL))
            self._has_final_model = True

    def end(self) -> None:
        """Put the final model where SageMaker takes it from. Collective. Errors are raised on every rank."""
        if self._gives_model and not self.strategy._interrupted:
            self.strategy._saving.finish()
            if not self._has_final_model:
                self.strategy._saving.on_first(self._put_model)
        self._trainer = None

    def _put_model(self) -> None:
        assert self._folders is not None
        target = str(self._folders.model / MODEL)
        # The best checkpoint by a metric is the model; else the last one; else, of a run that had nothing left to
        # train, the one that it was resumed from.
        for path in (*_best(self._trainer), *_last(self._trainer), self.strategy._saving.loaded_from):
            if path and _exists(path):
                self._folders.model.mkdir(parents=True, exist_ok=True)
                return consolidate(path, target) if is_sharded(path) else copy(path, target)
        return None

    # ---- failures ----

    def write_failure(self, error: BaseException | None = None) -> None:
        """The job's first failure, if the ranks know one; else ``error``."""
        path = failure_file(os.environ)
        if path is None:
            return
        supervisor = self.strategy._supervision.supervisor
        if supervisor is not None and supervisor.failure is not None:
            error = supervisor.failure.error()
        if isinstance(error, RankFailedError):
            write_failure(path, str(error), _STARTED)
        elif error is not None:
            write_failure(path, text_of(error), _STARTED)


def _exists(path: str) -> bool:
    fs, name = url_to_fs(path)
    return bool(fs.exists(name))


def _best(trainer: Any) -> list[str]:
    """Checkpoints with the best value of a metric."""
    callbacks = trainer.checkpoint_callbacks
    return [each.best_model_path for each in callbacks if getattr(each, "monitor", None) and each.best_model_path]


def _last(trainer: Any) -> list[str]:
    """The last checkpoints: without a metric, the best one is the last one."""
    attributes = ("best_model_path", "last_model_path")
    paths = [getattr(each, name, "") for each in trainer.checkpoint_callbacks for name in attributes]
    return [path for path in paths if path]
