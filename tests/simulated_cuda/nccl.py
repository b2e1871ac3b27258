"""A process group that treats its callers as NCCL's does, over gloo in the memory of the simulated device.

It refuses what NCCL refuses (CPU tensors, gaps, types without a counterpart). Its work is done for the host as soon as
it is enqueued, and happens on a stream of the communicator, in order. A group of "cpu:gloo,cuda:nccl" has a gloo of its
own for CPU tensors. Communicators are made as NCCL's are: by all their members, who wait for each other, and out of
the world's by all ranks of the world. A work that fails or hangs raises nothing: its stream stands still, until the
watchdog ends the process.
"""

from __future__ import annotations

import functools
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed import distributed_c10d as c10d
from torch.futures import Future

from tests.simulated_cuda import hangs, torch_cuda
from tests.simulated_cuda.synchronisations import where
from tests.simulated_cuda.watchdog import watchdog

# ncclDataType_t; float8 is left out, as gloo lacks it.
TYPES = {
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
EVERYBODY = "all"  # the communicator of a whole group; in groups that connect lazily, pairs have their own
FOREVER = timedelta(days=1)

_device: ModuleType  # the compiled device, once it is installed
made: list[Made] = []  # the communicators of this process


@dataclass(frozen=True)
class Made:
    """A communicator.

    Attributes:
        name: of its group, and of the communicator in it.
        by_split: whether all ranks of the world had to come.
        functions: that were being called, outermost first.
    """

    name: str
    by_split: bool
    functions: tuple[str, ...]


class Options:
    """As ``ProcessGroupNCCL.Options``."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.split_from: SimulatedNCCL | None = None
        self.split_color = 0
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""
        self._timeout = timedelta(minutes=10)


@dataclass
class Call:
    """One call of a collective: ``begin`` starts it in gloo, on the stream; ``finish`` comes after it.

    It keeps the tensors until it is done.
    """

    name: str
    begin: Callable[[], Any]
    reads: Sequence[Tensor]
    writes: Sequence[Tensor]
    result: Any
    finish: Callable[[], None] | None = None


class Communicators(dist.ProcessGroup):
    """How works get onto streams."""

    Options = Options
    supports_splitting = True
    supports_coalescing = True

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._name = rank, size, options.group_name
        self._store, self._parent, self._timeout = store, options.split_from, options._timeout
        self._gloo = dist.ProcessGroupGloo(store, rank, size, options._timeout)
        self._gloo._set_default_timeout(FOREVER)
        self._streams: dict[str, torch_cuda.Stream] = {}  # of the communicators that there are
        self._splits = 0
        self._coalesced: list[Call] | None = None
        self._aborted = self._is_eager = False

    # ---- making and ending them ----

    def eager_connect_single_device(self, device: Any) -> None:
        self.bound_device_id, self._is_eager = device, True
        self._communicator(EVERYBODY, range(self._size))

    def perform_nocolor_split(self, device: Any) -> None:
        """Take part in the split of others."""
        self._split()

    def _communicator(self, name: str, members: Sequence[int]) -> torch_cuda.Stream:
        """The stream of a communicator; its first use makes it, and waits for the other members to come here."""
        if self._aborted:
            raise RuntimeError("NCCL communicator was aborted")
        if name not in self._streams:
            parent = self._parent
            by_split = name == EVERYBODY and parent is not None and EVERYBODY in parent._streams
            functions = tuple(frame.name for frame in traceback.extract_stack())
            made.append(Made(f"{self._name}, {name}", by_split, functions))
            if by_split:
                assert parent is not None
                parent._split()
            else:
                self._meet(f"ncclCommInitRank of communicator {name}", members)
            self._streams[name] = torch_cuda.Stream()
        return self._streams[name]

    def _split(self) -> None:
        self._splits += 1
        self._meet(f"ncclCommSplit number {self._splits}", range(self._size))

    def _meet(self, what: str, members: Sequence[int]) -> None:
        """Block the host until all members are here, as NCCL does; it would do so without a limit of time."""
        keys = {member: f"{what}/{member}" for member in members}
        self._store.set(keys[self._rank], where())
        deadline = time.monotonic() + hangs.limit_s
        while missing := [member for member, key in keys.items() if not self._store.check([key])]:
            if time.monotonic() > deadline:
                places = {member: self._store.get(keys[member]).decode() for member in keys if member not in missing}
                raise hangs.SimulatedHangError(
                    f"{what} of group {self._name}: ranks {missing} of it do not come; waiting are {places}"
                )
            time.sleep(0.001)

    def abort(self) -> None:
        """Nobody waits for this group's work any more."""
        self._aborted = True
        watchdog.forget(self)
        for stream in self._streams.values():
            _device.abandon(stream.stream_id)

    def shutdown(self) -> None:
        """As ``ncclCommFinalize``: waits for what has been launched."""
        for stream in self._streams.values():
            _device.synchronise_stream(stream.stream_id)
        self.abort()

    # ---- launching ----

    def _start_coalescing(self, device: Any) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any) -> Any:
        calls, self._coalesced = self._coalesced or [], None
        return self._launch(calls, EVERYBODY, range(self._size))

    def _do(self, call: Call, peer: int | None = None) -> Any:
        """Launch a call, or keep it for the end of coalescing."""
        if self._coalesced is not None:
            self._coalesced.append(call)
            return None
        if peer is None or self._is_eager:
            return self._launch([call], EVERYBODY, range(self._size))
        pair = sorted([self._rank, peer])
        return self._launch([call], f"{pair[0]}:{pair[1]}", pair)

    def _launch(self, calls: list[Call], communicator: str, members: Sequence[int]) -> Any:
        """Let the communicator's stream do the calls at once, after what the current stream has now."""
        stream = self._communicator(communicator, members)
        stream.wait_stream(torch_cuda.current_stream())
        names = ", ".join(call.name for call in calls)
        entry = watchdog.started(self, f"{names} of group {self._name}", self._timeout)

        @torch.inference_mode()  # writes tensors that the host made in this mode, too
        def run() -> None:
            try:
                works = [call.begin() for call in calls]
                for work in works:
                    work.wait()
            except RuntimeError as error:  # gloo's
                entry.error = str(error)
                threading.Event().wait()  # a kernel that never ends
            for call in calls:
                if call.finish is not None:
                    call.finish()
            watchdog.finished(entry)

        for call in calls:
            for tensor in call.reads:
                _device.access(tensor, False, stream.stream_id, call.name)
            for tensor in call.writes:
                _device.access(tensor, True, stream.stream_id, call.name)
        _device.launch(stream.stream_id, f"{names} at {where()}", run)
        tensors = [tensor for call in calls for tensor in (*call.reads, *call.writes)]
        device = tensors[0].device if tensors else torch.device("cuda", torch.cuda.current_device())
        future: Future[Any] = Future(devices=[device])
        with torch_cuda.stream(stream):
            future.set_result(calls[-1].result if calls else [])
        return _create_work_from_future(future)


