"""DDP's communication hook: bucket in, averaged bucket out.

This is the main flow of data parallelism: DDP fills a bucket and calls :meth:`GradientSynchronizer.average`, which
has the algorithm average it. ``strategies/ddp_scheme.py`` makes the synchronizer and registers it with DDP.

Gradients are views of DDP's buckets, unless the user says otherwise: so a bucket's mean is in ``.grad`` without a copy
as soon as its future is done. In shared memory (``SharedMemoryAllReduce``) that is when the call returns. Between nodes
(``TwoLevel``) a thread, or a stream of the device, goes on while backward does; DDP waits for all futures at its end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.futures import Future

from lightning_smddp.communication.algorithms import Algorithm, Native, SharedMemoryAllReduce, completed
from lightning_smddp.communication.communicator import Communicator
from lightning_smddp.communication.compression import Compression, ErrorFeedback
from lightning_smddp.communication.consistency import require_compressible
from lightning_smddp.communication.nonfinite import NonFinite, bad_gradients, brought
from lightning_smddp.communication.powersgd import PowerSGD
from lightning_smddp.communication.report import CommunicationReport, Recorder


class GradientSynchronizer:
    """Averages the gradients of one DDP module over all ranks. Creation is collective.

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
        self.recorder = recorder
        self._names = _averaged(module)
        self.watches = False  # for NaN and inf in sums through shared memory, where a look is free
        self._seen_finite = False  # all gradients of the last backward pass, by such looks
        self._brought: dict[str, str] = {}  # what was not finite in this rank's own, by parameter
        self._native = Native(communicator.group)
        self._algorithm: Algorithm = self._native
        self._feedback: ErrorFeedback | None = None
        self._powersgd: PowerSGD | None = None
        if compression is not None and communicator.compresses(compression):
            require_compressible(module)
            if compression.method == "powersgd":
                self._powersgd = PowerSGD(communicator.group_of_all("powersgd"), communicator.thread, compression)
            elif compression.error_feedback:
                self._feedback = ErrorFeedback()
        if self._powersgd is None:
            self._algorithm = communicator.algorithm(algorithm, compression, self._feedback)

    def average(self, bucket: GradBucket) -> Future[Any]:
        """Average ``bucket`` over all ranks; called by DDP during backward, in bucket order.

        The future's value is the bucket's buffer, which DDP takes as it is: with a hook it does not divide.
        """
        tensor = bucket.buffer()
        first = bucket.index() == 0
        if first:
            self._new_step()
        recorder = self.recorder
        recorder.bucket_started(first)
        future = self._mean(bucket)
        recorder.hook_left(0 if tensor.is_sparse else tensor.nbytes)

        # Of a device: called at once, on a stream that waits for it. It holds no group: `Native.all_reduce` says why.
        def done(reduced: Future[Any]) -> Any:
            recorder.bucket_done()
            return reduced.value()

        return future.then(done)

    def nonfinite(self, parameters: Iterable[Tensor], changed: bool) -> NonFinite | None:
        """What is wrong with the averaged gradients of some ``parameters``: the same answer on all ranks.

        Args:
            parameters: whose gradients.
            changed: whether code of the user's may have written them since they were averaged.
        """
        if self._seen_finite and not changed:
            return None
        names = self._names
        averages = bad_gradients((names[id(each)], each) for each in parameters if id(each) in names)
        return None if averages is None else NonFinite(averages, self._brought)

    def report(self) -> CommunicationReport:
        """What communication cost so far. Collective."""
        return CommunicationReport.collect(self.recorder, self.communicator)

    def close(self) -> None:
        """Free threads and shared memory. The communicator belongs to the caller."""
        self._algorithm.close()
        if self._powersgd is not None:
            self._powersgd.close()

    def _new_step(self) -> None:
        self._seen_finite = self._looks_itself
        self._brought = {}
        if self._powersgd is not None:
            self._powersgd.new_step()

    def _mean(self, bucket: GradBucket) -> Future[Any]:
        tensor, slot = bucket.buffer(), bucket.index()
        if tensor.is_sparse:  # gloo adds them up, nobody else does
            self._seen_finite = False
            return self._native.all_reduce(tensor, slot)
        if self._powersgd is not None:
            return self._powersgd.average(bucket)
        if self._feedback is not None:
            self._feedback.begin(slot, [id(parameter) for parameter in bucket.parameters()])
        if not self._looks_itself:
            return self._algorithm.all_reduce(tensor, slot)
        assert isinstance(self._algorithm, SharedMemoryAllReduce)
        if not self._algorithm.mean(tensor, slot, watch=True):
            # All ranks come here. What is not finite is as this rank has brought it; the average of that is what code
            # of the user's is to see.
            self._seen_finite = False
            self._brought |= brought(bucket.parameters(), tensor, self._names)
            self._algorithm.mean(tensor, slot, watch=False)
        return completed(tensor)

    @property
    def _looks_itself(self) -> bool:
        return self.watches and isinstance(self._algorithm, SharedMemoryAllReduce)


def _averaged(module: nn.Module) -> dict[int, str]:
    """Names of the parameters that DDP is to average, by ``id``. What it is told to ignore it leaves to each rank."""
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    names: dict[int, str] = {}
    for prefix, part in module.named_modules():
        for name, parameter in part.named_parameters(recurse=False):
            full = f"{prefix}.{name}"  # as DDP compares it: the module's own begin with a dot
            if parameter.requires_grad and full not in ignored:
                names.setdefault(id(parameter), full.removeprefix("."))
    return names
