"""Values between ranks, of users and of Lightning, without pickle: JSON, and tensors as they are.

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

from lightning_smddp.wire.encode import Path, UnknownTypeError, decode, encode, is_dense, name_of_type
from lightning_smddp.wire.gather import broadcast_json
from lightning_smddp.wire.stream import CPU, Spec, broadcast_tensors

ALLOW_PICKLE = "LIGHTNING_SMDDP_ALLOW_PICKLE"


def broadcast_value(
    value: Any,
    group_src: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> Any:
    """``value`` of the rank ``group_src`` of ``group``, on every rank. Collective.

    The values of :data:`~lightning_smddp.wire.encode.FORMS`: None, bool, int, float, str, bytes, paths, dtypes, numbers
    of numpy, tensors, and lists, tuples, sets and dicts of these. A tensor that was on an accelerator arrives on the
    receiver's ``device``. Other objects go by pickle if the environment of every rank has
    ``LIGHTNING_SMDDP_ALLOW_PICKLE=1``.

    Raises:
        ValueError: on every rank, for a value that cannot be sent.
    """
    # The message is a list with its kind first. Every rank gets the same one, so what is refused raises on all of them.
    #     ["refused", type]                  it cannot be sent
    #     ["pickle", text]                   pickled, in base64
    #     ["value", plain data, tensors]     of each tensor its path, its shape and dtype, and whether it is on an
    #                                        accelerator; the tensors themselves follow
    is_source = group.rank() == group_src
    tensors: dict[Path, Tensor] = {}
    message: Any = None
    if is_source:
        try:
            message = _describe(value, tensors)
        except UnknownTypeError as unknown:
            tensors = {}
            message = ["refused", unknown.kind]
            if _pickle_allowed():
                message = _pickled(value)
    message = broadcast_json(message, group, device, group_src)
    if message[0] == "refused":
        raise ValueError(
            f"A {message[1]} cannot be broadcast: it would have to be pickled, and unpickling runs code of the "
            "sender's choice. Broadcast its contents (numbers, strings, paths, tensors, and lists, tuples and dicts of "
            f"them), or set {ALLOW_PICKLE}=1 on all ranks if you trust every process that can reach this job's ports."
        )
    if message[0] == "pickle":
        if is_source:
            return value
        return _unpickled(message[1], dist.get_global_rank(group, group_src))
    _, plain, announced = message
    specs = [Spec.from_json(spec) for _, spec, _ in announced]
    if not is_source:
        for (path, _, on_device), spec in zip(announced, specs, strict=True):
            own_device = CPU
            if on_device:
                own_device = device
            tensors[tuple(path)] = torch.empty(spec.shape, dtype=spec.dtype, device=own_device)
    broadcast_tensors(specs, list(tensors.values()), group, group_src, device)
    if is_source:
        return value
    return decode(plain, tensors)


def _describe(value: Any, tensors: dict[Path, Tensor]) -> list[Any]:
    """``value`` without its tensors, and of each its path, shape and dtype, and whether it is on an accelerator."""
    plain = encode(value, tensors)
    announced = []
    for path, tensor in tensors.items():
        if type(tensor) not in (Tensor, torch.nn.Parameter) or not is_dense(tensor):
            raise UnknownTypeError(path, f"{name_of_type(tensor)} ({tensor.layout})")
        on_device = tensor.device.type != "cpu"
        announced.append([path, Spec.of(tensor).to_json(), on_device])
    return ["value", plain, announced]


def _pickle_allowed() -> bool:
    return os.environ.get(ALLOW_PICKLE) == "1"


def _pickled(value: Any) -> list[Any]:
    pickled = pickle.dumps(value)
    return ["pickle", base64.b64encode(pickled).decode()]


def _unpickled(content: str, src: int) -> Any:
    """Only with the user's word on this rank too."""
    if not _pickle_allowed():
        raise ValueError(
            f"Rank {src} broadcast a pickled object. Set {ALLOW_PICKLE}=1 on all ranks if you trust every process that "
            "can reach this job's ports, or on none."
        )
    return pickle.loads(base64.b64decode(content))
