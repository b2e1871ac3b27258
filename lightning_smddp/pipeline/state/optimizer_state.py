"""An optimizer that the user built for the whole model, of which each rank steps its own parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_smddp.pipeline.capture.graph import SplitError
from lightning_smddp.pipeline.mesh import Ownership
from lightning_smddp.sharding.optimizer_shards import OptimizerShards
from lightning_smddp.sharding.optimizer_states import load_whole_state_dict
from lightning_smddp.sharding.optimizer_trial import why_not_one_by_one
from lightning_smddp.wire.pytree import copied
from lightning_smddp.wire.stream import CPU
from lightning_smddp.wire.values import gathered_values


def require_divisible(optimizer: Optimizer) -> None:
    """Raise ``SplitError`` if ``optimizer`` needs all parameters in one place."""
    if why_not_one_by_one(optimizer) is not None:
        raise SplitError(
            f"{type(optimizer).__name__} cannot be used with a pipeline: each step needs the gradients of all "
            "parameters in one place, or what it does cannot be tried out. Use an optimizer that treats parameters one "
            "by one, such as AdamW."
        )


@dataclass(frozen=True)
class _Group:
    """What a parameter group has in the whole model.

    Attributes:
        parameters: those of all ranks.
        labels: "param_names" of an optimizer that was built from named parameters, else None.
    """

    parameters: list[nn.Parameter]
    labels: list[str] | None


class OptimizerPartition:
    """Reduces ``optimizer`` to the parameters of one rank, and saves and loads the state of the whole.

    Args:
        optimizer: of the complete model; its ``param_groups`` keep their number, order and options, and lose other
            ranks' parameters. A group may become empty.
        names: for each parameter of the model (by ``id``) its first name.
        ownership: who holds what.
        rank: this one, in the pipeline.

    Raises:
        ValueError: the optimizer needs all parameters in one place, or has one that is not the module's.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str], ownership: Ownership, rank: int) -> None:
        require_divisible(optimizer)
        self.optimizer = optimizer
        self.ownership = ownership
        self.rank = rank
        self.placeholder: nn.Parameter | None = None
        self._names = names
        self._groups: list[_Group] = []  # of the whole model
        self.refresh()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those of this rank, in the optimizer's order."""
        return [parameter for parameter in self._all() if self._is_mine(parameter)]

    @property
    def all_parameters(self) -> list[nn.Parameter]:
        """Those of all ranks, with groups that were added since."""
        self.refresh()
        return self._all()

    def refresh(self) -> None:
        """Take in groups that were added to the optimizer since; call it before each step. Not collective.

        Raises:
            ValueError: see the class; or a group was removed.
        """
        groups = self.optimizer.param_groups
        if len(groups) == len(self._groups):
            return
        if len(groups) < len(self._groups):
            raise ValueError(
                f"{type(self.optimizer).__name__} has {len(groups)} parameter groups, it had {len(self._groups)}. "
                "Groups may be added during training, not removed."
            )
        for group in groups[len(self._groups) :]:
            self._check(group["params"])
            whole = _Group(list(group["params"]), group.get("param_names"))
            self._groups.append(whole)
        self._filter()

    @contextmanager
    def shown_whole(self) -> Iterator[None]:
        """For hooks: within it the groups have the parameters of all ranks, and others may be added."""
        self.refresh()
        self._fill()
        try:
            yield
        finally:
            self.refresh()
            self._filter()

    @contextmanager
    def shown_own(self) -> Iterator[None]:
        """Within :meth:`shown_whole`: the groups have this rank's parameters again, to be stepped."""
        self.refresh()
        self._filter()
        try:
            yield
        finally:
            self._fill()

    def add_placeholder(self, device: torch.device) -> nn.Parameter:
        """A parameter of one element, 0, that is stepped along and never saved.

        ``GradScaler.step`` needs a gradient in every optimizer, which a rank without used parameters does not have;
        see ``across_stages.share_overflow``.
        """
        if self.placeholder is None:
            self.placeholder = nn.Parameter(torch.zeros(1, 1, device=device))
            self._filter()
        return self.placeholder

    def full_state_dict(
        self,
        group: dist.ProcessGroup,
        to_all: bool = False,
        device: torch.device = CPU,
        states: Mapping[Any, Any] | None = None,
    ) -> dict[str, Any]:
        """What ``optimizer.state_dict()`` would be in one process, with tensors on the CPU. Collective.

        Args:
            group: the ranks of this pipeline.
            to_all: False leaves all ranks but the first with an empty dict.
            device: where ``group``'s backend has its messages.
            states: of this rank's parameters; None: those that the optimizer has.

        Raises:
            ValueError: on every rank, if a state has something else than tensors and what JSON carries.
        """
        if states is None:
            states = self.optimizer.state
        found = self._gather_states(states, group, to_all, device)
        if not to_all and group.rank() != 0:
            return {}
        everything = {}
        for parameter in self._all():
            name = self._name_of(parameter)
            if name in found:
                everything[parameter] = found[name]
        with self._whole(), self._with_states(everything):
            return self.optimizer.state_dict()

    def partial_state_dict(self, states: Mapping[Any, Any] | None = None) -> dict[str, Any]:
        """What this rank gives to :meth:`full_state_dict`: its own parameters' state, with the whole's numbers."""
        if states is None:
            states = self.optimizer.state
        with self._whole(), self._with_states(states):
            state = self.optimizer.state_dict()
        # Each rank numbers the parameters of all, so that the parts of several ranks fit together.
        # `Optimizer.state_dict` numbers parameters over all groups; a key that is no number belongs to none of them.
        parameters = self._all()
        mine = {}
        for number, value in state["state"].items():
            if not isinstance(number, int) or self._is_owned(parameters[number]):
                mine[number] = value
        return {**state, "state": mine}

    def load_full_state_dict(self, state: Mapping[str, Any], shards: OptimizerShards | None = None) -> None:
        """Load what :meth:`full_state_dict`, or the optimizer of a whole model, saved: this rank's part of it, copied.

        Args:
            state: of the whole.
            shards: of the optimizer, where replicas share its work.

        Raises:
            ValueError: the groups differ, as ``Optimizer.load_state_dict`` says.
        """
        groups = state["param_groups"]
        numbers: list[Any] = []
        for group in groups:
            numbers += group["params"]
        # A saved state knows parameters by number, over all groups. What is of other ranks' is not even copied.
        parameters = self._all()
        others = set()
        if len(numbers) == len(parameters):  # else the optimizer says what is wrong
            for number, parameter in zip(numbers, parameters, strict=True):
                if not self._is_mine(parameter):
                    others.add(number)
        kept = {}
        for number, value in state["state"].items():
            if number not in others:
                kept[number] = copied(value)
        loaded = {**state, "state": kept}
        sizes = [len(group["params"]) for group in groups]
        if shards is None or sizes != [len(whole.parameters) for whole in self._groups]:
            with self._whole():
                self.optimizer.load_state_dict(loaded)
            return
        # Shards of an optimizer know no parameters but this rank's: they get these numbers alone.
        own_groups = []
        for group in groups:
            own = [number for number in group["params"] if number not in others]
            own_groups.append({**group, "params": own})
        loaded["param_groups"] = own_groups
        load_whole_state_dict(shards, loaded)
        self._filter()  # also the names that were loaded for the whole

    def give_back(self, state: Mapping[str, Any]) -> None:
        """Let the optimizer be the whole model's again, with ``state``, a :meth:`full_state_dict`."""
        self.placeholder = None
        self._fill()
        self.optimizer.load_state_dict(dict(state))

    def _all(self) -> list[nn.Parameter]:
        return list(chain.from_iterable(whole.parameters for whole in self._groups))

    def _name_of(self, parameter: nn.Parameter) -> str:
        return self._names[id(parameter)]

    def _is_mine(self, parameter: nn.Parameter) -> bool:
        """Whether this rank steps it: all holders of a tied parameter do."""
        return self.ownership.is_mine(self._name_of(parameter), self.rank)

    def _is_owned(self, parameter: nn.Parameter) -> bool:
        """Whether this rank speaks for its state: one of its holders does."""
        return self.ownership.owner(self._name_of(parameter)) == self.rank

    def _check(self, parameters: list[nn.Parameter]) -> None:
        for index, parameter in enumerate(parameters):
            if id(parameter) not in self._names:
                raise ValueError(
                    f"{type(self.optimizer).__name__} has a tensor of shape {tuple(parameter.shape)} (number {index} "
                    "of its group) that is no parameter of the module, so it is not known which rank trains it. "
                    "Register it: `self.x = nn.Parameter(...)`."
                )

    def _filter(self) -> None:
        """Leave this rank's parameters in the groups, and their state."""
        # The whole model's groups:  [a b c] [d e]
        #     on rank 0              [a b] []             a group may become empty, but stays with its options
        #     on rank 1              [c] [d e]
        for group, whole in self._with_groups():
            kept: list[nn.Parameter] = []
            kept_labels: list[str] = []
            for position, parameter in enumerate(whole.parameters):
                if self._is_mine(parameter):
                    kept.append(parameter)
                    if whole.labels is not None:
                        kept_labels.append(whole.labels[position])
                else:
                    # States are found by the parameter object: of those of other ranks none may stay, or they would be
                    # saved twice.
                    self.optimizer.state.pop(parameter, None)
            group["params"] = kept
            if whole.labels is not None:
                group["param_names"] = kept_labels
        if self.placeholder is not None:
            group = self.optimizer.param_groups[0]
            group["params"].append(self.placeholder)
            if "param_names" in group:
                group["param_names"].append("placeholder")

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Within it the groups have the parameters of all ranks."""
        # A state dict fails on the state of a parameter that is in no group: the placeholder's goes for that time.
        placeholder = self.placeholder
        placeholder_state: Any = None
        if placeholder is not None:
            placeholder_state = self.optimizer.state.pop(placeholder, None)
        self._fill()
        try:
            yield
        finally:
            self._filter()
            if placeholder is not None and placeholder_state is not None:
                self.optimizer.state[placeholder] = placeholder_state

    def _fill(self) -> None:
        """Put the parameters of all ranks into the groups, without the placeholder."""
        for group, whole in self._with_groups():
            group["params"] = list(whole.parameters)
            if whole.labels is not None:
                group["param_names"] = list(whole.labels)

    def _with_groups(self) -> Iterator[tuple[dict[str, Any], _Group]]:
        """Each of the optimizer's groups, and what it has in the whole model."""
        groups = self.optimizer.param_groups
        assert len(groups) == len(self._groups), "call refresh() after add_param_group()"
        return zip(groups, self._groups, strict=True)

    @contextmanager
    def _with_states(self, states: Mapping[Any, Any]) -> Iterator[None]:
        """Within it the optimizer has these states, beside what belongs to no parameter."""
        real = self.optimizer.state
        # `Optimizer.state_dict` reads its attribute `state`: for that moment it is another dict, which no step sees.
        shown: defaultdict[Any, Any] = defaultdict(dict)
        for key, value in real.items():
            if not isinstance(key, Tensor):
                shown[key] = value
        shown.update(states)
        self.optimizer.state = shown
        try:
            yield
        finally:
            self.optimizer.state = real

    def _gather_states(
        self,
        states: Mapping[Any, Any],
        group: dist.ProcessGroup,
        to_all: bool,
        device: torch.device,
    ) -> dict[str, Any]:
        """For each parameter its state, from its owner."""
        local: dict[str, Any] = {}
        for parameter in self._all():
            if self._is_owned(parameter) and parameter in states:
                local[self._name_of(parameter)] = states[parameter]
        what = f"{type(self.optimizer).__name__}'s state"
        found: dict[str, Any] = {}
        for of_rank in gathered_values(local, what, group, to_all, device):
            found |= of_rank
        return found
