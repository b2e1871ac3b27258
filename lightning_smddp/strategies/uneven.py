"""``CommunicationOptions(uneven=...)``: ranks whose data ends earlier than that of others.

``"stop"``: an epoch ends for all ranks where the data of the first one does. ``"join"``: it goes on to the end of the
last one's, and a rank without data repeats its last batch, which counts nothing: all ranks take part in all collectives
then, and gradients and what is logged are means over the ranks that have data.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric
from typing_extensions import override

from lightning_smddp._compat.torch import set_update_count
from lightning_smddp._compat.trainer import around_training_logs, training_loaders
from lightning_smddp.communication.groups import world
from lightning_smddp.communication.tensors import broadcast_tensors
from lightning_smddp.patches import patched
from lightning_smddp.pytree import copied
from lightning_smddp.resume.resumable_loader import RandomStates, ResumableLoader
from lightning_smddp.strategies.tables import say
from lightning_smddp.wording import counted


class EvenLoader(ResumableLoader):
    """Stands for a training ``loader`` that has as many batches on every rank. Made and iterated by all ranks at once.

    Args:
        loader: a ``DataLoader``, or any iterable.
        states: the run's random numbers.
        trainer: of the run.
        joins: whether the longest loader ends an epoch; else the shortest one does.

    Attributes:
        ends: how many batches each rank has in this epoch; inf where that is not known yet.

    Raises:
        ValueError: on every rank: one has no batch at all, and others have some.
    """

    ends: list[float]

    def __init__(self, loader: Any, states: RandomStates, trainer: Any, joins: bool) -> None:
        super().__init__(loader, states)
        vars(self).update(_trainer=trainer, _joins=joins, _said=None)
        self._compare_lengths()

    @property
    def _end(self) -> float:
        return max(self.ends) if self._joins else min(self.ends)

    @override
    def __len__(self) -> int:
        if math.inf in self.ends:
            raise TypeError("Some rank's loader has no length")
        return int(self._end)

    @override
    def _make(self) -> Iterator[Any]:
        iterator = super()._make()
        self._compare_lengths()
        return self._together(iterator)

    def _together(self, batches: Iterator[Any]) -> Iterator[Any]:
        rank, latest = dist.get_rank(), None
        for number in itertools.count():
            fetched = list(itertools.islice(batches, 1)) if number < self.ends[rank] else []
            if math.inf in self.ends:
                have = self._everyones(len(fetched))
                self._take([end if has else min(end, number) for end, has in zip(self.ends, have, strict=True)])
            if number >= self._end or (number < self.ends[rank] and not fetched):  # fewer than its length says
                return
            if self._joins and fetched:
                latest = fetched[0]
            yield fetched.pop() if fetched else copy.deepcopy(latest)  # a variable would keep the batch

    def _compare_lengths(self) -> None:
        try:
            own = len(self.loader)
        except (TypeError, NotImplementedError):
            own = -1
        lengths = self._everyones(own)
        self._take([math.inf] * len(lengths) if -1 in lengths else lengths)

    def _everyones(self, number: int) -> list[int]:
        """Each rank's ``number``, by a message between hosts where they are connected."""
        on_hosts = "cpu:" in dist.get_backend_config(world())
        numbers = torch.zeros(dist.get_world_size(), dtype=torch.int64)
        numbers[dist.get_rank()] = number
        numbers = numbers if on_hosts else numbers.to(self._trainer.strategy.root_device)
        dist.all_reduce(numbers)
        return numbers.tolist()

    def _take(self, ends: Sequence[float]) -> None:
        """The data of each rank ends there, as far as is known."""
        vars(self)["ends"] = ends
        end, epoch = min(ends), f"epoch {self._trainer.current_epoch}"
        if end == max(ends):
            return
        rank = ends.index(end)
        if end == 0:
            raise ValueError(
                f"The data of rank {rank} has no batch in {epoch}, and `uneven` needs one of each rank. Give that one "
                "samples, or use fewer ranks."
            )
        if not self._joins and self._said != end and self._trainer.is_global_zero:
            vars(self)["_said"] = end
            more = counted(sum(other > end for other in ends), "rank")
            text = f"{epoch} ends after {counted(int(end), 'batch')}, as rank {rank}'s data does; {more} had more"
            say(text, self._trainer)


class Join:
    """``uneven="join"`` in a fit: what ranks do that repeat their last batch leaves no trace, but for users' hooks.

    Args:
        trainer: of the fit, whose loader is made.

    Raises:
        ValueError: on every rank: there are several loaders, or layers that count a repeated batch.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._module: nn.Module = trainer.lightning_module
        self._loaders = training_loaders(trainer)
        self._in_step = False  # a value of this step is logged
        cause = "several training loaders" if len(self._loaders.flattened) > 1 else ""
        if any(isinstance(module, nn.SyncBatchNorm) for module in self._module.modules()):
            cause = "SyncBatchNorm, whose statistics are of all ranks' batches"
        if cause:
            raise ValueError(f"uneven='join' cannot be used with {cause}. Use uneven='stop'.")

    @property
    def with_data(self) -> list[bool]:
        """Of each rank, whether the present batch is its own, and not its last one once more."""
        number = self._trainer.fit_loop.epoch_loop.batch_idx
        return [end > number for end in self._loaders.flattened[0].ends]

    @property
    def counts(self) -> bool:
        """Whether this rank's present batch is its own."""
        return self.with_data[dist.get_rank()]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around the training of a fit."""
        strategy = self._trainer.strategy
        step = strategy.training_step

        def training_step(*args: Any, **kwargs: Any) -> Any:
            with self._step():
                return step(*args, **kwargs)

        steps = patched([(vars(strategy), "training_step", training_step)])
        with steps, around_training_logs(self._trainer, self._logging):
            yield

    @contextmanager
    def _step(self) -> Iterator[None]:
        """A rank without data gets its metrics' states back, and buffers of one that has data."""
        with_data, counts = self.with_data, self.counts
        metrics = [module for module in self._module.modules() if isinstance(module, Metric) and not counts]
        states = [(metric.update_count, copied(metric.metric_state)) for metric in metrics]
        yield
        for metric, (count, state) in zip(metrics, states, strict=True):
            vars(metric).update(state)
            set_update_count(metric, count)
        if all(with_data):
            return
        # The first rank's buffers go to all others before the next step. By `data`, as the backward pass is to come.
        buffers = [buffer.data for buffer in self._module.buffers()]
        received = buffers if not counts else copied(buffers)
        broadcast_tensors(received, world(), with_data.index(True), self._trainer.strategy.root_device)

    @contextmanager
    def _logging(self, hook: str) -> Iterator[bool]:
        """Around ``hook`` logging a value; whether that counts for this rank's mean over the epoch."""
        self._in_step = "epoch" not in hook
        try:
            yield not self._in_step or self.counts
        finally:
            self._in_step = False

    def share(self, value: Any, group: dist.ProcessGroup | None, reduce_op: Any) -> Any:
        """What this rank brings to a reduction over ``group``, so that in a step ranks without data do not count."""
        if not isinstance(value, Tensor):
            return value
        is_mean = reduce_op in ("mean", "avg")
        if is_mean and not value.is_floating_point():
            value = value.float()  # Lightning rounds the mean of integers, such as of numbers of samples, down
        if not self._in_step:
            return value
        if not self.counts:
            return torch.full_like(value, {"min": math.inf, "max": -math.inf}.get(reduce_op, 0.0))
        present = [self.with_data[rank] for rank in dist.get_process_group_ranks(group or world())]
        return value * (len(present) / sum(present)) if is_mean else value
