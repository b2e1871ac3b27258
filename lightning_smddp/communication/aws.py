"""AWS's closed backend ``smddp``, which SageMaker's GPU containers have: loading it, and what it cannot do.

It has all_reduce, broadcast, reduce, all_gather and barrier, with SUM, MIN and MAX, on CUDA tensors, and no group but
the world: sagemaker-python-sdk issue 2571, Lightning issue 20409.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp._compat import default_store

if TYPE_CHECKING:
    from lightning_smddp.communication.compression import Compression

NAME = "smddp"
ALGORITHMS = ("auto", "native")  # the others need groups of their own
_MODULE = "smdistributed.dataparallel.torch.torch_smddp"
_PAUSE_S = 0.05
_waits = itertools.count()  # the same on all ranks


def problem() -> str | None:
    """Why the backend cannot be used here; None if it has been loaded, and has registered itself."""
    try:
        if find_spec(_MODULE) is None:
            return f"{_MODULE} is not installed"
        with warnings.catch_warnings():  # it does not say for which devices it is
            warnings.filterwarnings("ignore", "Device capability of smddp unspecified")
            import_module(_MODULE)
    except ModuleNotFoundError as error:
        if not _MODULE.startswith(str(error.name)):
            return f"{_MODULE} does not load: {error}"
        return f"{_MODULE} is not installed"
    except (ImportError, OSError, RuntimeError, ValueError) as error:  # a binary for another machine
        return f"{_MODULE} does not load: {error}"
    if NAME not in dist.Backend.backend_list:
        return f"{_MODULE} loads, but has not registered a backend"
    _hash_metrics_by_identity()
    return None


def require() -> None:
    """Load the backend. Raises ``ValueError`` with the cure if it cannot be used."""
    found = problem()
    if found is not None:
        raise ValueError(
            f"process_group_backend='smddp' cannot be used: {found}. AWS ships this closed library only in SageMaker's "
            "PyTorch containers for GPU instances (the last one has PyTorch 2.4). Leave process_group_backend out: "
            "strategy='smddp' does not need it, and 'auto' takes it where it works."
        )


def check_options(algorithm: str, compression: Compression | None) -> None:
    """Raise ``ValueError`` for what needs groups of ranks, which the backend does not have."""
    wrong = []
    if algorithm not in ALGORITHMS:
        wrong.append(f"algorithm={algorithm!r}")
    if compression is not None:
        wrong.append(f"compression={compression.method!r}")
    if wrong:
        raise ValueError(
            f"{' and '.join(wrong)} cannot be used with process_group_backend='smddp': AWS's backend has no groups but "
            "that of all ranks. Use algorithm='native' (the backend's own all-reduce) without compression, or leave "
            "process_group_backend out."
        )


def is_active() -> bool:
    """Whether the default group is AWS's."""
    return dist.is_initialized() and dist.get_backend() == NAME


def on_device(call: Callable[[Tensor], Any], tensor: Any, device: torch.device) -> Any:
    """``call(tensor)``; a tensor that is not where the backend's are goes there, and the result comes back."""
    if not isinstance(tensor, Tensor) or tensor.device.type == device.type or not is_active():
        return call(tensor)
    return call(tensor.to(device)).to(tensor.device)


def wait_for_all() -> None:
    """A barrier of all ranks through the store, which needs no group and waits as long as it takes. Collective."""
    store, key = default_store(), f"lightning_smddp/aws/{next(_waits)}"
    if store.add(key, 1) == dist.get_world_size():
        store.set(f"{key}/open", "")
    while not store.check([f"{key}/open"]):
        time.sleep(_PAUSE_S)  # asking again, so that other threads get at the store


def _hash_metrics_by_identity() -> None:
    """Let torchmetrics' metrics be hashed before their ``__init__`` is through.

    AWS's library wraps ``nn.Module.__init__`` and hashes the module in it, where a metric has no states to hash yet.
    NVIDIA NeMo does the same for SageMaker.
    """
    from torchmetrics import Metric

    def identity(self: Any) -> int:
        return hash((type(self).__name__, id(self)))

    Metric.__hash__ = identity  # type: ignore[method-assign]