class SimulatedNCCL(Communicators):
    """Group and backend in one, in the place of ``ProcessGroupNCCL``."""

    # ---- what torch.distributed asks of a group, and of its backend ----

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "nccl"

    def _get_backend(self, device: Any) -> SimulatedNCCL:
        if torch.device(device).type == "cuda":
            return self
        if torch.device(device) in self._device_types:
            return self._host
        raise RuntimeError(f"No backend type associated with device type {torch.device(device).type}")

    @property
    def _device_types(self) -> list[torch.device]:
        if "gloo" in c10d._world.pg_map[self][0]:
            return [torch.device("cpu"), torch.device("cuda")]
        return [torch.device("cuda")]

    @functools.cached_property
    def _host(self) -> Any:
        """For CPU tensors. All members come here first together."""
        return dist.ProcessGroupGloo(dist.PrefixStore("host", self._store), self._rank, self._size, self._timeout)

    def _is_for_host(self, tensor: Tensor) -> bool:
        return not tensor.is_cuda and torch.device("cpu") in self._device_types

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def _set_sequence_number_for_group(self) -> None:
        """Counts of collectives are gloo's."""

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def _group_start(self) -> None:
        """Aborts of several groups need no order here."""

    _group_end = _group_start

    # ---- collectives ----

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        if self._is_for_host(tensors[0]):
            return self._host.allreduce(tensors, opts or dist.AllreduceOptions())
        memory = [_memory(tensor) for tensor in tensors]
        options = dist.AllreduceOptions()
        options.reduceOp, finish = self._operation(opts, memory)
        return self._do(Call("all_reduce", lambda: self._gloo.allreduce(memory, options), [], tensors, tensors, finish))

    def _operation(self, opts: Any, results: list[Tensor]) -> tuple[Any, Callable[[], None] | None]:
        """What gloo is asked for, and what is done to the results after it: gloo has no mean."""
        if opts is None or opts.reduceOp == dist.ReduceOp.SUM:
            return dist.ReduceOp.SUM, None
        if opts.reduceOp != dist.ReduceOp.AVG:
            return opts.reduceOp, None

        def finish() -> None:
            for tensor in results:
                tensor.div_(self._size, rounding_mode=None if tensor.is_floating_point() else "trunc")  # as NCCL's

        return dist.ReduceOp.SUM, finish

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        self._start_coalescing(None)
        for tensor in tensors:
            self.allreduce([tensor], opts)
        return self._end_coalescing(None)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        if self._is_for_host(tensors[0]):
            return self._host.broadcast(tensors, opts)
        memory = [_memory(tensor) for tensor in tensors]
        reads, writes = (tensors, []) if opts.rootRank == self._rank else ([], tensors)
        return self._do(Call("broadcast", lambda: self._gloo.broadcast(memory, opts), reads, writes, tensors))

    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        memory = [_memory(tensor) for tensor in tensors]
        return self._do(Call("reduce", lambda: self._gloo.reduce(memory, opts), [], tensors, tensors))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        if self._is_for_host(inputs[0]):
            return self._host.allgather(outputs, inputs)
        gathered, memory = [[_memory(tensor) for tensor in row] for row in outputs], [_memory(t) for t in inputs]
        writes = [tensor for row in outputs for tensor in row]
        return self._do(Call("all_gather", lambda: self._gloo.allgather(gathered, memory), inputs, writes, outputs))

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        parts, memory = list(_memory(output).chunk(self._size)), _memory(tensor)
        return self._single("all_gather_single", lambda: self._gloo.allgather([parts], [memory]), tensor, output)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        own, parts = _memory(output), list(_memory(tensor).chunk(self._size))
        options = dist.ReduceScatterOptions()
        options.reduceOp, finish = self._operation(opts, [own])

        def begin() -> Any:
            return self._gloo.reduce_scatter([own], [parts], options)

        return self._do(Call("reduce_scatter_single", begin, [tensor], [output], [output], finish))

    def all_to_all_single(self, output: Tensor, tensor: Tensor, to: Any, of: Any, opts: Any = None) -> Any:
        own, memory = _memory(output), _memory(tensor)
        return self._single("all_to_all_single", lambda: self._gloo.alltoall_base(own, memory, to, of), tensor, output)

    def _single(self, name: str, begin: Callable[[], Any], tensor: Tensor, output: Tensor) -> Any:
        return self._do(Call(name, begin, [tensor], [output], [output]))

    def barrier(self, opts: Any = None) -> Any:
        """NCCL's blocks the host until the device has come there."""
        work = self._do(Call("barrier", self._gloo.barrier, [], [], []))
        torch_cuda.current_stream().wait_stream(self._streams[EVERYBODY])
        _device.synchronised("barrier")
        _device.synchronise_stream(self._streams[EVERYBODY].stream_id)
        return work

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
        memory = [_memory(tensor, point_to_point=True) for tensor in tensors]
        return self._do(Call(f"send to {to}", lambda: self._gloo.send(memory, to, tag), tensors, [], tensors), to)

    def recv(self, tensors: list[Tensor], of: int, tag: int) -> Any:
        memory = [_memory(tensor, point_to_point=True) for tensor in tensors]
        return self._do(Call(f"recv from {of}", lambda: self._gloo.recv(memory, of, tag), [], tensors, tensors), of)


