"""The state of a sharded optimizer as that of a whole one, and back.

Checkpoints are the same with and without sharding, so any number of ranks can go on with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smddp.communication.tensors import gather_structures
from lightning_smddp.pytree import copied
from lightning_smddp.sharding.flat_parameters import in_memory_order
from lightning_smddp.sharding.optimizer_shards import OptimizerShards, ShardedPiece, all_parameters


def whole_states(
    shards: OptimizerShards, group: dist.ProcessGroup, device: torch.device
) -> dict[nn.Parameter, dict[str, Any]]:
    """Each parameter's whole state, on the CPU of the first rank; empty on the others. Collective.

    The first rank gets one rank's share after the other.

    Args:
        shards: of the optimizer.
        group: the ranks that have a share each.
        device: where ``group``'s backend has its messages.
    """
    optimizer = shards.optimizer
    parameters = all_parameters(optimizer)
    # (number of the parameter, first element, one behind the last) -> the state of these elements on this rank. Ranks
    # number parameters alike, and no two of them step the same elements.
    local = {}
    for number, parameter in enumerate(parameters):
        if group.rank() != 0 and id(parameter) not in shards.pieces:
            continue  # every rank has this state; the first one's counts
        for part in shards.parts_of(parameter):
            state = optimizer.state.get(part.parameter)
            if state:
                local[number, part.low, part.high] = state

    whole: dict[int, dict[str, Any]] = {}
    for of_rank in gather_structures(local, group, False, device):
        for (number, low, high), state in of_rank.items():
            if shards.splits:
                _add(whole.setdefault(number, {}), state, parameters[number], low, high)
            else:
                whole[number] = state
    return {parameters[number]: whole[number] for number in sorted(whole)}


def whole_state_dict(shards: OptimizerShards, group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """What ``optimizer.state_dict()`` is without sharding; its ``"state"`` is empty but on the first rank. Collective.

    See :func:`whole_states`.
    """
    states = whole_states(shards, group, device)
    parameters = enumerate(all_parameters(shards.optimizer))
    state = {number: states[parameter] for number, parameter in parameters if parameter in states}
    return {"state": state, "param_groups": numbered(shards.optimizer.param_groups)}


def load_whole_state_dict(shards: OptimizerShards, whole: Mapping[str, Any]) -> None:
    """Load what an unsharded optimizer has saved: the part of it that this rank steps, copied.

    Raises:
        ValueError: the groups differ.
    """
    saved_groups = whole["param_groups"]
    require_same_sizes(saved_groups, [group["params"] for group in shards.optimizer.param_groups])
    # What is saved numbers whole parameters: 0, 1, 2 ... over all groups. The optimizer has pieces while it loads, so
    # it gets the same groups with pieces in the parameters' place, numbered anew, and the state of each piece.
    state = {key: value for key, value in whole["state"].items() if not isinstance(key, int)}  # of no parameter
    numbers = chain.from_iterable(group["params"] for group in saved_groups)
    count = 0
    for parameter, number in zip(all_parameters(shards.optimizer), numbers, strict=True):
        for part in shards.parts_of(parameter):
            if number in whole["state"]:
                state[count] = _part_of_state(whole["state"][number], parameter, part)
            count += 1
    with shards.as_pieces():
        pairs = zip(saved_groups, shards.optimizer.param_groups, strict=True)
        groups = numbered([{**saved_group, "params": group["params"]} for saved_group, group in pairs])
        given = {**whole, "state": state, "param_groups": groups}
        type(shards.optimizer).load_state_dict(shards.optimizer, given)  # not Fabric's


def require_same_sizes(saved_groups: Sequence[Mapping[str, Any]], groups: Sequence[Sequence[Any]]) -> None:
    """Raise ``ValueError`` unless saved groups have as many parameters as ``groups``."""
    saved, own = [len(group["params"]) for group in saved_groups], [len(group) for group in groups]
    if own != saved:
        raise ValueError(f"The saved optimizer has groups of {saved} parameters, and this one has groups of {own}.")


def numbered(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups as ``Optimizer.state_dict`` has them: parameters are numbers."""
    found = []
    count = 0
    for group in groups:
        end = count + len(group["params"])
        found.append({**group, "params": list(range(count, end))})
        count = end
    return found


def _add(whole: dict[str, Any], part: Mapping[str, Any], parameter: nn.Parameter, low: int, high: int) -> None:
    """Put the state of elements [low, high) into the whole parameter's."""
    for key, value in part.items():
        is_elementwise = isinstance(value, Tensor) and value.shape == (high - low,)
        if not is_elementwise:
            whole.setdefault(key, value)
            continue
        if key not in whole:
            whole[key] = torch.empty_like(parameter, dtype=value.dtype, device="cpu", requires_grad=False)
        # The flat tensor is a view: `empty_like` has kept the parameter's order in memory, in which pieces are counted.
        flat = in_memory_order(whole[key], whole[key])
        flat[low:high] = value


def _part_of_state(whole: Mapping[str, Any], parameter: nn.Parameter, part: ShardedPiece) -> dict[str, Any]:
    """What of a parameter's state belongs to a part of it; values that are not one an element belong to each."""
    state = {}
    is_cut = part.parameter.shape != parameter.shape
    for key, value in whole.items():
        if is_cut and isinstance(value, Tensor) and value.shape == parameter.shape:
            flat = in_memory_order(value, parameter)
            state[key] = flat[part.low : part.high].clone()
        else:
            state[key] = copied(value)
    return state
