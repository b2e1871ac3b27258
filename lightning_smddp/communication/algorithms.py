"""The all-reduce algorithms: each leaves the mean over all ranks in the tensor, and returns a future.

==================  ==========================================  =========================================
name                inside a node                               between nodes
==================  ==========================================  =========================================
``native``          the backend's all-reduce over all ranks     (part of it)
``shared_memory``   through shared memory, in place             (one node only)
``hierarchical``    shared memory, else reduce-scatter and      the backend's all-reduce between ranks
                    all-gather of the backend                   of equal local rank
``balanced``        as hierarchical                             balanced fusion buffers
==================  ==========================================  =========================================

Two exceptions: on one node ``balanced`` is one exchange by fusion buffers among its ranks; and where compression
applies, ``native`` (with ``scope="all"`` every algorithm) is one compressed exchange among all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_smddp._compat.torch import is_nccl
from lightning_smddp.communication.inter_node import InterNodeReduce, padded
from lightning_smddp.communication.shared_memory import SharedMemory, sum_dtype

AlgorithmName = Literal["auto", "native", "shared_memory", "hierarchical", "balanced"]
NAMES: tuple[str, ...] = get_args(AlgorithmName)


class Native:
    """The backend's own all-reduce. The only one that carries sparse tensors."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.world_size = dist.get_world_size(group)

    def all_reduce(self, tensor: Tensor, slot: int) -> Future[Any]:
        """Begin to replace 1-D contiguous ``tensor`` by its mean over all ranks, in place.

        The future's value is ``tensor``. Calls come in the same order on every rank. ``slot`` is the number of a
        bucket, which comes again at every step.
        """
        if self.world_size == 1:
            return completed(tensor)
        # Three ways to a mean. Before the sum, where that may overflow though the mean does not; by the backend, which
        # spares a pass over memory; else behind the sum.
        operation = dist.ReduceOp.SUM
        divides_late = False
        if tensor.dtype == torch.float16:
            tensor.div_(self.world_size)
        elif tensor.is_cuda and tensor.is_floating_point() and is_nccl(self.group):
            operation = dist.ReduceOp.AVG
        else:
            divides_late = True
        work = dist.all_reduce(tensor, operation, group=self.group, async_op=True)
        assert work is not None
        future: Future[Any] = work.get_future()
        size = self.world_size

        # Freed by a thread of the backend, which can be after the group was closed: it must not be the last one to
        # hold the group, as gloo's thread would wait for itself then, and end the process.
        def mean(done: Future[Any]) -> Tensor:
            done.value()  # raises what the collective raised
            if divides_late:
                tensor.div_(size)
            return tensor

        return future.then(mean)

    def close(self) -> None:
        """Nothing to free: the group belongs to the caller."""


class SharedMemoryAllReduce:
    """All ranks are on one node: two passes over memory, done when the call returns."""

    def __init__(self, memory: SharedMemory) -> None:
        self.memory = memory

    def all_reduce(self, tensor: Tensor, slot: int) -> Future[Any]:
        """See :meth:`Native.all_reduce`."""
        self.mean(tensor, slot, watch=False)
        return completed(tensor)

    def mean(self, tensor: Tensor, slot: int, watch: bool) -> bool:
        """As :meth:`all_reduce`, at once; with ``watch`` also whether it is finite, see :class:`SharedMemory`."""
        scale = 1.0 / self.memory.mesh.size
        return self.memory.all_reduce(tensor, slot, scale, watch)

    def close(self) -> None:
        """Drop this rank's mappings of the node's shared memory. Not collective."""
        self.memory.close()


