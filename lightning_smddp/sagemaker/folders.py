"""SageMaker's folders: what a training job reads back after an interruption, what it hands over, why it failed.

Source: SageMaker Developer Guide, "Amazon SageMaker Training Storage Folders", and aws/sagemaker-training-toolkit
(``files.py``), which keeps a failure file that is there already.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_smddp.launchers.launch import Environ
from lightning_smddp.launchers.sagemaker import base_directory, read_job

POINTER = "newest"
MODEL = "model.ckpt"
_FAILURE_CHARACTERS = 1024  # SageMaker shows no more


@dataclass(frozen=True)
class Folders:
    """Where a job's files belong.

    Where each host trains on its own, its files are in folders of its name: SageMaker copies those of all hosts to
    one folder in S3, and to every host when a job is started again. A second Trainer of a script has folders of its
    own, too, as it must not go on from what the first one has left.

    Attributes:
        checkpoints: copied to S3 as files change, and back at the next start.
        model: copied to S3 when the job has ended, as ``model.tar.gz``.
    """

    checkpoints: Path
    model: Path

    @classmethod
    def of(cls, environ: Environ, num_nodes: int, number: int = 1) -> Folders | None:
        """Those of this job, for a training of ``num_nodes`` hosts by the script's Trainer ``number``; None outside.

        Raises:
            ValueError: a file or a variable of SageMaker's cannot be understood.
        """
        job = read_job(environ)
        if job is None:
            return None
        base = base_directory(environ)
        own = Path()
        if num_nodes < len(job.hosts):  # each host, or each group of hosts, trains on its own
            own = own / job.current_host
        if number > 1:
            own = own / f"trainer{number}"
        return cls(checkpoints=base / "checkpoints" / own, model=base / "model" / own)


def failure_file(environ: Environ) -> Path | None:
    """Where to say why the job failed, if this is one."""
    with suppress(ValueError):  # which may be what there is to say
        if read_job(environ) is None:
            return None
    return base_directory(environ) / "output" / "failure"


def write_failure(path: Path, text: str, since: float) -> None:
    """Say why the job failed, unless this host has said so already. Never raises: ``text`` is what matters.

    Args:
        path: see :func:`failure_file`.
        text: is cut to the 1024 characters that SageMaker shows.
        since: seconds since 1970. An older file is of an earlier start of the script in this container.
    """
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_mtime < since:
            path.unlink(missing_ok=True)
        with open(path, "x", encoding="utf-8", errors="replace") as file:  # fails where another rank was first
            file.write(text[:_FAILURE_CHARACTERS])


def point_at(folder: Path, checkpoint: str | os.PathLike[str]) -> None:
    """Let the file ``newest`` in ``folder`` name ``checkpoint``, if that is inside. It is replaced at once.

    Raises:
        OSError: as the system reports it.
    """
    from lightning_smddp.checkpoint.files import write

    path, inside_of = Path(os.path.abspath(checkpoint)), os.path.abspath(folder)
    if "://" not in os.fspath(checkpoint) and path.is_relative_to(inside_of):
        name = f"{path.relative_to(inside_of)}\n"
        write(lambda file: file.write(name.encode()), folder / POINTER)


def pointed_at(folder: Path) -> str | None:
    """The checkpoint that ``newest`` in ``folder`` names, if it is there: the two may have been copied at two times."""
    try:
        name = (folder / POINTER).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    # What is in S3 is not trusted: the name may be absolute, have `..`, or be empty.
    path = folder / name
    absolute = Path(os.path.abspath(path))
    is_inside = absolute.is_relative_to(os.path.abspath(folder))
    if not is_inside or path == folder or not path.exists():
        return None
    return str(path)
