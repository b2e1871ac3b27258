"""Gradients of a stage from the schedule, which makes them early, to the optimizer's step.

A schedule runs forward and backward of all micro-batches within `training_step`. Lightning zeroes gradients behind it,
and calls `backward` on the returned loss. So that loss is :func:`connected` to a function that delivers
what the schedule has made: hooks, precision plugins and an overridden `backward` work as ever::

    training_step: begin -> schedule makes .grad -> stash      .grad as it was before the batch; None if that is
                                                               zeroed unread, or was added to
    zero_grad                                                  .grad as the Trainer wants it
    backward:      restore                                     .grad = what was there + what the schedule made

Across stages gradients of parameters that several use are summed, and there is one norm and one overflow for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from math import inf
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from lightning_smddp.communication.groups import create_group, new_name, world
from lightning_smddp.communication.tensors import CPU, from_numbers, norm_over_ranks
from lightning_smddp.patches import patched
from lightning_smddp.pipeline.mesh import Ownership
from lightning_smddp.pipeline.state.replicas import ReplicaGradients
from lightning_smddp.pytree import copied
from lightning_smddp.sharding.optimizer_shards import all_parameters

Tied: TypeAlias = list[tuple[dist.ProcessGroup, list[nn.Parameter]]]
"""Of a rank: groups, each with the parameters that exactly its members hold."""
Gradients: TypeAlias = Mapping[str, Tensor]
"""By the name of the parameter."""

_ROUNDING = 1e-6  # relative: a loss that nobody scales may arrive with so much


def tied_parameters(
    module: nn.Module,
    ownership: Ownership,
    pipeline: Sequence[int],
    timeout: timedelta,
    device: torch.device,
) -> Tied:
    """A group for each set of ranks that share parameters, in this rank's pipeline. Collective over the world.

    Args:
        module: the model.
        ownership: the same in every pipeline.
        pipeline: the global ranks of this one.
        timeout: of the groups' collectives.
        device: where the gradients are.
    """
    found = []
    # In the order of `shared`, which is the same on all ranks: so ranks of two sets come to both in one order.
    for ranks, names in ownership.shared().items():
        # Only the members of a group create it.
        members = [pipeline[rank] for rank in ranks]
        name = new_name(world())
        if dist.get_rank() in members:
            group = create_group(members, f"{name}-tied-{members}", timeout, device)
            found.append((group, [module.get_parameter(name) for name in names]))
    return found


@torch.no_grad()
def sum_tied(tied: Tied) -> None:
    """Replace each shared parameter's ``.grad`` by the sum over its holders. Collective over the pipeline.

    A holder without a gradient counts as zero; if none has one, it stays None. Values are the same at first (see
    ``state_dict.broadcast_initial``) and stay so: the sum is bit by bit the same on all holders.
    """
    for group, parameters in tied:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        if trained:
            _sum(group, trained)


def _sum(group: dist.ProcessGroup, parameters: list[nn.Parameter]) -> None:
    """Replace the gradients of ``parameters`` by their sums over ``group``.

    One all-reduce of one flat tensor, of the widest dtype that there is::

        gradient of p0 | gradient of p1 | ... | how many holders have one: p0, p1, ...
    """
    first = parameters[0]
    has_one = [parameter.grad is not None for parameter in parameters]
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad.to_dense() for each in parameters]
    flat = torch.cat([*map(torch.flatten, gradients), from_numbers(has_one, first.dtype, first.device)])
    dist.all_reduce(flat, group=group)
    *sums, holders = flat.split([*map(torch.numel, gradients), len(parameters)])
    # Reading the counts waits for the device. Where this rank has all gradients, each has a holder anyway.
    counts = has_one if all(has_one) else holders.tolist()
    for parameter, total, count in zip(parameters, sums, counts, strict=True):
        # The sum is dense, whatever this rank's own part of it was.
        if count and (parameter.grad is None or parameter.grad.is_sparse):
            parameter.grad = torch.empty_like(parameter)
        if parameter.grad is not None:
            parameter.grad.copy_(total.view(parameter.shape))


# ---- until backward ----


@dataclass
class GradientStash:
    """One batch after the other: :meth:`begin`, the schedule, :meth:`stash`, :meth:`restore`.

    Args:
        parameters: of this rank, by first name.
        stages: for each parameter the stages of this rank that use it.
        tied: those that stages on other ranks have, too.
        replicas: averages over replicas; None with one replica.
    """

    parameters: Mapping[str, nn.Parameter]
    stages: Mapping[str, Sequence[int]]
    tied: Tied
    replicas: ReplicaGradients | None
    _old: Gradients | None = None  # copies of what was there before the batch
    _made: Gradients = field(default_factory=dict)  # by the schedule, without replicas; else the buckets hold it
    _accumulates: bool = False
    _continues: bool = False

    def begin(self, continues: bool, may_drop: bool, accumulates: bool, num_microbatches: int) -> None:
        """Prepare ``.grad`` for a batch.

        Args:
            continues: it adds to the batch before.
            may_drop: what is in ``.grad`` will be zeroed before it is read; else it is kept until then.
            accumulates: no optimizer step follows.
            num_microbatches: of the batch.
        """
        self._accumulates = accumulates
        self._continues = continues
        self._old = None
        # Three cases: the batch adds to `.grad` itself (no copy); `.grad` will be zeroed unread (no copy); or `.grad`
        # has to look untouched until `backward`, while the schedule needs an empty one (copy: the memory of a gradient
        # that replicas have averaged is used again).
        if not continues and not may_drop:
            self._old = copied(self._gradients())
        # Buckets start to be averaged when their gradients are complete: after a backward pass for each micro-batch
        # and stage. What only accumulates is not averaged.
        if self.replicas is not None:
            backwards = {name: num_microbatches * len(stages) for name, stages in self.stages.items()}
            self.replicas.begin({} if accumulates else backwards, keep=continues)
        elif not continues:
            self._set({})

    def stash(self) -> None:
        """Take away what the schedule has made, so that zeroing does not reach it, and put back what was there."""
        if self.replicas is None:
            self._made = self._gradients()
        else:
            self.replicas.stash()
        self._set(self._old or {})

    @torch.no_grad()
    def restore(self, factor: float) -> None:
        """Set ``.grad``. Collective over the pipeline, and over replicas, unless the batch accumulates.

        Args:
            factor: the loss was multiplied by it after the step.

        Raises:
            ValueError: the loss was multiplied, and what accumulated before cannot be told apart.
        """
        if factor != 1.0 and self._continues:
            raise ValueError(
                f"The loss was multiplied by {factor:g} between `training_step` and `backward` in a batch that "
                "accumulates gradients. In a pipeline gradients exist before that. Multiply it inside `training_step`."
            )
        # In one process's order: gradients of this batch, scaled, summed over the holders of a tied parameter, and
        # only then added to those of earlier batches, as the Trainer has left them.
        before = {} if self._old is None else self._gradients()
        self._set(self._made)
        if self.replicas is not None:
            self.replicas.finish(average=not self._accumulates)
        if factor != 1.0:
            for gradient in self._gradients().values():
                gradient.mul_(factor)
        if not self._accumulates:
            sum_tied(self.tied)
        for name, gradient in before.items():
            made = self.parameters[name].grad
            self.parameters[name].grad = gradient if made is None else made.add_(gradient)
        self._old = None
        self._made = {}

    def _gradients(self) -> Gradients:
        """What ``.grad`` is now, by parameter; without those that have none."""
        return {name: each.grad for name, each in self.parameters.items() if each.grad is not None}

    def _set(self, gradients: Gradients) -> None:
        """Let each parameter's ``.grad`` be the one of its name, or None where there is none."""
        for name, parameter in self.parameters.items():
            parameter.grad = gradients.get(name)


