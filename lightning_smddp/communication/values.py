"""Values that users and Lightning broadcast, without pickle: JSON, and tensors as they are.

``torch.distributed.broadcast_object_list`` unpickles what comes, which runs whatever the sender wants.
"""

from __future__ import annotations

import base64
import os
import pickle
from collections import OrderedDict
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp.communication.messages import broadcast_json

ALLOW_PICKLE = "LIGHTNING_SMDDP_ALLOW_PICKLE"
_PLAIN = (type(None), bool, int, float, str)
_SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def broadcast_value(value: Any, src: int, group: dist.ProcessGroup, device: torch.device) -> Any:
    """``value`` of the global rank ``src``, on every rank. Collective.

    None, bool, int, float, str, bytes, paths, dtypes, numbers of numpy, tensors, and lists, tuples, sets and dicts of
    these. A tensor that was on an accelerator arrives on the receiver's ``device``. Other objects go by pickle if the
    environment of every rank has ``LIGHTNING_SMDDP_ALLOW_PICKLE=1``.

    Raises:
        ValueError: on every rank, for a value that cannot be sent.
    """
    tensors: list[Tensor] = []
    message: Any = None
    if dist.get_rank() == src:
        try:
            message = _encode(value, tensors)
        except _UnknownTypeError as unknown:
            tensors = []
            message = _pickled(value) if _pickle_allowed() else ["refused", str(unknown)]
    message = broadcast_json(message, group, device, src)
    if message[0] == "refused":
        raise ValueError(
            f"A {message[1]} cannot be broadcast: it would have to be pickled, and unpickling runs code of the "
            "sender's choice. Broadcast its contents (numbers, strings, paths, tensors, and lists, tuples and dicts of "
            f"them), or set {ALLOW_PICKLE}=1 on all ranks if you trust every process that can reach this job's ports."
        )
    if message[0] == "pickle":
        return _unpickled(message[1], src)
    sent = tensors
    tensors = [_broadcast_tensor(spec, sent, i, src, group, device) for i, spec in enumerate(_specs(message))]
    return value if dist.get_rank() == src else _decode(message, iter(tensors))


class _UnknownTypeError(Exception):
    """The name of a type that has no form of its own."""


def _encode(value: Any, tensors: list[Tensor]) -> list[Any]:
    """``value`` as ``[kind, content]``; tensors are only described, and appended to ``tensors``."""
    if isinstance(value, np.generic) and not isinstance(value, np.void):
        value = value.item()
    kind = type(value)
    if kind in _PLAIN:
        return ["plain", value]
    if kind is bytes:
        return ["bytes", base64.b64encode(value).decode()]
    if isinstance(value, PurePath):
        return ["path", str(value)]
    if kind in (Tensor, torch.nn.Parameter) and value.layout == torch.strided and not value.is_quantized:
        tensors.append(value.detach())
        return ["tensor", [str(value.dtype), list(value.shape), value.device.type != "cpu"]]
    if kind is torch.dtype:
        return ["dtype", str(value)]
    for name, sequence in _SEQUENCES.items():
        if kind is sequence:
            return [name, [_encode(element, tensors) for element in value]]
    if kind in (dict, OrderedDict):
        return ["dict", [[_encode(key, tensors), _encode(element, tensors)] for key, element in value.items()]]
    raise _UnknownTypeError(f"{kind.__module__}.{kind.__qualname__}")


def _decode(message: Any, tensors: Any) -> Any:
    kind, content = message
    if kind == "plain":
        return content
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "path":
        return Path(content)
    if kind == "tensor":
        return next(tensors)
    if kind == "dtype":
        return _dtype(content)
    if kind == "dict":
        return {_decode(key, tensors): _decode(element, tensors) for key, element in content}
    return _SEQUENCES[kind](_decode(element, tensors) for element in content)


def _specs(message: Any) -> list[Any]:
    """The descriptions of all tensors in ``message``, in order."""
    kind, content = message
    if kind == "tensor":
        return [content]
    if kind == "dict":
        return [spec for pair in content for element in pair for spec in _specs(element)]
    return [spec for element in content for spec in _specs(element)] if kind in _SEQUENCES else []


def _broadcast_tensor(
    spec: Any, sent: list[Tensor], index: int, src: int, group: dist.ProcessGroup, device: torch.device
) -> Tensor:
    name, shape, on_device = spec
    data = sent[index].to(device).contiguous() if sent else torch.empty(shape, dtype=_dtype(name), device=device)
    raw = data.view(torch.uint8) if data.dtype == torch.bool else data  # not every backend carries bool
    if raw.numel():
        dist.broadcast(raw, src, group=group)
    return data if on_device else data.cpu()


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    assert isinstance(found, torch.dtype), name
    return found


def _pickle_allowed() -> bool:
    return os.environ.get(ALLOW_PICKLE) == "1"


def _pickled(value: Any) -> list[Any]:
    return ["pickle", base64.b64encode(pickle.dumps(value)).decode()]


def _unpickled(content: str, src: int) -> Any:
    """Only with the user's word on this rank too."""
    if not _pickle_allowed():
        raise ValueError(
            f"Rank {src} broadcast a pickled object. Set {ALLOW_PICKLE}=1 on all ranks if you trust every process that "
            "can reach this job's ports, or on none."
        )
    return pickle.loads(base64.b64decode(content))