def _memory(tensor: Tensor, point_to_point: bool = False) -> Tensor:
    """The tensor's memory as a CPU tensor, after the checks of ``ProcessGroupNCCL``."""
    if not tensor.is_cuda or tensor.layout != torch.strided:
        raise ValueError("Tensors must be CUDA and dense")
    if tensor.dtype not in TYPES:
        raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")
    if not tensor.is_contiguous():
        if not point_to_point:
            raise ValueError("Tensors must be contiguous")
        if not torch._C._is_non_overlapping_and_dense(tensor):  # type: ignore[attr-defined]
            raise ValueError("Tensors must be non-overlapping and dense")
    memory = _device.on_host(tensor.detach())
    memory = memory if memory.is_contiguous() else memory.as_strided((memory.numel(),), (1,))
    return memory.view(torch.uint8) if memory.dtype == torch.bool else memory


def batch_isend_irecv(operations: list[dist.P2POp]) -> list[Any]:
    """As torch's, which coalesces only in groups whose class is exactly ``ProcessGroup``."""
    group = operations[0].group or c10d._get_default_group()
    if not isinstance(group, SimulatedNCCL):
        return _torchs_batch_isend_irecv(operations)
    group._start_coalescing(None)
    for operation in operations:
        peer = {"group_dst" if operation.op is dist.isend else "group_src": operation.group_peer}
        operation.op(operation.tensor, group=group, tag=operation.tag, **peer)
    return [group._end_coalescing(None)]


_torchs_batch_isend_irecv = dist.batch_isend_irecv


def install(module: ModuleType) -> None:
    """Let torch.distributed make such groups where it would make NCCL's."""
    global _device
    _device = module
    c10d.ProcessGroupNCCL = SimulatedNCCL
    dist.ProcessGroupNCCL = SimulatedNCCL
    c10d.batch_isend_irecv = dist.batch_isend_irecv = batch_isend_irecv
    c10d.default_pg_nccl_timeout = timedelta(minutes=10)
    c10d._NCCL_AVAILABLE = True
    c10d.is_nccl_available = dist.is_nccl_available = lambda: True
