"""The state of a sharded optimizer as that of a whole one, and back.

Checkpoints are the same with and without sharding, so any number of ranks can go on with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smddp.sharding.flat_layout import in_memory_order
from lightning_smddp.sharding.optimizer_shards import OptimizerShards, ShardedPiece
from lightning_smddp.wire.pytree import copied
from lightning_smddp.wire.values import gathered_values


def whole_state_dict(shards: OptimizerShards, group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """What ``optimizer.state_dict()`` is without sharding; its ``"state"`` is empty but on the first rank. Collective.

    The first rank gets one rank's share after the other, on the CPU.

    Args:
        shards: of the optimizer.
        group: the ranks that have a share each.
        device: where ``group``'s backend has its messages.

    Raises:
        ValueError: on every rank: a state has something else than tensors and what JSON carries.
    """
    local = {}
    for number, low, high, state in _own_states(shards):
        if state:
            local[number, low, high] = state
    what = f"{type(shards.optimizer).__name__}'s state"
    groups = shards.optimizer.param_groups
    parameters = [parameter for group_ in groups for parameter in group_["params"]]
    whole: dict[int, dict[str, Any]] = {}
    for of_rank in gathered_values(local, what, group, False, device):
        for (number, low, high), state in of_rank.items():
            if shards.splits:
                _add(whole.setdefault(number, {}), state, parameters[number], low, high)
            else:
                whole.setdefault(number, state)
    return {"state": dict(sorted(whole.items())), "param_groups": _numbered(groups)}


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
        shards.optimizer.load_state_dict({**whole, "state": state, "param_groups": groups})
        loaded = [{key: value for key, value in group.items() if key != "params"} for group in _groups(shards)]
    for group, words in zip(_groups(shards), loaded, strict=True):
        group.update(words)


def _groups(shards: OptimizerShards) -> list[dict[str, Any]]:
    return shards.optimizer.param_groups


def _numbered(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups as ``Optimizer.state_dict`` has them: parameters are numbers."""
    numbered, count = [], 0
    for group in groups:
        numbers = list(range(count, count + len(group["params"])))
        numbered.append({**{key: value for key, value in group.items() if key != "params"}, "params": numbers})
        count += len(numbers)
    return numbered


def _own_states(shards: OptimizerShards) -> Iterator[tuple[int, int, int, dict[str, Any]]]:
    """For each part that this rank steps: its parameter's number, its elements [low, high), and its state."""
    number = 0
    for group in _groups(shards):
        for parameter in group["params"]:
            for part in shards.parts_of(parameter):
                yield number, part.low, part.high, shards.optimizer.state.get(part.parameter, {})
            number += 1


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
