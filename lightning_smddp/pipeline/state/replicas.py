"""Data parallelism of one stage: its gradients are averaged over the replicas, bucket by bucket, during backward.

A bucket is flat memory in which the gradients of some parameters accumulate in place. ``DistributedDataParallel``
cannot do it: with schedules that split backward in two it averages too early, and nothing says so
(pytorch/pytorch#144530).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket

from lightning_smddp.communication.choose import DEFAULT_BUCKET_MB, Choice, choose
from lightning_smddp.communication.communicator import Communicator
from lightning_smddp.communication.compression import Compression
from lightning_smddp.communication.consistency import check_same_model
from lightning_smddp.communication.hook import GradientSynchronizer
from lightning_smddp.communication.nonfinite import NonFinite
from lightning_smddp.communication.report import Recorder
from lightning_smddp.communication.tensors import from_numbers


class GradientBucket:
    """Has what ``GradientSynchronizer.average`` asks of DDP's ``GradBucket``.

    Each parameter's ``.grad`` is a view of the bucket from :meth:`begin` on, so that backward adds to it in place.

    Args:
        number: its position in the order of launches.
        parameters: of one dtype, on one device.
        last: whether no bucket follows.
    """

    def __init__(self, number: int, parameters: list[nn.Parameter], last: bool) -> None:
        first = parameters[0]
        self._number = number
        self._parameters = parameters
        self._last = last
        sizes = [parameter.numel() for parameter in parameters]
        # flat:  gradient of p0 | gradient of p1 | ...
        self._flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        self._views: list[Tensor] = []
        for parameter, part in zip(parameters, self._flat.split(sizes), strict=True):
            # The parameter's strides where they leave no holes, as optimizers are fastest with equal ones.
            strides = torch.empty_like(parameter, device="meta").stride()
            self._views.append(part.as_strided(parameter.shape, strides))

    def index(self) -> int:
        """Its position in the order of launches."""
        return self._number

    def buffer(self) -> Tensor:
        """All gradients, one after the other."""
        return self._flat

    def parameters(self) -> list[nn.Parameter]:
        """Those whose gradients are in :meth:`buffer`, in its order."""
        return self._parameters

    def is_last(self) -> bool:
        """Whether it is the last that is launched; DDP names it so."""
        return self._last

    def begin(self, keep: bool) -> None:
        """Let gradients flow in: added to what ``.grad`` holds, or to zero."""
        if keep:
            self.collect()
        else:
            self._flat.zero_()  # one kernel instead of one for each parameter
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if keep and parameter.grad is None:
                view.zero_()
            parameter.grad = view

    def collect(self) -> None:
        """Take in gradients that someone put elsewhere, as ``backward(create_graph=True)`` does."""
        for parameter, view in zip(self._parameters, self._views, strict=True):
            gradient = parameter.grad
            if gradient is not None and (gradient.is_sparse or gradient.data_ptr() != view.data_ptr()):
                view.copy_(gradient.detach())
                parameter.grad = view

    def hand_out(self, used: Set[int]) -> None:
        """Set ``.grad``: the view, or None for parameters whose ``id`` is not in ``used``."""
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view if id(parameter) in used else None


def assign_buckets(parameters: list[nn.Parameter], cap_bytes: int) -> list[GradientBucket]:
    """Buckets of at most ``cap_bytes`` (but one parameter at least), in the order in which backward fills them.

    That is taken to be the reverse of the module's.
    """
    # A bucket can start when its last gradient is there, so buckets are in the order of their last members. Launches
    # follow it on all replicas: collectives in another order on another rank would never match.
    filled: dict[int, list[nn.Parameter]] = {}
    filling: dict[torch.dtype, list[nn.Parameter]] = {}  # the open bucket of each dtype
    for parameter in reversed(parameters):
        members = filling.get(parameter.dtype)
        if members is None or sum(member.nbytes for member in members) + parameter.nbytes > cap_bytes:
            members = filling[parameter.dtype] = []
        members.append(parameter)
        filled[id(members)] = filled.pop(id(members), members)
    return [
        GradientBucket(number, members, number == len(filled) - 1) for number, members in enumerate(filled.values())
    ]


class ReplicaGradients:
    """Averages the gradients of this rank's parameters over all replicas.

    One optimizer step is :meth:`begin`, the backward passes, and :meth:`finish`. With accumulation over several
    batches, all but the last end with ``finish(average=False)``, and all but the first begin with ``keep=True``.

    Buckets start in the order of their numbers on every replica, as soon as their gradients are complete, on CPU in a
    thread of this object: backward never waits for a peer there, so a replica that takes another path through the
    model cannot block the pipelines.

    Creation is collective over ``group``.

    Args:
        parameters: of this rank by first name, in the module's order. Frozen ones are left alone until they are
            thawed.
        group: the ranks with the same stages in all replicas.
        device: where the gradients are.
        timeout: how long a collective waits for a peer.
        algorithm: as of ``SMDDPStrategy``.
        compression: as of ``SMDDPStrategy``, parsed.
        bucket_cap_mb: as of ``SMDDPStrategy``.

    Raises:
        ValueError: on every rank, if the replicas' parameters differ or an option does not fit.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        device: torch.device,
        timeout: timedelta,
        algorithm: str = "auto",
        compression: Compression | None = None,
        bucket_cap_mb: float | None = None,
    ) -> None:
        self._parameters = parameters
        self._compression = compression
        self._device = device
        self.recorder = Recorder(device)
        size = sum(parameter.nbytes for parameter in self._trained().values())
        self.communicator = Communicator(group, device, timeout, self.recorder.on_wait, size, apart=True)
        held = _Held(self._parameters)
        check_same_model(held, group)
        is_open = algorithm == "auto"
        self.choice = choose(self.communicator, held, compression, bucket_cap_mb) if is_open else Choice(algorithm)
        self._bucket_bytes = int((bucket_cap_mb or DEFAULT_BUCKET_MB) * 2**20)
        self.buckets: list[GradientBucket] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lightning_smddp_replicas")
        self._hooks: list[Any] = []  # handles of ours, on the parameters
        self._pending: list[futures.Future[Any]] = []
        self.watching = False  # see `GradientSynchronizer.watches`
        self._launched = 0  # buckets
        # By id of a parameter:
        self._remaining: dict[int, int] = {}  # backward passes to come
        self._used: set[int] = set()  # with a gradient, be it zero
        self._build()

    def begin(self, backwards: Mapping[str, int], keep: bool = False) -> None:
        """Let gradients flow into the buckets: before the first backward.

        Args:
            backwards: by name, how many backward passes reach a parameter until its gradient is complete (the number
                of micro-batches, times the stages of this rank that use it). What is not in it is left to
                :meth:`finish`, as everything of a batch that only accumulates.
            keep: add to what ``.grad`` holds; else start from zero.
        """
        # A parameter that was frozen or thawed since needs other buckets, which are built when no average is under way.
        self._wait()
        trained = self._trained()
        if list(trained) != self._built_for:
            self._unbuild()
            self._build()
        self._launched = 0
        self._remaining = {id(trained[name]): passes for name, passes in backwards.items() if name in trained}
        self._used = {id(parameter) for parameter in trained.values() if keep and parameter.grad is not None}
        for hook in self._hooks:
            # Behind hooks that users have registered since: what these make of a gradient is averaged.
            # (Torch's C++ goes by the order in which a dict was filled, which `move_to_end` leaves as it is.)
            hooks = hook.hooks_dict_ref()
            hooks[hook.id] = hooks.pop(hook.id)
        for bucket in self.buckets:
            bucket.begin(keep)

    def stash(self) -> None:
        """Take ``.grad`` away until :meth:`finish`, so that nobody zeroes or reads what may be under way."""
        for bucket in self.buckets:
            bucket.collect()
            bucket.hand_out(set())

    def finish(self, average: bool = True) -> None:
        """Set ``.grad``: the mean over the replicas, or with ``average=False`` what this rank has so far.

        A replica without a gradient for a parameter counts as zero; if none has one, ``.grad`` is None. Collective
        over the replicas with ``average``.
        """
        for bucket in self.buckets:
            bucket.collect()
        # What backward has not launched is launched now: buckets with parameters that some micro-batch has not used, or
        # that `begin` was given no number of backward passes for.
        if average:
            self._launch_full(everything=True)
            self._wait()
            self._share_used()
        self._remaining = {}
        for bucket in self.buckets:
            bucket.hand_out(self._used)

    def nonfinite(self, changed: bool) -> NonFinite | None:
        """What is wrong with the averaged gradients, the same on all replicas; after :meth:`finish`.

        ``changed``: whether code of the user's may have written them since then.
        """
        return self.synchronizer.nonfinite(self._trained().values(), changed)

    def close(self) -> None:
        """Free threads, memory and groups; ``.grad`` stays. Not collective: also after an error, in mid-step."""
        if any(not pending.done() for pending in self._pending):
            # Its thread may be waiting for a replica that has failed: the groups are ended under it, else `shutdown`
            # never returns.
            self.communicator.interrupt()
        self._thread.shutdown(cancel_futures=True)
        self._unbuild()
        self.communicator.close()

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}

    def _build(self) -> None:
        trained = self._trained()
        self._built_for = list(trained)
        # Its algorithms make groups here, where all ranks come: within a step they do not wait for each other.
        self.synchronizer = GradientSynchronizer(
            self.communicator, _Held(trained), self.choice.algorithm, self._compression, self.recorder
        )
        self.buckets = assign_buckets(list(trained.values()), self._bucket_bytes)
        for parameter in trained.values():
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._accumulated))

    def _unbuild(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.synchronizer.close()

    def _accumulated(self, parameter: Tensor) -> None:
        """A backward pass has added to the gradient."""
        self._used.add(id(parameter))
        remaining = self._remaining.get(id(parameter))
        if remaining is None:
            return
        # One pass for each micro-batch and stage: the gradient is complete with the last of them. One more pass would
        # add to a gradient whose mean is under way, on this replica alone.
        if remaining == 0:
            raise RuntimeError(
                f"More was added to a gradient of shape {tuple(parameter.shape)}, whose average over the replicas may "
                "be under way: the parameter is used in more backward passes than there are micro-batches (reentrant "
                "activation checkpointing does that; use_reentrant=False does not)."
            )
        self._remaining[id(parameter)] = remaining - 1
        if remaining == 1:
            self._launch_full()

    def _launch_full(self, everything: bool = False) -> None:
        """Start the next buckets in order, as far as they are full."""
        # In order, so a full bucket waits behind one that is not: every replica launches the same sequence, whatever
        # order its backward passes fill them in.
        for bucket in self.buckets[self._launched :]:
            # Asked at each gradient, so it looks no further than to the first that is missing.
            if not everything and any(self._remaining.get(id(parameter), 1) for parameter in bucket.parameters()):
                return
            self._launched += 1
            bucket.collect()
            self.synchronizer.watches = self.watching
            average, as_ddp = self.synchronizer.average, cast(GradBucket, bucket)
            # On a CPU an average blocks until all replicas have come. Backward must not wait there: its pipeline would
            # stand still, and with it the replica that it waits for. So a thread of this object waits, one bucket after
            # the other.
            if self._device.type == "cpu":
                self._pending.append(self._thread.submit(average, as_ddp))
            else:  # queued on the device: does not wait for anyone
                done: futures.Future[Any] = futures.Future()
                done.set_result(average(as_ddp))
                self._pending.append(done)

    def _wait(self) -> None:
        """Wait for everything under way; raises what went wrong."""
        pending = self._pending
        self._pending = []
        for launched in pending:
            launched.result().wait()

    def _share_used(self) -> None:
        """Take in which parameters have a gradient on other replicas. Collective over the replicas."""
        parameters = [id(parameter) for bucket in self.buckets for parameter in bucket.parameters()]
        used = [parameter in self._used for parameter in parameters]
        if used and self.communicator.world_size > 1:
            flags = from_numbers(used, torch.float32, self._device)
            dist.all_reduce(flags, group=self.communicator.group)
            if not all(used):  # else the sum says nothing new, and reading it would wait for the device
                self._used = {parameter for parameter, flag in zip(parameters, flags.tolist(), strict=True) if flag}


class _Held(nn.Module):
    """Some parameters under the names that they have in the whole model: what communication asks of a module."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._named = parameters

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self._named.items())
