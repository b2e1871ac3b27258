"""Lightning's CheckpointIO over ``checkpoint/``, also while training goes on."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint

from lightning_smddp import pytree
from lightning_smddp.checkpoint import files
from lightning_smddp.checkpoint.errors import CheckpointError

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO as _Base
else:
    _Base = object

Path = str | PathLike[str]


class SafeFiles(_Base):
    """Checkpoints as ordinary files, of which a whole one exists whenever the process or the machine dies.

    Local files are written beside their place and renamed; URLs (``s3://...``) likewise, in their store. They stay
    readable by ``torch.load`` and by Lightning without this package. Their checksums are compared before they are
    loaded, and tensors and plain data alone are.

    Args:
        asynchronous: write in a thread. Saving then takes as long as copying all tensors to host memory, which holds
            them until they are written. There is one at a time: a save that follows another waits until that one is
            written. A checkpoint that another replaces (``save_top_k``) is removed when the other is complete. Failures
            are raised by the next call, and known at once: see ``failure``.
    """

    def __init__(self, asynchronous: bool = False) -> None:
        self.asynchronous = asynchronous
        self._refused: set[str] = set()  # what a warning has named
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None  # what is written, or is to follow it, until its end was looked at

    def __getstate__(self) -> dict[str, Any]:
        """For ``pickle`` and ``copy.deepcopy``: without the thread."""
        return {**vars(self), "_thread": None, "_last": None}

    @property
    def failure(self) -> BaseException | None:
        """Why an asynchronous save failed, until it has been raised. Cheap: may be read every step."""
        if self._last is None or not self._last.done():
            return None
        return self._last.exception()

    def raise_failure(self) -> None:
        """Raise why an asynchronous save failed, once; nothing without such a failure."""
        failure = self.failure
        if failure is not None:
            self._last = None
            raise failure

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Path, storage_options: Any = None) -> None:
        """Save to a path or URL; with ``asynchronous`` return when the one before is written and this one copied.

        Raises:
            OSError: of the kind that the system reported, with ``path`` in it; or of an earlier asynchronous save.
            TypeError: ``storage_options`` were given; fsspec has its own settings for each store.
        """
        if storage_options is not None:
            raise TypeError(
                f"storage_options={storage_options!r} cannot be used: loading a checkpoint takes none. "
                "Set them in the environment or in fsspec's configuration, such as AWS_ENDPOINT_URL."
            )
        self.teardown()  # before there are two in memory
        if self.asynchronous and "state_dict" in checkpoint:  # not the file by which `ddp_spawn` returns weights
            dump = partial(torch.save, _snapshot(checkpoint))
            self._thread = ThreadPoolExecutor(1, "checkpoint writer")
            self._last = self._thread.submit(self._write, dump, path)
        else:
            self._write(partial(torch.save, checkpoint), path)

    def _write(self, dump: Callable[[Any], object], path: Path) -> None:
        """Write, and say once which objects resuming from it will refuse."""
        files.write(dump, path)
        fs, name = files.locate(path)
        unsafe = set() if fs is not None else set(get_unsafe_globals_in_checkpoint(name))
        refused = unsafe - self._refused
        if refused:
            self._refused |= refused
            names = ", ".join(sorted(refused))
            warnings.warn(
                f"{path} contains {names}, which is not plain data, and resuming will refuse it. Save it as numbers, "
                "strings and tensors, leave it out (`save_hyperparameters(ignore=[...])`), or before you resume call "
                f"`torch.serialization.add_safe_globals([{names}])`.",
                stacklevel=2,
            )

    def load_checkpoint(self, path: Path, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Verify and load, to the CPU unless ``map_location`` says otherwise.

        Raises:
            CheckpointError: the file is damaged, no checkpoint, or has objects that are not plain data.
            OSError: as the system reports it.
        """
        self.teardown()
        loaded: dict[str, Any] = files.load(path, "cpu" if map_location is None else map_location, weights_only)
        return loaded

    def remove_checkpoint(self, path: Path) -> None:
        """Remove, once what is being written is complete; not if it fails."""
        self.afterwards(partial(files.remove, path))

    def afterwards(self, action: Callable[[], None]) -> None:
        """Call ``action`` once what is being written is complete; not if it fails."""
        before = self._last
        if before is None or self._thread is None or before.done():
            if self.failure is None:
                action()
            return

        def follow() -> None:
            before.result()  # raises its failure
            action()

        self._last = self._thread.submit(follow)

    def teardown(self) -> None:
        """Wait for what is being written, and raise its failure."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self.raise_failure()
        self._last = None


def _snapshot(checkpoint: Any) -> Any:
    """A copy on the host, in which tensors that share memory still do: nothing that training does changes it."""
    storages: dict[Any, Any] = {}
    copies: dict[int, Any] = {}  # which `deepcopy` takes for tensors with these ids
    for tensor in pytree.tensors(checkpoint):
        is_plain = type(tensor) is Tensor and tensor.layout is torch.strided and not vars(tensor)
        if not is_plain or tensor.is_meta or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            continue  # `deepcopy` knows how
        storage = tensor.untyped_storage()
        place = (storage.device, storage.data_ptr())
        if place not in storages:
            storages[place] = storage.clone() if tensor.is_cpu else storage.cpu()
        own = torch.empty(0, dtype=tensor.dtype)
        own.set_(storages[place], tensor.storage_offset(), tensor.size(), tensor.stride())
        copies[id(tensor)] = own.requires_grad_(tensor.requires_grad)
    return copy.deepcopy(checkpoint, copies)


def require_trainers(checkpoint: Any, path: Path) -> None:
    """Raise ``CheckpointError`` unless ``checkpoint`` is what a Trainer saved.

    Without this, Lightning's migration raises ``KeyError: 'pytorch-lightning_version'``.
    """
    if isinstance(checkpoint, dict) and {"pytorch-lightning_version", "state_dict"} <= set(checkpoint):
        return
    fix = "To load weights alone, call `model.load_state_dict(torch.load(path, weights_only=True))` before `fit`."
    raise CheckpointError(path, "was not saved by a Trainer: no `pytorch-lightning_version` and `state_dict`", fix)
