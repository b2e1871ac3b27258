"""Values that users and Lightning broadcast, without pickle: JSON, and tensors as they are.

``torch.distributed.broadcast_object_list`` unpickles what comes, which runs whatever the sender wants.
"""

from __future__ import annotations

import base64
import os
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp.wire.broadcast import broadcast_json
from lightning_smddp.wire.encode import Path, UnknownTypeError, decode, dtype_of, encode, name_of_dtype

ALLOW_PICKLE = "LIGHTNING_SMDDP_ALLOW_PICKLE"


def broadcast_value(value: Any, src: int, group: dist.ProcessGroup, device: torch.device) -> Any:
    """``value`` of the global rank ``src``, on every rank. Collective.

    None, bool, int, float, str, bytes, paths, dtypes, numbers of numpy, tensors, and lists, tuples, sets and dicts of
    these. A tensor that was on an accelerator arrives on the receiver's ``device``. Other objects go by pickle if the
    environment of every rank has ``LIGHTNING_SMDDP_ALLOW_PICKLE=1``.

    Raises:
        ValueError: on every rank, for a value that cannot be sent.
    """
    tensors: dict[Path, Tensor] = {}
    message: Any = None
    if dist.get_rank() == src:
        try:
            message = _describe(value, tensors)
        except UnknownTypeError as unknown:
            tensors = {}
            message = _pickled(value) if _pickle_allowed() else ["refused", unknown.kind]
    message = broadcast_json(message, group, device, src)
    if message[0] == "refused":
        raise ValueError(
            f"A {message[1]} cannot be broadcast: it would have to be pickled, and unpickling runs code of the "
            "sender's choice. Broadcast its contents (numbers, strings, paths, tensors, and lists, tuples and dicts of "
            f"them), or set {ALLOW_PICKLE}=1 on all ranks if you trust every process that can reach this job's ports."
        )
    is_source = dist.get_rank() == src
    if message[0] == "pickle":
        return value if is_source else _unpickled(message[1], src)
    plain, specs = message
    received = {
        tuple(path): _broadcast_tensor(spec, tensors.get(tuple(path)), src, group, device) for path, spec in specs
    }
    return value if is_source else decode(plain, received)


def _describe(value: Any, tensors: dict[Path, Tensor]) -> list[Any]:
    """``value`` without its tensors, and what each of them is like."""
    plain = encode(value, tensors)
    for path, tensor in tensors.items():
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
            raise UnknownTypeError(path, f"{type(tensor).__module__}.{type(tensor).__qualname__} ({tensor.layout})")
    return [
        plain,
        [[path, [name_of_dtype(t.dtype), list(t.shape), t.device.type != "cpu"]] for path, t in tensors.items()],
    ]


def _broadcast_tensor(
    spec: Any, sent: Tensor | None, src: int, group: dist.ProcessGroup, device: torch.device
) -> Tensor:
    name, shape, on_device = spec
    if sent is None:
        data = torch.empty(shape, dtype=dtype_of(name), device=device)
    else:
        data = sent.detach().to(device).contiguous()
    raw = data.view(torch.uint8) if data.dtype == torch.bool else data  # not every backend carries bool
    if raw.numel():
        dist.broadcast(raw, src, group=group)
    return data if on_device else data.cpu()


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
