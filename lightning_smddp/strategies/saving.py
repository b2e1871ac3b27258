"""Checkpoints of the Trainer strategies: written so that a whole one always exists.

The way of ``trainer.save_checkpoint(path)``:

1. Lightning collects the checkpoint on every rank; a pipeline gathers its parts on the first rank
   (``pipeline/state/state_dict.py``, ``optimizer.py``), or with ``sharded`` gives each rank its own. The state of
   optimizers whose work ranks share is put together by ``sharding/optimizer_states.py``, what FSDP2 or DeepSpeed has
   divided by ``sharding/whole_states.py`` and ``deepspeed/whole_states.py``.
2. ``TrainerStrategy.save_checkpoint`` adds what an exact resume needs, and calls :meth:`Saving.save`.
3. A plain file is written by the first rank: the CheckpointIO, :class:`SafeCheckpointIO` (in a thread with
   ``async_save``), ``checkpoint/files.py``. With ``sharded`` every rank writes to a directory:
   ``checkpoint/sharded.py``, by ``torch.distributed.checkpoint`` (in threads that have a group of their own with
   ``async_save``).

On resume Lightning calls ``load_checkpoint``, which takes either by what is there (:meth:`Saving.load`), then
``load_model_state_dict`` and ``load_optimizer_state_dict``. A checkpoint always has the names of the whole module, so
a pipeline's rank takes its own part of it (``bridge/partitioned_module.py``: at once, or when the stages are known); of
a directory no more is read (``checkpoint/stored.py``). Which checkpoint it is with ``resume="auto"`` is found by
``resume/auto_resume.py`` before; samples and random numbers are put back by ``resume/exact_resume.py`` behind it.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lightning_smddp import pytree
from lightning_smddp._compat.torch import new_group_among
from lightning_smddp.checkpoint import files, sharded
from lightning_smddp.checkpoint.files import CheckpointError
from lightning_smddp.checkpoint.parts import names_of
from lightning_smddp.communication.groups import new_name
from lightning_smddp.communication.objects import first
from lightning_smddp.sharding.optimizer_shards import unwrapped

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO as _Base

    from lightning_smddp.strategies.base import TrainerStrategy
else:
    _Base = object

Path = str | PathLike[str]


class Saving:
    """Saves and loads by :class:`SafeCheckpointIO`, unless the user gave another.

    With ``sharded``, each rank saves and loads its own part of a checkpoint, which is a directory: the strategy gives
    Lightning this rank's part of the module's and the optimizers' states, a checkpoint as ever with less in it. Hooks
    of the user's see such a part, on every rank. Directories are loaded with and without it.

    Attributes:
        loaded_from: the path of the last checkpoint that was loaded.
        own: the CheckpointIO, if it is ours; what the user's own does in the background is not asked for.
    """

    def __init__(self, strategy: TrainerStrategy) -> None:
        self.strategy = strategy
        self.loaded_from: Any = None
        self.own = SafeCheckpointIO(asynchronous=strategy._reliability.async_save)
        self._background: dist.ProcessGroup | None = None  # of threads that write directories

    # ---- the CheckpointIO ----

    def choose_io(self, given: Any) -> Any:
        """The user's CheckpointIO, with ours in it if it wraps another; ours if ``given`` is None."""
        if isinstance(given, SafeCheckpointIO):
            self.own = given
        elif getattr(given, "checkpoint_io", self) is None:  # it wraps another, as `AsyncCheckpointIO` does
            given.checkpoint_io = self.own
        return self.own if given is None else given

    def finish(self) -> None:
        """Wait for what is written in the background. Its error is raised on every rank. Collective."""
        self.on_first(self.own.teardown)

    def on_first(self, act: Callable[[], None]) -> None:
        """Call ``act`` on the first rank, and raise its error on all. Collective, but behind an exception.

        Then other ranks may be gone.
        """
        if not self.strategy._interrupted:
            first(act)
        elif self.strategy.is_global_zero:
            act()

    # ---- files and directories ----

    def save(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        """Save, by the CheckpointIO on the first rank or this rank's part. Errors are raised on every rank.

        Raises:
            OSError, ValueError: see :func:`lightning_smddp.checkpoint.sharded.save`; with ``async_save`` later, at
                the next batch.
            TypeError: ``storage_options`` were given with ``sharded``.
        """
        strategy = self.strategy
        # Behind an exception only those strategies save of which the first rank has all.
        if not strategy._reliability.sharded or strategy._interrupted:
            write = strategy.checkpoint_io.save_checkpoint
            self.on_first(partial(write, checkpoint, filepath, storage_options=storage_options))
            return
        if storage_options is not None:
            raise TypeError(f"storage_options={storage_options!r} cannot be used with sharded=True: it takes no URLs.")
        module = strategy.lightning_module
        assert module is not None
        # The parameters of each optimizer, in the order in which its state numbers them.
        optimizers = strategy.optimizers if "optimizer_states" in checkpoint else []
        optimized = [strategy._optimized(unwrapped(optimizer)) for optimizer in optimizers]
        own_part = checkpoint if strategy._has_part_to_save else None
        order = list(module.state_dict(keep_vars=True)) if strategy.is_global_zero else ()
        write = partial(sharded.save, names=names_of(module, optimized), order=order)
        path = sharded.local_path(filepath)
        if strategy._reliability.async_save:
            self.own.in_background(partial(write, group=self._background_group()), own_part, path)
        else:
            write(own_part, path)

    def _background_group(self) -> dist.ProcessGroup | None:
        """Where threads of all ranks meet, while training uses the others; None for one process. Collective."""
        world = dist.group.WORLD
        if self._background is None and world is not None:
            ranks = list(range(world.size()))
            self._background = new_group_among(ranks, new_name(world), self.strategy._limit, backend="gloo")
        return self._background

    def load(self, path: Any, weights_only: bool | None) -> dict[str, Any]:
        """What a Trainer has saved, in whatever layout: a file by the CheckpointIO."""
        io: Any = self.strategy.checkpoint_io
        if sharded.is_sharded(path) and (io is self.own or sharded.is_ours(path)):
            loaded = sharded.load(path, weights_only)
        else:
            torch.cuda.empty_cache()  # as Lightning does
            loaded = io.load_checkpoint(path, weights_only=weights_only)
        if "pytorch-lightning_version" not in loaded:  # which Lightning asks for, and no other key
            raise CheckpointError(path, "was not saved by a Trainer", "Load it by the module's `load_state_dict`.")
        self.loaded_from = path
        return loaded

    def require_as_many_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Raise ``CheckpointError`` where Lightning would leave out what is too much."""
        saved, ours = len(checkpoint["optimizer_states"]), len(self.strategy.optimizers)
        if saved != ours:
            raise CheckpointError(
                self.loaded_from, f"has {saved} optimizers, the model has {ours}", "Build the same ones."
            )


class SafeCheckpointIO(_Base):
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
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None  # what is written, or is to follow it, until its end was looked at

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
        if self.asynchronous and "state_dict" in checkpoint:  # not the file by which `ddp_spawn` returns weights
            self.in_background(files.save, checkpoint, path)
        else:
            self.teardown()
            files.save(checkpoint, path)

    def in_background(self, save: Callable[[Any, Path], None], checkpoint: Any, path: Path) -> None:
        """Call ``save`` in a thread with a copy of ``checkpoint`` and ``path``, once the one before is written.

        Raises:
            Exception: of the one before.
        """
        self.teardown()  # before there are two in memory
        fs, name = files.locate(path)
        if fs is None:  # Lightning links to it (`save_last="link"`) before it is there
            os.makedirs(os.path.dirname(name), exist_ok=True)
        self._thread = ThreadPoolExecutor(1, "checkpoint writer")
        self._last = self._thread.submit(save, _snapshot(checkpoint), path)

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
        if before is None or self._thread is None:
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
    """A copy on the host, which nothing that training does changes."""
    # `deepcopy` would leave tensors on their device, and refuses those that have a graph.
    own = {
        id(tensor): tensor.detach().to("cpu", copy=True)
        for tensor in pytree.tensors(checkpoint)
        if not (tensor.is_cpu and tensor.is_leaf) and not tensor.is_meta
    }
    return copy.deepcopy(checkpoint, own)
