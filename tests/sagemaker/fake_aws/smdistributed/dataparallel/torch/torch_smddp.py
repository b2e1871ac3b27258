"""A stand-in for AWS's closed module: a backend ``smddp`` on gloo with the failures that users of the real one report.

No AVG (Lightning 20409), no groups (sagemaker-python-sdk 2571), no device_ids in barriers, no collectives but five,
``nn.Module.__init__`` hashes the module (NeMo). ``FAKE_SMDDP_DEVICE=cuda`` makes it refuse CPU tensors, too.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_DEVICE = os.environ.get("FAKE_SMDDP_DEVICE", "cpu")
calls: dict[str, int] = {}


class _Group(dist.ProcessGroup):
    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return "smddp"

    def _carry(self, name: str, tensors: Any, *args: Any) -> Any:
        calls[name] = calls.get(name, 0) + 1
        flat = tensors[0] if isinstance(tensors[0], list) else tensors
        if any(tensor.device.type != _DEVICE for tensor in flat):
            raise RuntimeError("SMDDP does not support: CPU tensors")
        op = getattr(args[-1], "reduceOp", None)
        if op is not None and op.op not in (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            raise RuntimeError("SMDDP does not support: ReduceOp")
        return getattr(self.gloo, name)(tensors, *args)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return self._carry("allreduce", tensors, opts or dist.AllreduceOptions())

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        return self._carry("broadcast", tensors, opts)

    def reduce(self, tensors: Any, opts: Any) -> Any:
        return self._carry("reduce", tensors, opts)

    def allgather(self, outputs: Any, tensors: Any, opts: Any = None) -> Any:
        return self._carry("allgather", outputs, tensors, opts or dist.AllgatherOptions())

    def barrier(self, opts: Any) -> Any:
        calls["barrier"] = calls.get("barrier", 0) + 1
        if opts.device_ids:
            raise RuntimeError("SMDDP does not support: device_ids in barrier")
        return self.gloo.barrier(opts)


def _no_groups(*_: Any, **__: Any) -> Any:
    raise RuntimeError("SMDDP does not support: new_group")


dist.Backend.register_backend("smddp", _Group)  # as AWS does: without devices
dist.new_group = _no_groups
dist.distributed_c10d.new_group = _no_groups

_init = torch.nn.Module.__init__


def _hashing_init(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    _init(self, *args, **kwargs)
    hash(self)


torch.nn.Module.__init__ = _hashing_init  # type: ignore[method-assign]
