"""The arguments of ``PipelineStrategy``, checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_smddp.pipeline.partition.mesh import PipelineMesh
from lightning_smddp.pipeline.partition.splitter import SplitBatch
from lightning_smddp.pipeline.runtime.schedules import Schedule, check, parse
from lightning_smddp.strategies.option_checks import is_positive, require_bools
from lightning_smddp.strategies.session import Options
from lightning_smddp.wording import counted

FALLBACKS = ("replicate", "error")


@dataclass(frozen=True)
class PipelineOptions:
    """See ``PipelineStrategy`` for the meaning."""

    pipeline_parallel_size: int | None
    num_microbatches: int | None  # None: auto
    schedule: Schedule
    stages_per_rank: int
    split: tuple[str, ...] | None
    placement: str
    active_microbatches: int | None
    activation_checkpointing: bool
    meta_init: bool
    memory_limit: float | None  # bytes
    check: bool
    batch_size_fn: Callable[[Any], int] | None
    split_batch: SplitBatch | None
    fallback: str
    communication: Options

    @classmethod
    def parse(
        cls,
        pipeline_parallel_size: int | None,
        num_microbatches: int | str,
        schedule: str,
        stages_per_rank: int | str,
        split: Sequence[str] | None,
        placement: str,
        active_microbatches: int | None,
        activation_checkpointing: bool,
        meta_init: bool,
        memory_limit_gb: float | None,
        check: bool,
        batch_size_fn: Callable[[Any], int] | None,
        split_batch: SplitBatch | None,
        fallback: str,
        communication: Options,
    ) -> PipelineOptions:
        """Check what can be checked before the number of ranks is known. Raises ``ValueError`` with the cure."""
        known = parse(schedule)
        _check_count("pipeline_parallel_size", pipeline_parallel_size, "None for all ranks")
        _check_count("active_microbatches", active_microbatches, "None for no limit")
        if num_microbatches != "auto":
            _check_count("num_microbatches", num_microbatches, "'auto'")
        if stages_per_rank != "auto":
            _check_count("stages_per_rank", stages_per_rank, "'auto'")
        if split is not None and not _is_list_of_names(split):
            raise ValueError(f"split={split!r} has to be a list of names: the first unit of each stage but the first.")
        require_bools(activation_checkpointing=activation_checkpointing, meta_init=meta_init, check=check)
        _check_function("batch_size_fn", batch_size_fn, "the number of rows of a batch, which it is called with")
        _check_function("split_batch", split_batch, "a list of batches, called with a batch and a number")
        if memory_limit_gb is not None and not is_positive(memory_limit_gb):
            raise ValueError(f"memory_limit_gb={memory_limit_gb!r} has to be positive (GiB a rank), or None.")
        _check_fallback(fallback)
        PipelineMesh.of(1, 1, placement)
        return cls(
            pipeline_parallel_size=pipeline_parallel_size,
            num_microbatches=None if isinstance(num_microbatches, str) else num_microbatches,
            schedule=known,
            stages_per_rank=known.default_stages_per_rank if isinstance(stages_per_rank, str) else stages_per_rank,
            split=None if split is None else tuple(split),
            placement=placement,
            active_microbatches=active_microbatches,
            activation_checkpointing=activation_checkpointing,
            meta_init=meta_init,
            memory_limit=None if memory_limit_gb is None else memory_limit_gb * 2**30,
            check=check,
            batch_size_fn=batch_size_fn,
            split_batch=split_batch,
            fallback=fallback,
            communication=communication,
        )

    def grid(self, world_size: int) -> PipelineMesh:
        """The ranks' arrangement, and a last look at what depends on their number. Raises ``ValueError``."""
        grid = PipelineMesh.of(world_size, self.pipeline_parallel_size or world_size, self.placement)
        size = len(grid.pipelines[0])
        if self.num_microbatches is not None and self.num_microbatches > 1:  # 1: for batches that cannot be cut
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


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(name, str) for name in value)


def _check_fallback(fallback: Any) -> None:
    if fallback not in FALLBACKS:
        raise ValueError(
            f"fallback={fallback!r} is unknown. Valid: 'replicate' (a training step that cannot be pipelined runs "
            "as a whole on every rank), 'error' (it is refused)."
        )


def _check_count(name: str, value: Any, otherwise: str) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{name}={value!r} has to be a number from 1, or {otherwise}.")


def _check_function(name: str, value: Any, returns: str) -> None:
    if value is not None and not callable(value):
        raise ValueError(f"{name}={value!r} has to be a function that returns {returns}, or None.")
