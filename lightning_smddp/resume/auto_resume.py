"""``resume="auto"``: a script that is started again goes on from the newest valid checkpoint that it has left.

torchrun (``--max-restarts``), Slurm (requeue) and SageMaker (spot instances) all just run the script again, with
``trainer.fit(model)`` in it. Rank 0 looks for checkpoints where the Trainer writes them and verifies the newest, and
all ranks start from it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning_smddp._compat.trainer import at_resume_start, requeue_checkpoint
from lightning_smddp.checkpoint.newest import newest_checkpoint
from lightning_smddp.sagemaker.folders import pointed_at
from lightning_smddp.strategies.tables import say

STOP_CHECKPOINT = "smddp-stop.ckpt"


def stop_checkpoint(trainer: Any) -> str:
    """Where the checkpoint of a run that is told to stop belongs: where :func:`checkpoint_locations` looks."""
    directories = [*_directories(trainer), str(trainer.default_root_dir)]
    return f"{directories[0]}/{STOP_CHECKPOINT}"


def checkpoint_locations(trainer: Any) -> list[str]:
    """Directories and files in which a fit may have left checkpoints, each once.

    Those of the checkpoint callbacks (not of those that save weights alone), of earlier versions of the same logger,
    the checkpoint of a stop, and the one that Lightning writes when Slurm requeues the job.
    """
    found = [location for directory in _directories(trainer) for location in _versions(directory)]
    found.append(os.path.join(str(trainer.default_root_dir), STOP_CHECKPOINT))
    requeued = requeue_checkpoint(trainer)
    if requeued is not None:
        found.append(requeued)
    return list(dict.fromkeys(found))


def continuing(trainer: Any) -> None:
    """Let a fit without ``ckpt_path`` start from the newest valid checkpoint. Collective when it does.

    A checkpoint of a finished run lets ``fit`` return at once.

    Args:
        trainer: Lightning's.
    """

    def choose(given: Any) -> Any:
        # Lightning hands over its file of a requeued Slurm job as if the user had named it. Here it is a candidate
        # among the others, as it need be neither the newest nor valid.
        is_users = given not in (None, requeue_checkpoint(trainer))
        if trainer.state.fn != "fit" or is_users:
            return given
        locations = checkpoint_locations(trainer)
        # SageMaker copies files back from S3 at times of its own: there one file names the newest.
        folder = trainer.strategy._sagemaker.newest_in
        named = folder and pointed_at(folder)
        path = newest_checkpoint([named] if named else []) or newest_checkpoint(locations)
        if trainer.is_global_zero:
            text = f"goes on from {path}"
            if path is None:
                text = f"starts from scratch: there is no checkpoint in {', '.join(locations)}"
            say(f"resume='auto': the run {text}")
        return path

    at_resume_start(trainer, choose)


def _directories(trainer: Any) -> list[str]:
    """Of the callbacks that save more than weights."""
    found = []
    for callback in trainer.checkpoint_callbacks:
        directory = getattr(callback, "dirpath", None)
        if directory is not None and not getattr(callback, "save_weights_only", False):
            found.append(str(directory))
    return found


def _versions(directory: str) -> list[str]:
    """``logs/name/version_3/checkpoints`` is that of one start of the script: those of the others too."""
    path = Path(directory)
    if "://" in directory or not path.parent.name.startswith("version_"):
        return [directory]
    versions = path.parent.parent.glob(f"version_*/{path.name}")
    return [directory, *sorted(map(str, versions))]
