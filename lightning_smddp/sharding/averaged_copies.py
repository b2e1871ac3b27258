"""Copies of a divided module in which callbacks average its weights: divided as the module is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_smddp.sharding.whole_states import own_part, whole


class AveragedCopies:
    """Whole copies of ``root``, of which each rank keeps its share until :meth:`close`. Not collective.

    Args:
        copies: modules with the names and shapes of ``root``, equal on all ranks. Each keeps its dtype and device.
        root: divided.
    """

    def __init__(self, copies: Iterable[nn.Module], root: nn.Module) -> None:
        self._copies = list(copies)
        divided = {name: p for name, p in root.named_parameters() if isinstance(p, DTensor)}
        for copy in self._copies:
            shares = {}
            for name, parameter in copy.named_parameters():
                if name in divided:
                    shares[name] = own_part(parameter, divided[name], parameter.device)
            _replace_parameters(copy, shares)

    def close(self, device: torch.device) -> None:
        """Make the copies whole again. Collective.

        Args:
            device: where messages are.
        """
        for copy in self._copies:
            values = {}
            for name, parameter in copy.named_parameters():
                if isinstance(parameter, DTensor):
                    values[name] = whole(parameter, device).to(parameter.device)
            _replace_parameters(copy, values)
        self._copies = []


def _replace_parameters(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give ``module`` new parameters with these values; what is tied stays tied."""
    made: dict[int, nn.Parameter] = {}
    for name, parameter in module.named_parameters():
        if name in values:
            made[id(parameter)] = nn.Parameter(values[name], requires_grad=parameter.requires_grad)
    # A tied parameter has one name above, but several places here.
    for owner in module.modules():
        places = list(owner.named_parameters(recurse=False, remove_duplicate=False))
        for key, parameter in places:
            if id(parameter) in made:
                owner.register_parameter(key, made[id(parameter)])
