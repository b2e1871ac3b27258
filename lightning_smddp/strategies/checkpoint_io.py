"""Lightning's CheckpointIO over ``checkpoint/``, also while training goes on.

In the background there is one thread and one checkpoint at a time, and failures do not wait for the end.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

from lightning_smddp.checkpoint.contents import Dump, Snapshot, bytes_needed, dump_of
from lightning_smddp.checkpoint.errors import CheckpointError
from lightning_smddp.checkpoint.locations import remove_checkpoint, write_checkpoint
from lightning_smddp.checkpoint.reading import read_checkpoint, refused_objects

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO as _Base
else:
    _Base = object


Task = Callable[[], None]

Path = str | PathLike[str]


class BackgroundWriter:
    """Runs one task at a time in a thread, and what may only be done after it if it succeeded."""

    def __init__(self) -> None:
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._busy = False  # together with `_afterwards`, changed under the lock only
        self._afterwards: list[Task] = []

    @property
    def failure(self) -> BaseException | None:
        """What the last task raised, until :meth:`raise_failure` has raised it. Cheap: may be read every step."""
        return self._failure

    def raise_failure(self) -> None:
        """Raise what the last task raised, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def submit(self, task: Task) -> None:
        """Wait for the task before, raise its failure, and start ``task``."""
        self.wait()
        self.raise_failure()
        self._busy = True
        self._thread = threading.Thread(target=self._run, args=(task,), name="checkpoint writer")
        self._thread.start()

    def afterwards(self, task: Task) -> None:
        """Run ``task`` when the running one has succeeded, now if none runs; not at all if it failed.

        For removing what the running one replaces.
        """
        # Under the lock it is either the thread that will find this task when it has ended, or nobody: then it is our
        # turn. So none is forgotten, and none runs twice.
        with self._lock:
            if self._busy:
                self._afterwards.append(task)
                return
            failed = self._failure is not None
        if not failed:
            task()

    def wait(self) -> None:
        """Block until the task in the background has ended."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Wait, and raise what has not been raised yet."""
        self.wait()
        self.raise_failure()

    def _run(self, task: Task) -> None:
        # What was asked for meanwhile follows in this thread, one after the other. If any fails, the rest is forgotten:
        # it would remove what the failed one was to replace.
        try:
            task()
            following = self._next()
            while following is not None:
                following()
                following = self._next()
        except BaseException as error:
            with self._lock:
                self._failure, self._busy = error, False
                self._afterwards.clear()

    def _next(self) -> Task | None:
        with self._lock:
            if self._afterwards:
                return self._afterwards.pop(0)
            self._busy = False
            return None


