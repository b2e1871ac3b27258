"""The state of a sharded optimizer as that of a whole one, and back.

Checkpoints are the same with and without sharding, so any number of ranks can go on with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smddp.sharding.flat_layout import in_memory_order
from lightning_smddp.sharding.optimizer_shards import OptimizerShards, ShardedPiece
from lightning_smddp.wire.pytree import copied
from lightning_smddp.wire.values import gathered_values


def whole_states(
    shards: OptimizerShards, group: dist.ProcessGroup, device: torch.device
) -> dict[nn.Parameter, dict[str, Any]]:
    """Each parameter's whole state, on the CPU of the first rank; empty on the others. Collective.

    The first rank gets one rank's share after the other.

    Args:
        shards: of the optimizer.
        group: the ranks that have a share each.
        device: where ``group``'s backend has its messages.

    Raises:
        ValueError: on every rank: a state has something else than tensors and what JSON carries.
    """
    parameters = _parameters(shards)
    local = {}
    for number, parameter in enumerate(parameters):
        if group.rank() != 0 and not shards.has_pieces(parameter):
            continue  # every rank has this state; the first one's counts
        for part in shards.parts_of(parameter):
            state = shards.optimizer.state.get(part.parameter)
            if state:
                local[number, part.low, part.high] = state
    whole: dict[int, dict[str, Any]] = {}
    for of_rank in gathered_values(local, f"{type(shards.optimizer).__name__}'s state", group, False, device):
        for (number, low, high), state in of_rank.items():
            if shards.splits:
                _add(whole.setdefault(number, {}), state, parameters[number], low, high)
            else:
                whole[number] = state
    return {parameters[number]: state for number, state in sorted(whole.items())}


def whole_state_dict(shards: OptimizerShards, group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """What ``optimizer.state_dict()`` is without sharding; its ``"state"`` is empty but on the first rank. Collective.

    See :func:`whole_states`.
    """
    states = whole_states(shards, group, device)
    numbers = {id(parameter): number for number, parameter in enumerate(_parameters(shards))}
    state = {numbers[id(parameter)]: of_parameter for parameter, of_parameter in states.items()}
    return {"state": state, "param_groups": _numbered(_groups(shards))}


def load_whole_state_dict(shards: OptimizerShards, whole: Mapping[str, Any]) -> None:
    """Load what an unsharded optimizer has saved: the part of it that this rank steps, copied.

    Raises:
        ValueError: the groups differ, as ``Optimizer.load_state_dict`` says.
    """
    groups: list[dict[str, Any]] = []
    state: dict[Any, Any] = {key: value for key, value in whole["state"].items() if not isinstance(key, int)}
    count = 0
    for group, saved in zip(shards.optimizer.param_groups, whole["param_groups"], strict=False):
        numbers = []
        for parameter, number in zip(group["params"], saved["params"], strict=False):
            for part in shards.parts_of(parameter):
                if number in whole["state"]:
                    state[count] = _part_of_state(whole["state"][number], parameter, part, shards.splits)
                numbers.append(count)
                count += 1
        is_as_long = len(group["params"]) == len(saved["params"])
        groups.append({**saved, "params": numbers if is_as_long else [None, *numbers]})
    groups += whole["param_groups"][len(groups) :]
    with shards.as_pieces():
        optimizer = shards.optimizer
        type(optimizer).load_state_dict(optimizer, {**whole, "state": state, "param_groups": groups})  # not Fabric's
        loaded = [{key: value for key, value in group.items() if key != "params"} for group in _groups(shards)]
    for group, words in zip(_groups(shards), loaded, strict=True):
        group.update(words)


def _groups(shards: OptimizerShards) -> list[dict[str, Any]]:
    return shards.optimizer.param_groups


def _parameters(shards: OptimizerShards) -> list[nn.Parameter]:
    return [parameter for group in _groups(shards) for parameter in group["params"]]


def _numbered(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups as ``Optimizer.state_dict`` has them: parameters are numbers."""
    numbered, count = [], 0
    for group in groups:
        numbers = list(range(count, count + len(group["params"])))
        numbered.append({**{key: value for key, value in group.items() if key != "params"}, "params": numbers})
        count += len(numbers)
    return numbered


def _add(whole: dict[str, Any], part: Mapping[str, Any], parameter: nn.Parameter, low: int, high: int) -> None:
    """Put the state of elements [low, high) into the whole parameter's."""
    for key, value in part.items():
        if not (isinstance(value, Tensor) and value.shape == (high - low,)):
            whole.setdefault(key, value)
            continue
        if key not in whole:
            whole[key] = torch.empty_like(parameter, dtype=value.dtype, device="cpu", requires_grad=False)
        in_memory_order(whole[key], whole[key])[low:high] = value


def _part_of_state(
    whole: Mapping[str, Any], parameter: nn.Parameter, part: ShardedPiece, splits: bool
) -> dict[str, Any]:
    """What of a parameter's state belongs to a part of it; values that are not one an element belong to each."""
    state = {}
    is_cut = splits and part.parameter is not parameter
    for key, value in whole.items():
        if is_cut and isinstance(value, Tensor) and value.shape == parameter.shape:
            state[key] = in_memory_order(value, parameter)[part.low : part.high].clone()
        else:
            state[key] = copied(value)
    return state
