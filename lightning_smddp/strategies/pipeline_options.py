"""The options of ``PipelineStrategy``, checked where they are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from lightning_smddp.pipeline.mesh import PipelineMesh
from lightning_smddp.pipeline.partition.microbatches import SplitBatch
from lightning_smddp.pipeline.runtime.schedules import Schedule, check
from lightning_smddp.strategies.options import FromDDP, GradientOptions, is_positive, require_bools, with_hints
from lightning_smddp.wording import counted

_BY_POSITION = 5  # up to `precision_plugin`

LossWeightOption: TypeAlias = str | Callable[[Any], Any]
"""``"auto"``, ``"rows"``, ``"labels"``, ``"shifted_labels"``, ``"sum"``, the name of a batch entry, or a function."""


class AsDataParallel(FromDDP, total=False):
    """Arguments of ``SMDDPStrategy`` that a pipeline has as well, by name."""

    bucket_cap_mb: float | None
    shard: Literal["optimizer"] | None


@with_hints
@dataclass(frozen=True)
class PartitionOptions:
    """How the module is divided into stages, and batches into micro-batches.

    Args:
        stages_per_rank: ``"auto"`` is 1, and 2 for the schedules that have several.
        placement: ``"cluster"`` puts a pipeline on neighbouring ranks, ``"spread"`` puts the replicas of a stage
            there.
        memory_limit_gb: GiB of a rank for parameters, gradients, optimizer state and activations, when cutting.
        check: compare the pipeline's loss and gradients with those of a plain loop before training.
        batch_size_fn: called with a batch, returns its number of rows, for batches that do not show it.
        split_batch: called with a batch and a number of micro-batches, returns them as a list of batches, or of pairs
            of a batch and its number of rows; None asks the module's method of this name, if it has one.

    Raises:
        ValueError: a value is none of the valid ones, which the message lists.
    """

    stages_per_rank: int | Literal["auto"] = "auto"
    placement: str = "cluster"
    memory_limit_gb: float | None = None
    check: bool = True
    batch_size_fn: Callable[[Any], int] | None = None
    split_batch: SplitBatch | None = None

    def __post_init__(self) -> None:
        if self.stages_per_rank != "auto":
            _check_count("stages_per_rank", self.stages_per_rank, "'auto'")
        PipelineMesh.of(1, 1, self.placement)
        if self.memory_limit_gb is not None and not is_positive(self.memory_limit_gb):
            raise ValueError(f"memory_limit_gb={self.memory_limit_gb!r} has to be positive (GiB a rank), or None.")
        require_bools(check=self.check)
        _check_function("batch_size_fn", self.batch_size_fn, "the number of rows of a batch, which it is called with")
        _check_function("split_batch", self.split_batch, "a list of batches, called with a batch and a number")

    @property
    def memory_limit(self) -> float | None:
        """``memory_limit_gb`` in bytes, for all stages of a rank together; None without a limit."""
        if self.memory_limit_gb is None:
            return None
        return self.memory_limit_gb * 2**30


@dataclass(frozen=True)
class PipelineOptions:
    """All options of a pipeline: arguments of ``PipelineStrategy``, see there for their meaning, and its groups.

    Attributes:
        num_microbatches: None is ``"auto"``.

    Raises:
        ValueError: a value is none of the valid ones, which the message lists.
    """

    pipeline_parallel_size: int | None
    num_microbatches: int | None
    schedule: Schedule
    split: Sequence[str] | None
    activation_checkpointing: bool
    meta_init: bool
    partition: PartitionOptions
    gradients: GradientOptions
    shard: str | None = None
    loss_weight: LossWeightOption = "auto"

    def __post_init__(self) -> None:
        _check_count("pipeline_parallel_size", self.pipeline_parallel_size, "None for all ranks")
        _check_count("num_microbatches", self.num_microbatches, "'auto'")
        require_loss_weight(self.loss_weight)
        if self.split is not None and not _is_list_of_names(self.split):
            raise ValueError(
                f"split={self.split!r} has to be a list of names: the first unit of each stage but the first."
            )
        require_bools(activation_checkpointing=self.activation_checkpointing, meta_init=self.meta_init)

    @property
    def stages_per_rank(self) -> int:
        """As given, or as the schedule has it."""
        given = self.partition.stages_per_rank
        if isinstance(given, str):
            return self.schedule.default_stages_per_rank
        return given

    def grid(self, world_size: int) -> PipelineMesh:
        """The ranks' arrangement, and a last look at what depends on their number. Raises ``ValueError``."""
        grid = PipelineMesh.of(world_size, self.pipeline_parallel_size or world_size, self.partition.placement)
        size = len(grid.pipelines[0])
        check(self.schedule, size, self.stages_per_rank, self.num_microbatches)
        stages = size * self.stages_per_rank
        if self.split is not None and len(self.split) != stages - 1:
            raise ValueError(
                f"split={list(self.split)} makes {counted(len(self.split) + 1, 'stage')}, but there are {stages} "
                f"(pipeline_parallel_size={size}, stages_per_rank={self.stages_per_rank}). Name "
                f"{counted(stages - 1, 'unit')}: "
                "the first of each stage but the first."
            )
        return grid


def require_few_by_position(strategy: Any, args: Sequence[Any]) -> None:
    """Raise ``TypeError`` for more than the first five: what follows in ``DDPStrategy`` is about its hook."""
    if len(args) > _BY_POSITION:
        raise TypeError(
            f"{type(strategy).__name__} takes {_BY_POSITION} arguments by position, as DDPStrategy does, but "
            f"{len(args)} were given. Give the others by name."
        )


def _is_list_of_names(value: Any) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return False
    return all(isinstance(name, str) for name in value)


def _check_count(name: str, value: Any, otherwise: str) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} has to be a number from 1, or {otherwise}.")


def _check_function(name: str, value: Any, returns: str) -> None:
    if value is not None and not callable(value):
        raise ValueError(f"{name}={value!r} has to be a function that returns {returns}, or None.")


def require_loss_weight(option: Any) -> None:
    """Raise ``ValueError`` if it is none of the values that ``loss_weight`` can have."""
    if callable(option) or (isinstance(option, str) and option):
        return
    raise ValueError(
        f"loss_weight={option!r} is unknown. Valid: 'auto', 'rows', 'labels', 'shifted_labels', 'sum', the name of an "
        "entry of the batch (its sum counts, as of a mask), or a function that is given a micro-batch and returns how "
        "much it counts."
    )
