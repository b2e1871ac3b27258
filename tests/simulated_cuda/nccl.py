"""A process group that treats its callers as NCCL's does, over gloo in the memory of the simulated device.

It refuses what NCCL refuses (CPU tensors, gaps, types without a counterpart), and its work is "done" for the host as
soon as it is enqueued.
"""

from __future__ import annotations

from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed import distributed_c10d as c10d
from torch.futures import Future

# ncclDataType_t; float8 is left out, as gloo lacks it.
TYPES = {
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
KEPT = 200  # tensors of sends and receives: NCCL's stream keeps them until it has passed them

_device: ModuleType  # the compiled device, once it is installed


class Options:
    """As ``ProcessGroupNCCL.Options``."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.split_from: SimulatedNCCL | None = None
        self.split_color = 0
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""
        self._timeout = timedelta(minutes=10)


class SimulatedNCCL(dist.ProcessGroup):
    """Group and backend in one, in the place of ``ProcessGroupNCCL``."""

    Options = Options
    supports_splitting = False
    supports_coalescing = False

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._name = rank, size, ""
        self._gloo = dist.ProcessGroupGloo(store, rank, size, options._timeout)
        self._kept: list[Tensor] = []

    # ---- what torch.distributed asks of a group, and of its backend ----

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "nccl"

    def _get_backend(self, device: Any) -> SimulatedNCCL:
        if torch.device(device).type != "cuda":
            raise RuntimeError(f"No backend type associated with device type {torch.device(device).type}")
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cuda")]

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
        self._gloo._set_default_timeout(timeout)

    # ---- collectives ----

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        averaged = opts is not None and opts.reduceOp == dist.ReduceOp.AVG
        if averaged:
            opts.reduceOp = dist.ReduceOp.SUM
        memory = [_memory(tensor) for tensor in tensors]
        self._gloo.allreduce(memory, *([] if opts is None else [opts])).wait()
        if averaged:
            for tensor in memory:
                tensor.div_(self._size)
        return _done(tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        self._gloo.broadcast([_memory(tensor) for tensor in tensors], opts).wait()
        return _done(tensors)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        self._gloo.reduce([_memory(tensor) for tensor in tensors], opts).wait()
        return _done(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        gathered = [[_memory(tensor) for tensor in row] for row in outputs]
        self._gloo.allgather(gathered, [_memory(tensor) for tensor in inputs]).wait()
        return _done(outputs)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        self._gloo.allgather([list(_memory(output).chunk(self._size))], [_memory(tensor)]).wait()
        return _done([output])

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        self._gloo.reduce_scatter([_memory(output)], [list(_memory(tensor).chunk(self._size))]).wait()
        return _done([output])

    def all_to_all_single(self, output: Tensor, tensor: Tensor, to: Any, of: Any, opts: Any = None) -> Any:
        self._gloo.alltoall_base(_memory(output), _memory(tensor), to, of).wait()
        return _done([output])

    # torch up to 2.12 calls them so
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    def barrier(self, opts: Any = None) -> Any:
        _device.synchronised("barrier")  # NCCL's blocks the host until the device has come there
        self._gloo.barrier().wait()
        return _done([])

    # ---- point to point ----

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
        return self._gloo.send(self._keep(tensors), to, tag)

    def recv(self, tensors: list[Tensor], of: int, tag: int) -> Any:
        return self._gloo.recv(self._keep(tensors), of, tag)

    def _keep(self, tensors: list[Tensor]) -> list[Tensor]:
        self._kept = [*self._kept, *tensors][-KEPT:]
        return [_memory(tensor, point_to_point=True) for tensor in tensors]


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


def _done(result: Any) -> Any:
    """Work that the host does not wait for."""
    future: Future[Any] = Future(devices=[torch.device("cuda", torch.cuda.current_device())])
    future.set_result(result)
    return _create_work_from_future(future)


def install(module: ModuleType) -> None:
    """Let torch.distributed make such groups where it would make NCCL's."""
    global _device
    _device = module
    c10d.ProcessGroupNCCL = SimulatedNCCL
    dist.ProcessGroupNCCL = SimulatedNCCL
    c10d._NCCL_AVAILABLE = True
    c10d.is_nccl_available = dist.is_nccl_available = lambda: True
