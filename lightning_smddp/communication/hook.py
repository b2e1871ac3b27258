"""DDP's communication hook: bucket in, averaged bucket out.

This is the main flow of data parallelism: DDP fills a bucket and calls :meth:`GradientSynchronizer.average`, which
has the algorithm average it. ``strategies/session.py`` makes the synchronizer and registers it with DDP.

Gradients are views of DDP's buckets, unless the user says otherwise: so a bucket's mean is in ``.grad`` without a copy
as soon as its future is done. In shared memory (``SharedMemoryAllReduce``) that is when the call returns. Between nodes
(``TwoLevel``) a thread, or a stream of the device, goes on while backward does; DDP waits for all futures at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.futures import Future

from lightning_smddp.communication.algorithms import Algorithm, Native, SharedMemoryAllReduce, TwoLevel, completed
from lightning_smddp.communication.buckets import Layout
from lightning_smddp.communication.communicator import Communicator
from lightning_smddp.communication.compression import Compression, ErrorFeedback, require_same_sizes
from lightning_smddp.communication.nonfinite import NonFiniteWatch
from lightning_smddp.communication.powersgd import PowerSGDExchange
from lightning_smddp.communication.report import CommunicationReport
from lightning_smddp.communication.stats import Recorder
from lightning_smddp.communication.tensors import gather_structures


class GradientSynchronizer:
    """Averages the gradients of one DDP module over all ranks.

    Args:
        communicator: groups and topology.
        module: whose gradients; not yet wrapped.
        algorithm: its name.
        compression: of what goes over the network, or None.
        recorder: where times are written.
    """

    def __init__(
        self,
        communicator: Communicator,
        module: nn.Module,
        algorithm: str,
        compression: Compression | None,
        recorder: Recorder,
    ) -> None:
        self.communicator = communicator
        self.compression = compression
        self.recorder = recorder
        self._names: dict[int, str] = {}  # of trained parameters, by `id`
        self._numels: dict[str, int] = {}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                self._names[id(parameter)] = name
                self._numels[name] = parameter.numel()
        self.watch = NonFiniteWatch(self._names)
        self._algorithm = communicator.algorithm(algorithm, compression)
        self._native = Native(communicator.group)
        # By bucket the ids of its parameters, and where they are in it.
        self._layouts: dict[int, tuple[tuple[int, ...], Layout]] = {}
        self._remembers = False
        if compression is not None and compression.error_feedback:
            self._remembers = communicator.compresses(compression)
        self._loaded: dict[str, dict[str, Tensor]] = {}  # until the first step
        self._steps_since_restore = 0

    def average(self, bucket: GradBucket) -> Future[Any]:
        """Average ``bucket`` over all ranks; called by DDP during backward, in bucket order.

        The future's value is the bucket's buffer, which DDP takes as it is: with a hook it does not divide.
        """
        tensor = bucket.buffer()
        if bucket.index() == 0:
            self._new_step()
        # A sparse bucket counts as one of no bytes.
        size = 0
        algorithm: Algorithm = self._native
        if not tensor.is_sparse:
            size = tensor.numel() * tensor.dtype.itemsize
            algorithm = self._algorithm
        if self.watch.on and not self._looks_itself(algorithm):
            self.watch.look(bucket)
        entered = self.recorder.bucket_started(first=bucket.index() == 0)
        if tensor.is_sparse:
            future = self._sparse_mean(tensor)
        else:
            future = self._dense_mean(algorithm, bucket)
        intra, inter = self._traffic(algorithm, tensor, size, bucket)
        self.recorder.hook_left(entered, size, intra, inter)
        # Shared memory and a single rank are done by now: then no callback has to be queued. On a device work that is
        # queued counts as done, and `then` calls back on a stream that waits for it.
        done = _recording(self.recorder)
        if future.done() and not tensor.is_cuda:
            done(future)  # raises what the exchange raised
            return future
        return future.then(done)

    def report(self) -> CommunicationReport:
        """What communication cost so far. Collective."""
        totals = self.recorder.read(wait=True)
        return CommunicationReport.collect(totals, self.communicator)

    def close(self) -> None:
        """Free threads and shared memory. The communicator belongs to the caller."""
        self._algorithm.close()
        self._layouts.clear()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """What compression remembers, summed over ranks, by parameter: fit for any other layout. Collective."""
        if self._loaded:  # no step has run since: nobody has taken its part yet, nor lost anything
            return self._loaded
        state: dict[str, dict[str, Tensor]] = {}
        if self._remembers:
            state["error_feedback"] = self._total_errors()
        if self.compression is not None and self.compression.method == "powersgd":
            state["powersgd"] = self._all_factors()
        return state

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Continue from a :meth:`state_dict` of this model, saved under any number of ranks and nodes.

        Raises:
            ValueError: the state belongs to another model.
        """
        errors = dict(state.get("error_feedback", {}))
        require_same_sizes(errors, self._numels)
        self._restore(errors)
        for exchange in self._powersgd():
            exchange.factors = dict(state.get("powersgd", {}))
        self._loaded = {key: dict(value) for key, value in state.items()}

    def _new_step(self) -> None:
        self._loaded = {}
        self.watch.begin()
        # By the second step after a restore every bucket has taken its part of what was restored.
        self._steps_since_restore += 1
        if self._steps_since_restore == 2:
            for feedback, _ in self._feedbacks():
                feedback.forget_restored()

    def _restore(self, errors: dict[str, Tensor]) -> None:
        for feedback, members in self._feedbacks():
            feedback.restore(errors, members)
        self._steps_since_restore = 0

    def _dense_mean(self, algorithm: Algorithm, bucket: GradBucket) -> Future[Any]:
        tensor = bucket.buffer()
        layout = self._layout(bucket)
        if not self.watch.on or not self._looks_itself(algorithm):
            return algorithm.all_reduce(tensor, layout)
        assert isinstance(algorithm, SharedMemoryAllReduce)
        if not algorithm.mean(tensor, layout, watch=True):
            self.watch.not_finite(bucket)
        return completed(tensor)

    def _looks_itself(self, algorithm: Algorithm) -> bool:
        """Whether averaging itself finds NaN and inf: sums in shared memory do, and leave no average where there are.

        So not where code of the user's is to see that average (``marks`` is False).
        """
        return self.watch.marks and isinstance(algorithm, SharedMemoryAllReduce)

    def _sparse_mean(self, tensor: Tensor) -> Future[Any]:
        """The mean of sparse gradients: gloo adds them up, nobody else does."""
        return self._native.all_reduce(tensor, Layout.flat(0))

    def _layout(self, bucket: GradBucket) -> Layout:
        """What the bucket consists of: found in its first step, and anew when it has other parameters."""
        number = bucket.index()
        parameters = bucket.parameters()
        identity = tuple([id(parameter) for parameter in parameters])
        was_seen = number in self._layouts
        if was_seen:
            known_identity, known_layout = self._layouts[number]
            if known_identity == identity:
                return known_layout
        named = []
        for index, parameter in enumerate(parameters):
            name = self._names.get(id(parameter), f"parameter {index}")
            named.append((name, parameter))
        layout = Layout.of_parameters(number, named)
        if was_seen:
            self._buckets_were_rebuilt()
        self._layouts[number] = (identity, layout)
        return layout

    def _buckets_were_rebuilt(self) -> None:
        """DDP cut the buckets anew (once, after the first step): hand out remembered errors anew. Collective."""
        # All ranks come here with the same bucket: DDP has sent the first rank's new order to all before.
        self._layouts.clear()
        if self._remembers:
            self._restore(self._total_errors())

    def _two_level(self) -> list[TwoLevel]:
        return [self._algorithm] if isinstance(self._algorithm, TwoLevel) else []

    def _feedbacks(self) -> list[tuple[ErrorFeedback, int]]:
        """Each exchange's memory and the number of its members."""
        found = []
        for algorithm in self._two_level():
            feedback = getattr(algorithm.exchange, "feedback", None)
            if feedback is not None:
                found.append((feedback, self.communicator.members(algorithm.name, self.compression)))
        return found

    def _powersgd(self) -> list[PowerSGDExchange]:
        found = []
        for algorithm in self._two_level():
            if isinstance(algorithm.exchange, PowerSGDExchange):
                found.append(algorithm.exchange)
        return found

    def _total_errors(self) -> dict[str, Tensor]:
        """What all ranks together remember, by parameter. Collective."""
        device = self.communicator.device
        for algorithm in self._two_level():
            algorithm.drain()  # the buckets before still write what they remember
        # One message for all of it: the parameters one after the other, in the module's order.
        sizes = list(self._numels.values())
        total = torch.zeros(sum(sizes), device=device)
        for feedback, _ in self._feedbacks():
            own = feedback.totals(self._numels)
            total += torch.cat(list(own.values())).to(device)
            del own  # as large as the model
        dist.all_reduce(total, group=self.communicator.group)
        parts = total.cpu().split(sizes)
        return dict(zip(self._numels, parts, strict=True))

    def _all_factors(self) -> dict[str, Tensor]:
        """PowerSGD's factors of all shards. Collective."""
        local: dict[str, Tensor] = {}
        for exchange in self._powersgd():
            local |= {name: factor.clone() for name, factor in exchange.factors.items()}
        factors: dict[str, Tensor] = {}
        for of_rank in gather_structures(local, self.communicator.group, True, self.communicator.device):
            factors = of_rank | factors  # of several ranks with the same shard, the first one's
        return factors

    def _traffic(
        self,
        algorithm: Algorithm,
        tensor: Tensor,
        size: int,
        bucket: GradBucket,
    ) -> tuple[int, int]:
        """Bytes that others of its node get from this rank (they read, or it writes), and that other nodes get."""
        topology = self.communicator.topology
        local, world = len(topology.local_ranks), topology.world_size
        if world == 1 or size == 0:
            return 0, 0
        # In shared memory the others read all but this rank's own slice, and it writes that slice to each of them.
        through_memory = size * (local - 1) // local * 2
        if isinstance(algorithm, TwoLevel):
            sent = 0
            if algorithm.exchange is not None:
                _, layout = self._layouts[bucket.index()]
                shard = algorithm.shard_layout(tensor, layout)
                shard_numel = sum([piece.numel for piece in shard.pieces])
                sent = algorithm.exchange.wire_bytes(shard_numel, tensor.dtype, shard)
            if algorithm.scatter is None:  # flat: what goes to ranks of this node stays in it
                inside = sent * (local - 1) // (world - 1)
                return inside, sent - inside
            return through_memory, sent
        if algorithm.name == "shared_memory":
            return through_memory, 0
        # A ring sends to one rank, the next.
        ring = 2 * size * (world - 1) // world
        next_rank = (topology.rank + 1) % world
        if next_rank in topology.local_ranks:
            return ring, 0
        return 0, ring


def _recording(recorder: Recorder) -> Callable[[Future[Any]], Any]:
    """What follows a bucket. It holds no group, as ``Native.all_reduce`` says why."""

    def done(future: Future[Any]) -> Any:
        recorder.bucket_done()
        return future.value()

    return done
