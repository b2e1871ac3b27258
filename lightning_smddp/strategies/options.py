"""Options as users give them: arguments of strategies; the groups ``communication``, ``reliability``, ``partition``.

A group is checked where it is made and keeps what the user wrote; what follows from that are its properties. Messages
of checks hold the value, the valid ones, and what to write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import timedelta
from difflib import get_close_matches
from inspect import signature
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar, get_args

from lightning_smddp.communication.algorithms import NAMES, AlgorithmName
from lightning_smddp.communication.compression import Compression, Method
from lightning_smddp.pipeline.activations import CHECKPOINTING, Checkpointing
from lightning_smddp.pipeline.mesh import PipelineMesh
from lightning_smddp.pipeline.partition.microbatches import SplitBatch
from lightning_smddp.pipeline.runtime.schedules import Schedule, check

_Group = TypeVar("_Group")

OnNonfinite: TypeAlias = Literal["error", "skip", "ignore"]
Resume: TypeAlias = Literal["auto", "never"] | None
Shard: TypeAlias = Literal["optimizer"] | None
Uneven: TypeAlias = Literal["stop", "join"] | None
LossWeightOption: TypeAlias = str | Callable[[Any], Any]
"""``"auto"``, ``"rows"``, ``"labels"``, ``"shifted_labels"``, ``"sum"``, the name of a batch entry, or a function."""

# ---- values ----


def require_one_of(valid: Sequence[object], **values: object) -> None:
    """Raise ``ValueError`` unless each option has one of the ``valid`` values."""
    for name, value in values.items():
        if value not in valid:
            raise ValueError(f"{name}={value!r} is unknown. Valid: {', '.join(map(repr, valid))}.")


def require_positive(name: str, value: Any, unit: str) -> None:
    """Raise ``ValueError`` unless the option ``name`` is a finite number above 0."""
    if not 0 < value < float("inf"):
        raise ValueError(f"{name}={value!r} has to be positive ({unit}).")


def require_no_string(name: str, value: object) -> None:
    """Raise ``ValueError`` if the option ``name``, a list of names, is one name: Python would take its letters."""
    if isinstance(value, str):
        raise ValueError(f"{name}={value!r} has to be a list: write {name}=[{value!r}].")


def require_count(name: str, value: object, otherwise: str) -> None:
    """Raise ``ValueError`` unless the option ``name`` is a number from 1, or None, which ``otherwise`` is."""
    if value is not None and (not isinstance(value, int) or value < 1):
        raise ValueError(f"{name}={value!r} has to be a number from 1, or {otherwise}.")


def require_bools(options: Any) -> None:
    """Raise ``ValueError`` where an option that is on or off is a text: ``"false"`` would be on."""
    for field in fields(options):
        if field.type == "bool":
            require_one_of((False, True), **{field.name: getattr(options, field.name)})


def duration(name: str, value: Any) -> timedelta | None:
    """``value`` of the option ``name``, in seconds or as a timedelta. Raises ``ValueError`` unless it is positive."""
    if value is None:
        return None
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    require_positive(name, seconds, "seconds or a timedelta")
    return value if isinstance(value, timedelta) else timedelta(seconds=seconds)


# ---- groups of options ----


def group_of(kind: type[_Group], value: _Group | Mapping[str, Any]) -> _Group:
    """A group of options, which may be given as its arguments in a dict."""
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise TypeError(f"{value!r} is not {kind.__name__}(...), nor a dict of its arguments.")
    _require_known(kind, value)
    return kind(**value)


# ---- arguments of strategies ----


def by_name(
    strategy: Any, init: Callable[..., None], args: Sequence[Any], kwargs: Mapping[str, Any], known: Iterable[str]
) -> dict[str, Any]:
    """All arguments for Lightning's ``init``, by name, and others that are ``known`` beside those of ``strategy``.

    Raises:
        TypeError: as a call would, and for arguments that are not known.
        ValueError: the backend is AWS's.
    """
    _require_known(type(strategy), kwargs, known)
    # `DDPStrategy` takes most by name, and the arguments of `DistributedDataParallel` as its `**kwargs`.
    given = dict(signature(init).bind_partial(*args, **kwargs).arguments)
    given |= given.pop("kwargs", {})
    _require_known(type(strategy), given, known)
    if "timeout" in given:
        given["timeout"] = duration("timeout", given["timeout"])
    backend = given.get("process_group_backend")
    if backend == "smddp":
        raise ValueError("process_group_backend='smddp' is of AWS's closed library, which is not used: leave it out.")
    return {**given, "process_group_backend": None} if backend == "auto" else given  # None is Lightning's word for it


def _require_known(taker: type[Any], given: Iterable[str], known: Iterable[str] = ()) -> None:
    own = signature(taker.__init__).parameters
    valid = {*known, *arguments_of(taker)}
    for name in sorted(set(given) - valid):
        hint = f"Valid: {', '.join(sorted(valid))}."
        close = get_close_matches(name, valid, 1, cutoff=0.75)
        if close:
            hint = f"Did you mean {close[0]!r}? {hint}"
        for group, parameter in own.items():
            kind = type(parameter.default)
            if is_dataclass(kind) and name in arguments_of(kind):
                hint = f"Write {group}={kind.__name__}({name}=...)."
        raise TypeError(f"{taker.__name__} has no argument {name!r}. {hint}")


def arguments_of(*classes: type[Any]) -> set[str]:
    """Names of all arguments in the signatures of ``classes``."""
    found = {name for cls in classes for name in signature(cls.__init__).parameters}
    return found - {"self", "args", "kwargs", "module"}


def popped(given: dict[str, Any], *names: str) -> dict[str, Any]:
    """Those of ``given`` that have one of ``names``, taken out."""
    return {name: given.pop(name) for name in names if name in given}


class FromDDP(TypedDict, total=False):
    """Arguments of Lightning's ``DDPStrategy`` that strategies of other classes have as well, by name."""

    accelerator: Any
    parallel_devices: Any
    cluster_environment: Any
    checkpoint_io: Any
    precision_plugin: Any
    process_group_backend: str | None
    timeout: float | timedelta | None
    start_method: Literal["popen", "spawn", "fork", "forkserver"]