class IntraNodeGroup:
    """The same operations as ``SharedMemory``, over a process group of the node's ranks: GPUs, CPUs without it.

    gloo's reduce-scatter is an all-reduce in disguise (clone, full all-reduce, slice), so there the parts are sent
    to their owners by an all-to-all and summed here.
    """

    def __init__(self, group: dist.ProcessGroup, num_shards: int) -> None:
        self.group = group
        self.num_shards = num_shards
        self.rank = group.rank()
        self.size = dist.get_world_size(group)

    def reduce_scatter(self, tensor: Tensor, slot: int, scale: float) -> Tensor:
        """``scale`` times the sum of this rank's shard over the local ranks, in ``tensor`` itself."""
        shard, width = self._shard(tensor)
        sent = padded(tensor, width * self.size)
        if tensor.is_cuda:
            if tensor.dtype == torch.float16:
                # NCCL sums fp16 in fp16, and the sum may overflow where the mean does not: so scale before.
                sent = sent * scale
                scale = 1.0
            received = sent.new_empty(width)
            dist.reduce_scatter_single(received, sent, group=self.group)
        else:
            parts = torch.empty_like(sent)
            dist.all_to_all_single(parts, sent, group=self.group)
            rows = parts.view(self.size, width)  # this rank's shard, as each local rank has it
            received = rows.sum(0, dtype=sum_dtype(tensor.dtype))
        total = received[: shard.numel()]
        if scale != 1.0:
            total.mul_(scale)
        shard.copy_(total)
        return shard

    def all_gather(self, tensor: Tensor, slot: int) -> None:
        """This rank's shard of ``tensor`` goes into all local ranks' tensors."""
        shard, width = self._shard(tensor)
        if width * self.size == tensor.numel():
            # The output is the whole tensor, of which the shard is a part: the input has to be other memory.
            dist.all_gather_single(tensor, shard.clone(), self.group)
            return
        gathered = tensor.new_empty(width * self.size)
        dist.all_gather_single(gathered, padded(shard, width), self.group)
        tensor.copy_(gathered[: tensor.numel()])

    def _shard(self, tensor: Tensor) -> tuple[Tensor, int]:
        """This rank's, and how long one is; the last may be shorter, those of ranks behind ``num_shards`` are empty."""
        # 5 elements in 2 shards, of 3 ranks: | 0 1 2 | 3 4 |   |, which collectives get as | 0 1 2 | 3 4 - | - - - |
        width = max(1, -(-tensor.numel() // self.num_shards))
        return tensor[self.rank * width : (self.rank + 1) * width], width

    def close(self) -> None:
        """Nothing to free: the group belongs to the caller."""


IntraNodeReduce = SharedMemory | IntraNodeGroup
"""What sums and shares inside a node."""


class TwoLevel:
    """Reduce-scatter inside the node, exchange of each shard between nodes, all-gather inside the node.

    On CPU the first step runs in the caller, the exchange in the backend's threads and the last step in ``thread``,
    in the order of the calls, so that buckets overlap with each other and with backward. On CUDA all steps are
    queued on a stream of this object.

    Args:
        world_size: what the sum is divided by.
        thread: an executor of one thread, common to all algorithms that share meshes or groups: what goes over one of
            these has to have the same order on every rank.
        scatter: the reduce-scatter of this node; None when this rank is alone on it.
        gather: the all-gather, another object, as it works in another thread.
        exchange: between nodes; None when this rank owns no shard.
    """

    def __init__(
        self,
        world_size: int,
        thread: ThreadPoolExecutor,
        scatter: IntraNodeReduce | None,
        gather: IntraNodeReduce | None,
        exchange: InterNodeReduce | None,
    ) -> None:
        self.world_size = world_size
        self.scatter = scatter
        self.gather = gather
        self.exchange = exchange
        self._thread = thread
        self._closed = False
        self._stream: torch.cuda.Stream | None = None

    def all_reduce(self, tensor: Tensor, slot: int) -> Future[Any]:
        """See :meth:`Native.all_reduce`."""
        if tensor.is_cuda:
            return self._on_stream(tensor, slot)
        complete = self._begin(tensor, slot)

        def end() -> Tensor:
            if self._closed:
                raise RuntimeError("closed before the gradients were exchanged")
            complete()
            return tensor

        return in_thread(self._thread, end)

    def close(self) -> None:
        """Free memory. Waits until nothing is in flight, which fails; of a device, lets the current stream wait."""
        self._closed = True
        self._thread.submit(lambda: None).result()  # it does one after the other
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        for part in (self.scatter, self.gather):
            if part is not None:
                part.close()

    def _begin(self, tensor: Tensor, slot: int) -> Callable[[], None]:
        """Reduce in the node and start the exchange; returns what completes both."""
        # Two nodes of two ranks, a bucket in two shards; ranks 0 and 2 have local rank 0:
        #     node 0   rank 0 |A0   |  rank 1 |   B0|     after the reduce-scatter: sums over the node
        #     node 1   rank 2 |A1   |  rank 3 |   B1|
        #              A0 + A1         B0 + B1            after the exchange, on both of their owners
        #     all      |A0 + A1|B0 + B1|                  after the all-gather
        # The scale is applied in the node, so what is summed over the nodes is of the mean's size already.
        scale = 1.0 / self.world_size
        shard = tensor.mul_(scale) if self.scatter is None else self.scatter.reduce_scatter(tensor, slot, scale)
        finish = self.exchange.start(shard, slot) if self.exchange is not None and shard.numel() else None

        def complete() -> None:
            if finish is not None:
                finish()
            if self.gather is not None:
                self.gather.all_gather(tensor, slot)

        return complete

    def _on_stream(self, tensor: Tensor, slot: int) -> Future[Any]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
        # Backward's stream has written the bucket, so ours waits for it. The future takes note of the stream that is
        # current when it is set: whoever waits for it makes a stream wait for what is queued here, and never the host.
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        future: Future[Any] = Future(devices=[tensor.device])
        with torch.cuda.stream(self._stream):
            complete = self._begin(tensor, slot)
            complete()
            future.set_result(tensor)
        return future


Algorithm = Native | SharedMemoryAllReduce | TwoLevel
"""A way to all-reduce gradients in place, as the communication hook calls it."""


def completed(tensor: Tensor) -> Future[Any]:
    """A future whose value is there: ``tensor``."""
    future: Future[Any] = Future(devices=[tensor.device] if tensor.is_cuda else [])
    future.set_result(tensor)
    return future


def in_thread(thread: ThreadPoolExecutor, act: Callable[[], Tensor]) -> Future[Any]:
    """What ``act`` returns, or raises, in ``thread``."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(act())
        except Exception as error:
            future.set_exception(error)

    thread.submit(run)
    return future
