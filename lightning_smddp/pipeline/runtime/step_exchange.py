"""The one meeting of a pipeline's ranks in a step: what it returns and logs, whether it failed, and on which batch.

Behind the schedule each rank says on the host whether something went wrong on it, and which batch it had; the rank
where the step ends adds what it has for all of them. Tensors on a device follow from device to device: no host waits::

    word of a rank:  | failed | batch | bytes of results | the results, pickled, if they fit |
    if needed:       all failures; results that do not fit; large tensors of the host; tensors on devices
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp.communication.objects import RankFailedError, gather, pickled, unpickled
from lightning_smddp.communication.tensors import CPU, broadcast_tensors
from lightning_smddp.pipeline.mesh import Channel
from lightning_smddp.pipeline.partition.batch_sync import CURE
from lightning_smddp.pipeline.runtime.remote_tensor import ReplayError

_HEAD = struct.Struct("<3q")
_WORD = 4096  # bytes


class Failure(NamedTuple):
    """What went wrong on a stage.

    Attributes:
        microbatch: its number.
        stage: which one.
        text: what, as other ranks are told.
        error: what was raised, on the rank where it was.
        diverged: whether the step did something else than a dry run had shown; else the user's code raised.
    """

    microbatch: int
    stage: int
    text: str
    error: Exception | None
    diverged: bool


class StepExchange:
    """The meeting at the end of each step.

    Args:
        pipeline: its ranks, and where their collectives take tensors from.
        host: the same ranks, for what hosts read.
        last_rank: where the step ends.
    """

    def __init__(self, pipeline: Channel, host: Channel, last_rank: int) -> None:
        self._pipeline = pipeline
        self._host = host.group
        self._last_rank = last_rank

    def run(self, results: Any, batch: int = 0, failures: Sequence[Failure] = ()) -> Any:
        """The ``results`` of the rank where the step ends, on every rank. Collective.

        Args:
            results: there what to send: tensors, and what can be pickled.
            batch: a number below 2**62 that is the same where ranks have the same batch.
            failures: on this rank.

        Raises:
            ReplayError: on every rank: the step did something else on a stage than a dry run had shown.
            ValueError: on every rank: the ranks have different batches.
            UnsendableError: on every rank: results cannot be pickled.
            Exception: on every rank: one of the user's code, as it came, on the rank where it was raised; elsewhere a
                :class:`RankFailedError`.
        """
        if self._host.size() == 1:
            if failures:
                _raise_cause([failures], self._host)
            return results
        apart: list[Tensor] = []
        content: Any = b""
        is_last = self._host.rank() == self._last_rank
        if is_last and not failures:
            data = pickled(results, apart)
            content = pickled(([(tensor.shape, tensor.dtype, tensor.is_cpu) for tensor in apart], data))
        heads, words = self._words(_HEAD.pack(bool(failures), batch, len(content)) + content)
        self._require_no_failure(heads, failures)
        size = heads[self._last_rank][2]
        if _HEAD.size + size > _WORD:
            message = torch.frombuffer(bytearray(content or size), dtype=torch.uint8)
            dist.broadcast(message, group=self._host, group_src=self._last_rank)
            content = message.numpy().tobytes()
        else:
            content = words[self._last_rank * _WORD + _HEAD.size :][:size]
        specs, data = unpickled(content)
        if not is_last:
            for shape, dtype, is_on_host in specs:
                apart.append(torch.empty(shape, dtype=dtype, device=CPU if is_on_host else self._pipeline.device))
        for part, (group, device) in ((True, Channel(self._host, CPU)), (False, self._pipeline)):
            broadcast_tensors([tensor for tensor in apart if tensor.is_cpu == part], group, self._last_rank, device)
        if is_last and isinstance(data, bytes):
            return results
        return unpickled(data, apart)

    def _words(self, word: bytes) -> tuple[list[Any], bytes]:
        """The numbers at the heads of all ranks' words, and these words, one after the other. Collective."""
        own = torch.frombuffer(bytearray(word[:_WORD].ljust(_WORD, b"\0")), dtype=torch.uint8)
        gathered = torch.empty(self._host.size() * _WORD, dtype=torch.uint8)
        dist.all_gather_single(gathered, own, self._host)
        words = gathered.numpy().tobytes()
        return [_HEAD.unpack_from(words, start) for start in range(0, len(words), _WORD)], words

    def _require_no_failure(self, heads: Sequence[Any], failures: Sequence[Failure]) -> None:
        """Raise on all ranks where something is wrong on one. Collective then."""
        gathered: list[Sequence[Failure]] = []
        if any(failed for failed, _, _ in heads):
            gathered = gather([failure._replace(error=None) for failure in failures], self._host)
        if len({batch for _, batch, _ in heads}) > 1:
            raise ValueError(
                f"The ranks of a pipeline have different batches, though the first ones were alike. {CURE}"
            )
        if gathered:
            gathered[self._host.rank()] = failures
            _raise_cause(gathered, self._host)


def _raise_cause(gathered: Sequence[Sequence[Failure]], group: dist.ProcessGroup) -> None:
    """Raise what has caused all failures of all ranks: a stage computes with what earlier ones have sent."""
    found = [(failure, rank) for rank, failures in enumerate(gathered) for failure in failures]
    first, rank = min(found, key=lambda pair: (pair[0].microbatch, pair[0].stage))
    if first.diverged:
        raise ReplayError(first.text) from first.error
    if first.error is not None:
        raise first.error
    rank = dist.get_global_rank(group, rank)
    raise RankFailedError(rank, f"Rank {rank} failed in stage {first.stage}: {first.text}")