class SafeFiles(_Base):
    """Checkpoints as ordinary files, of which a valid one exists whenever the process or the machine dies.

    Local files are written beside their place, verified and renamed; URLs (``s3://...``) likewise, in their store.
    Files carry torch's checksums and stay readable by ``torch.load`` and by Lightning without this package. Files are
    verified before they are loaded, and load tensors and plain data only.

    Args:
        asynchronous: write in a thread. Saving then takes as long as copying everything to CPU memory, which holds
            that copy until it is written. There is one copy at a time: a save that follows another waits until that
            one is written, as the second one of ``ModelCheckpoint(save_last=True)`` does at each save. A checkpoint
            that another replaces (``save_top_k``) is removed when the other is complete. Failures are raised by the
            next call, and known at once: see ``failure``.
        verify: read each file back after writing it.
    """

    def __init__(self, asynchronous: bool = False, verify: bool = True) -> None:
        self.asynchronous, self._verify = asynchronous, verify
        self._refused: set[str] = set()  # said already
        self._writer: BackgroundWriter | None = None  # made when needed: it cannot be sent to a spawned process

    def __getstate__(self) -> dict[str, Any]:
        """For ``pickle`` and ``copy.deepcopy``: without the thread."""
        return {**vars(self), "_writer": None}

    @property
    def failure(self) -> BaseException | None:
        """Why an asynchronous save failed, until it has been raised. Cheap: may be read every step."""
        if self._writer is None:
            return None
        return self._writer.failure

    def raise_failure(self) -> None:
        """Raise why an asynchronous save failed, once; nothing without such a failure."""
        if self._writer is not None:
            self._writer.raise_failure()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Path, storage_options: Any = None) -> None:
        """Save to a path or URL; with ``asynchronous`` return when the one before is written and this one copied.

        Raises:
            OSError: of the kind that the system reported, with ``path`` and the bytes needed in the message; or of an
                earlier asynchronous save.
            TypeError: ``storage_options`` were given; fsspec has its own settings for each store.
        """
        if storage_options is not None:
            raise TypeError(
                f"storage_options={storage_options!r} cannot be used: loading a checkpoint takes none. "
                "Set them in the environment or in fsspec's configuration, such as AWS_ENDPOINT_URL."
            )
        if self.asynchronous and "state_dict" in checkpoint:  # not the file by which `ddp_spawn` returns weights
            if self._writer is None:
                self._writer = BackgroundWriter()
            self._writer.close()  # before there are two copies in memory
            snapshot = Snapshot(checkpoint)
            write = partial(self._write, snapshot.dump, path, snapshot.size)
            self._writer.submit(write)
        else:
            self._settle()
            self._write(dump_of(checkpoint), path, bytes_needed(checkpoint))

    def _write(self, dump: Dump, path: Path, size: int) -> None:
        """Write, and say once which objects resuming from it will refuse."""
        write_checkpoint(dump, path, size, self._verify)
        refused = [name for name in refused_objects(path) if name not in self._refused]
        if refused:
            self._refused.update(refused)
            names = ", ".join(refused)
            warnings.warn(
                f"{path} contains {names}, which is not plain data, and resuming will refuse it. Save it as numbers, "
                "strings and tensors, leave it out (`save_hyperparameters(ignore=[...])`), or before you "
                f"resume call `torch.serialization.add_safe_globals([{names}])`; or give `fit` weights_only=False, "
                "which runs code that the file contains.",
                stacklevel=2,
            )

    def load_checkpoint(self, path: Path, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Verify and load, to the CPU unless ``map_location`` says otherwise.

        Raises:
            CheckpointError: the file is damaged, no checkpoint, or has objects that are not plain data.
            FileNotFoundError: there is no such file.
        """
        self._settle()
        where = "cpu" if map_location is None else map_location
        loaded: dict[str, Any] = read_checkpoint(path, where, weights_only)
        return loaded

    def remove_checkpoint(self, path: Path) -> None:
        """Remove, once what is being written is complete; not if it fails."""
        self.afterwards(partial(remove_checkpoint, path))

    def afterwards(self, action: Callable[[], None]) -> None:
        """Call ``action`` once what is being written is complete; not if it fails."""
        if self._writer is None:
            action()
        else:
            self._writer.afterwards(action)

    def teardown(self) -> None:
        """Wait for what is being written, and raise its failure."""
        self._settle()

    def _settle(self) -> None:
        if self._writer is not None:
            self._writer.close()


def require_trainers(checkpoint: Any, path: Path) -> None:
    """Raise ``CheckpointError`` unless ``checkpoint`` is what a Trainer saved.

    Without this, Lightning's migration raises ``KeyError: 'pytorch-lightning_version'``.
    """
    if not isinstance(checkpoint, dict):
        reason = f"contains a {type(checkpoint).__name__}, not the dict that a Trainer saves"
    elif "pytorch-lightning_version" not in checkpoint or "state_dict" not in checkpoint:
        found = ", ".join(str(key) for key in list(checkpoint)[:5])
        reason = f"was not saved by a Trainer: it has no `pytorch-lightning_version` or no `state_dict`, but {found}"
    else:
        return
    fix = "To load weights alone, call `model.load_state_dict(torch.load(path, weights_only=True))` before `fit`."
    raise CheckpointError(path, reason, fix)