@dataclass(frozen=True)
class CommunicationOptions:
    """How ranks work together on gradients, beside ``algorithm`` and ``compression``.

    Args:
        collective_timeout: how long a rank waits for the others in a collective, in seconds or as a timedelta; None
            is DDP's ``timeout``, which also bounds the start.
        verbose: print a table at the start of fit and a report at its end.
        loss_weight: how much a rank's batch counts in the gradient, as of ``PipelineStrategy``: ``"rows"``,
            ``"labels"``, ``"shifted_labels"``, ``"sum"``, the name of an entry of the batch, or a function of the
            batch; None: all batches count alike, as with ``DDPStrategy``.
        uneven: when ranks have unequal numbers of batches: ``"stop"`` ends the epoch for all where the first one's data
            ends; ``"join"`` goes on with the mean over those that have data; None is an error.

    Raises:
        ValueError: a value is none of the valid ones, which the message lists.
    """

    collective_timeout: float | timedelta | None = None
    verbose: bool = True
    loss_weight: LossWeightOption | None = None
    uneven: Uneven = None

    def __post_init__(self) -> None:
        require_bools(self)
        require_one_of(("stop", "join", None), uneven=self.uneven)
        if self.loss_weight == "auto":
            raise ValueError("loss_weight='auto' is for pipelines. Leave it out, or say how batches count.")
        duration("collective_timeout", self.collective_timeout)

    @property
    def limit(self) -> timedelta | None:
        """``collective_timeout`` as a timedelta; None is left to DDP's ``timeout``."""
        return duration("collective_timeout", self.collective_timeout)


@dataclass(frozen=True)
class ReliabilityOptions:
    """Faults, stops and checkpoints.

    Args:
        init_timeout: how long ranks wait for each other at the start, in seconds or as a timedelta; None is 10
            minutes, or DDP's ``timeout`` if that is less.
        stop_grace: seconds, or a timedelta, from SIGTERM to the end of the process, checkpoint included.
        on_nonfinite: when a gradient is NaN or infinite on any rank: ``"error"`` names step, parameter and,
            where it can be known, rank, ``"skip"`` leaves this step out on all ranks, ``"ignore"`` does not look.
        async_save: write checkpoints in the background, from a copy in host memory.
        sharded: save a directory with a file of each rank, instead of one file gathered on rank 0.

    Raises:
        ValueError: a value is none of the valid ones, which the message lists.
    """

    init_timeout: float | timedelta | None = None
    stop_grace: float | timedelta = 90.0
    on_nonfinite: OnNonfinite = "error"
    async_save: bool = False
    sharded: bool = False

    def __post_init__(self) -> None:
        require_bools(self)
        require_one_of(get_args(OnNonfinite), on_nonfinite=self.on_nonfinite)
        duration("init_timeout", self.init_timeout)
        if duration("stop_grace", self.stop_grace) is None:
            raise ValueError("stop_grace=None has to be seconds or a timedelta.")

    @property
    def start_limit(self) -> timedelta | None:
        """``init_timeout`` as a timedelta; None is left to ``rendezvous.start_limit``."""
        return duration("init_timeout", self.init_timeout)

    @property
    def stop_limit_s(self) -> float:
        """Seconds from a request to stop to the end of the process, and for a user's own ``on_exception``."""
        grace = self.stop_grace
        return grace.total_seconds() if isinstance(grace, timedelta) else grace


