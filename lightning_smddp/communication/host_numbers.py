"""Python's numbers on a device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def from_numbers(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``torch.tensor(values)``, which on a device would wait until all that was queued before is done."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)
