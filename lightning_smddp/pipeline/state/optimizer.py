"""An optimizer that the user built for the whole model, of which each rank steps its own parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_smddp.communication.tensors import CPU, gather_structures
from lightning_smddp.pipeline.mesh import Ownership
from lightning_smddp.pipeline.state.meta_parameters import AbsentParameter
from lightning_smddp.sharding.optimizer_shards import OptimizerShards, StepsParts, all_parameters
from lightning_smddp.sharding.optimizer_states import load_whole_state_dict


class OwnSteps(StepsParts):
    """Lets ``optimizer`` step what this rank holds: some look at all parameters, with a gradient or not.

    So do hooks around its steps, such as those that clip weights.
    """

    def stand_next_to_step(self) -> None:
        """Be the first one before the step and the last one behind it."""
        before, after = self._step_handles
        before.hooks_dict_ref().move_to_end(before.id, last=False)
        after.hooks_dict_ref().move_to_end(after.id, last=True)

    def _parts(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        return [parameter for parameter in parameters if type(parameter) is not AbsentParameter]


class OptimizerPartition:
    """An optimizer whose parameters are on several ranks, and the state of the whole, saved and loaded.

    Its groups keep the parameters of all ranks; a rank steps its own (:class:`OwnSteps`).
    Between ranks and in what is saved parameters have torch's numbers.

    Attributes:
        shards: of the optimizer, where replicas share its work; None where they do not.

    Args:
        optimizer: of the complete model; it loses the states of other ranks' parameters.
        names: for each parameter of the model (by ``id``) its first name.
        ownership: who holds what.
        rank: this one, in the pipeline.

    Raises:
        ValueError: the optimizer has a parameter that is not the module's.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str], ownership: Ownership, rank: int) -> None:
        self.optimizer = optimizer
        self.ownership = ownership
        self.rank = rank
        self.shards: OptimizerShards | None = None
        self._names = names
        self._num_checked = 0  # groups
        for parameter in self.all_parameters:
            if not self._is_mine(parameter):
                optimizer.state.pop(parameter, None)  # as Adagrad has it before its first step

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those of this rank, in the optimizer's order: all holders of a tied parameter step it."""
        return list(filter(self._is_mine, self.all_parameters))

    @property
    def owned(self) -> list[nn.Parameter]:
        """Those that this rank owns: of the ranks that hold a tied parameter one does."""
        return [each for each in self.all_parameters if self.ownership.owner(self._names[id(each)]) == self.rank]

    @property
    def all_parameters(self) -> list[nn.Parameter]:
        """Those of all ranks."""
        self.check_groups()
        return all_parameters(self.optimizer)

    def check_groups(self) -> None:
        """Look at groups that were added to the optimizer since; call it before each step. Not collective.

        Raises:
            ValueError: see the class.
        """
        for group in self.optimizer.param_groups[self._num_checked :]:
            for index, parameter in enumerate(group["params"]):
                if id(parameter) not in self._names:
                    raise ValueError(
                        f"{type(self.optimizer).__name__} has a tensor of shape {tuple(parameter.shape)} (number "
                        f"{index} of its group) that was no parameter of the module when it was divided, so it is not "
                        "known which rank trains it. Make it in `__init__`: `self.x = nn.Parameter(...)`."
                    )
            self._num_checked += 1

    def full_state_dict(
        self,
        group: dist.ProcessGroup,
        device: torch.device = CPU,
        states: Mapping[Any, Any] | None = None,
    ) -> dict[str, Any]:
        """What ``optimizer.state_dict()`` would be in one process, with tensors on the CPU. Collective.

        On the first rank; the others get an empty dict.

        Args:
            group: the ranks of this pipeline.
            device: where ``group``'s backend has its messages.
            states: of this rank's parameters; None: those that the optimizer has.
        """
        whole = self.partial_state_dict(states)
        found: dict[Any, Any] = {}
        for of_rank in gather_structures(whole["state"], group, False, device):
            found |= of_rank
        if group.rank() != 0:
            return {}
        numbered = {number: found[number] for number in range(len(self.all_parameters)) if number in found}
        return {**whole, "state": {**numbered, **found}}

    def partial_state_dict(self, states: Mapping[Any, Any] | None = None) -> dict[str, Any]:
        """What this rank gives to :meth:`full_state_dict`: the state of what it owns, with the whole's numbers.

        What belongs to no parameter is in the part of each rank.
        """
        optimizer: Any = self.optimizer
        real = optimizer.state
        if states is None:
            states = real
        owned = {key: value for key, value in real.items() if not isinstance(key, Tensor)}
        owned |= {parameter: states[parameter] for parameter in self.owned if parameter in states}
        # `Optimizer.state_dict` reads its attribute `state`: for that moment it is another dict, which no step sees.
        optimizer.state = owned
        try:
            return optimizer.state_dict()  # type: ignore[no-any-return]
        finally:
            optimizer.state = real

    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`full_state_dict`, or the optimizer of a whole model, saved: this rank's part of it.

        Raises:
            ValueError: the groups differ, as ``Optimizer.load_state_dict`` says.
        """
        # A saved state knows parameters by number, over all groups. What is of other ranks' is not even read.
        groups = state["param_groups"]
        numbers = chain.from_iterable(group["params"] for group in groups)
        numbered = zip(numbers, self.all_parameters, strict=False)  # where they differ the optimizer says what is wrong
        others = {number for number, parameter in numbered if not self._is_mine(parameter)}
        mine = {number: state["state"][number] for number in state["state"] if number not in others}
        if self.shards is None:
            self.optimizer.load_state_dict({"state": mine, "param_groups": groups})
        else:
            load_whole_state_dict(self.shards, {"state": mine, "param_groups": groups})

    def _is_mine(self, parameter: nn.Parameter) -> bool:
        return self.ownership.is_mine(self._names[id(parameter)], self.rank)