@dataclass(frozen=True)
class StrategyOptions:
    """What users give to any strategy.

    Attributes:
        communication, reliability: groups.
        algorithm: by which gradients are averaged: a name, or ``"auto"``.
        compression: of gradients; None is exact.
        bucket_cap_mb: MiB; None is DDP's default.
        resume: in a ``fit`` that is given no checkpoint.
        shard: what else than batches ranks have shares of.

    Raises:
        ValueError: a value is none of the valid ones, which the message lists.
    """

    communication: CommunicationOptions
    reliability: ReliabilityOptions
    algorithm: str = "auto"
    compression: Compression | None = None
    bucket_cap_mb: float | None = None
    resume: Resume = None
    shard: Shard = None

    def __post_init__(self) -> None:
        require_one_of(NAMES, algorithm=self.algorithm)
        require_one_of(("auto", "never", None), resume=self.resume)
        require_one_of(("optimizer", None), shard=self.shard)
        is_low_rank = self.compression is not None and self.compression.method == "powersgd"
        if is_low_rank and self.algorithm not in ("auto", "native"):
            raise ValueError(f"algorithm={self.algorithm!r} cannot be used with compression='powersgd': leave it out.")
        if self.bucket_cap_mb is not None:
            require_positive("bucket_cap_mb", self.bucket_cap_mb, "MiB")

    @classmethod
    def of(cls, communication: Any, reliability: Any, compression: Any = None, **others: Any) -> StrategyOptions:
        """From what users write: groups as dicts, ``compression`` as a name, too."""
        return cls(
            group_of(CommunicationOptions, communication),
            group_of(ReliabilityOptions, reliability),
            compression=Compression.parse(compression),
            **others,
        )


# ---- pipelines ----


class OfPipeline(FromDDP, total=False):
    """Arguments of a pipeline beside those in its signature."""

    activation_checkpointing: Checkpointing
    meta_init: bool
    algorithm: AlgorithmName
    compression: Method | Compression | None
    bucket_cap_mb: float | None
    resume: Resume
    shard: Shard


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
        split_batch: called with a batch and a number of micro-batches, returns them as a list of pairs of a batch and
            its number of rows; None asks the module's method of this name, if it has one.

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
        require_bools(self)
        if self.stages_per_rank != "auto":
            require_count("stages_per_rank", self.stages_per_rank, "'auto'")
        PipelineMesh.of(1, 1, self.placement)
        if self.memory_limit_gb is not None:
            require_positive("memory_limit_gb", self.memory_limit_gb, "GiB a rank")


@dataclass(frozen=True)
class PipelineOptions:
    """All options of a pipeline: arguments of ``PipelineStrategy``, see there for their meaning, and its groups.

    Attributes:
        num_microbatches: None is ``"auto"``.
        strategy: what all strategies have; replicas average gradients and share optimizers by it.

    Raises:
        ValueError: a value is none of the valid ones, which the message lists.
    """

    pipeline_parallel_size: int | None
    num_microbatches: int | None
    schedule: Schedule
    split: Sequence[str] | None
    loss_weight: LossWeightOption
    partition: PartitionOptions
    strategy: StrategyOptions
    activation_checkpointing: Checkpointing = False
    meta_init: bool = False

    def __post_init__(self) -> None:
        require_bools(self)
        require_one_of(CHECKPOINTING, activation_checkpointing=self.activation_checkpointing)
        require_count("pipeline_parallel_size", self.pipeline_parallel_size, "None for all ranks")
        require_count("num_microbatches", self.num_microbatches, "'auto'")
        require_no_string("split", self.split)
        if self.strategy.communication.loss_weight is not None:
            raise ValueError("A pipeline weighs micro-batches: write PipelineStrategy(loss_weight=...) instead.")
        if self.strategy.communication.uneven == "join":
            raise ValueError("uneven='join' is not for pipelines: their replicas have one loss. Use uneven='stop'.")

    @property
    def stages_per_rank(self) -> int:
        """As given, or as the schedule has it."""
        given = self.partition.stages_per_rank
        return self.schedule.default_stages_per_rank if isinstance(given, str) else given

    def grid(self, world_size: int) -> PipelineMesh:
        """The ranks' arrangement, and a last look at what depends on their number. Raises ``ValueError``."""
        grid = PipelineMesh.of(world_size, self.pipeline_parallel_size or world_size, self.partition.placement)
        size = len(grid.pipelines[0])
        check(self.schedule, size, self.stages_per_rank, self.num_microbatches)
        stages = size * self.stages_per_rank
        if self.split is not None and len(self.split) != stages - 1:
            raise ValueError(
                f"split={self.split!r} makes {len(self.split) + 1} stages, but there are {stages}. List the first unit "
                "of each stage but the first."
            )
        return grid