def connected(loss: Tensor, deliver: Callable[[Tensor], None]) -> Tensor:
    """``loss``, such that a backward pass through it calls ``deliver`` with the gradient that arrives at it."""
    leaf = loss.detach().requires_grad_()
    leaf.register_hook(deliver)
    with torch.enable_grad():
        return leaf.clone()


def factor_of(arrived: Tensor, expected: float | Tensor) -> float:
    """The gradient that arrived at the loss, divided by the one that the schedule assumed. Waits for a device.

    It is 1 unless somebody scales the loss between ``training_step`` and ``backward``.
    """
    expected = float(expected)
    ratio = float(arrived) / expected if expected else 1.0
    return 1.0 if abs(ratio - 1.0) < _ROUNDING else ratio


# ---- before the optimizer's step ----


def clip_by_norm(
    parameters: Sequence[nn.Parameter],
    owned: Sequence[nn.Parameter],
    group: dist.ProcessGroup,
    max_norm: float,
    device: torch.device = CPU,
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` over all stages of a pipeline. Collective.

    A parameter that several ranks hold counts once; its gradient has to be summed before (:func:`sum_tied`).

    Args:
        parameters: of this rank.
        owned: those of them that count here, as this rank is the first that holds them.
        group: the ranks of this pipeline.
        max_norm: above it all gradients are scaled down to it, in place.
        device: of the gradients.

    Returns:
        The 2-norm of all gradients before clipping, the same on every rank: a scalar.
    """
    # A tied parameter has the same summed gradient on several ranks, so its owner alone counts it; all of its holders
    # scale it by the same factor.
    counted = [parameter.grad for parameter in owned if parameter.grad is not None]
    total = norm_over_ranks(counted, group, 2.0, device, error_if_nonfinite=False)
    clip_grads_with_norm_(parameters, max_norm, total)
    return total


def clip_by_value(optimizer: Optimizer, clip_val: float) -> None:
    """``torch.nn.utils.clip_grad_value_`` of this stage's gradients; torch's raises where there are none."""
    trained = [parameter for parameter in all_parameters(optimizer) if parameter.grad is not None]
    if trained:
        clip_grad_value_(trained, clip_val)


def clipping_by(plugin: Any, by_norm: Callable[[Any, float], None]) -> AbstractContextManager[None]:
    """Within it Lightning's precision ``plugin`` clips by norm with ``by_norm``, by value with :func:`clip_by_value`.

    Its own methods know the parameters of one rank: each stage would be scaled by another factor.
    """
    own = vars(plugin)
    return patched([(own, "clip_grad_by_norm", by_norm), (own, "clip_grad_by_value", clip_by_value)])


def overflow_of(parameters: Iterable[nn.Parameter], device: torch.device, group: dist.ProcessGroup) -> Tensor:
    """Inf if a gradient of any stage is not finite, else 0: a matrix of one element. Collective over the pipeline."""
    dense = [parameter.grad.to_dense() for parameter in parameters if parameter.grad is not None]
    # The largest absolute value is finite if all are. The flag stays on the device: to read it would wait for that.
    flag = torch.where(get_total_norm(dense, inf).isfinite(), 0.0, inf).to(device, torch.float32).view(1, 1)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return flag


@contextmanager
def overflow_shared(scaler: Any, device: torch.device, group: dist.ProcessGroup) -> Iterator[None]:
    """In this context a gradient of any stage that is not finite lets every rank's ``scaler`` skip the step.

    A ``GradScaler`` looks at the gradients of its own rank only: without this one stage would skip a step that the
    others make, and their scales would part. Where it looks, the optimizer has one more parameter: with the overflow of
    all ranks as its gradient, also on a rank that has no gradients.
    """

    def sharing(looks: Callable[..., Any], in_step: bool) -> Callable[..., Any]:
        def call(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            # Fused optimizers unscale in their step, all others before.
            if getattr(optimizer, "_step_supports_amp_scaling", False) != in_step:
                return looks(optimizer, *args, **kwargs)
            placeholder = nn.Parameter(torch.zeros(1, 1, device=device))
            placeholder.grad = overflow_of(all_parameters(optimizer), device, group)
            # In a group of its own: fused kernels want equal states for all parameters of one.
            groups = optimizer.param_groups
            groups.append({**groups[0], "params": [placeholder]})
            try:
                return looks(optimizer, *args, **kwargs)
            finally:
                groups.pop()
                optimizer.state.pop(placeholder, None)

        return call

    own = vars(scaler)
    with patched([(own, "unscale_", sharing(scaler.unscale_, False)), (own, "step", sharing(scaler.step, True))]):
        yield
