"""Where a run goes on in an epoch: in the layout that its checkpoint was saved with, and in another one.

A layout is how many replicas there are, of how many ranks each, and what their loaders do. In the same one all is taken
up as it was. With other replicas or batches the epoch's data begin anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_smddp.pipeline.mesh import Groups
from lightning_smddp.resume.random_states import from_plain, to_plain
from lightning_smddp.resume.recorded_loader import Course
from lightning_smddp.wording import counted


@dataclass(frozen=True)
class LayoutRank:
    """This rank among the others.

    Attributes:
        replica: of the model, and so of the data.
        pipeline_rank: in the replica's pipeline; 0 without pipelines.
        replicas: how many there are.
        size: of a pipeline; 1 without.
    """

    replica: int
    pipeline_rank: int
    replicas: int
    size: int

    @classmethod
    def of(cls, groups: Groups) -> LayoutRank:
        """That of a rank in pipelines."""
        return cls(
            replica=groups.replica,
            pipeline_rank=groups.pipeline_rank,
            replicas=groups.mesh.num_replicas,
            size=groups.pipeline.size(),
        )

    @property
    def layout(self) -> dict[str, int]:
        """What has to be equal for an exact continuation."""
        return {"replicas": self.replicas, "size": self.size}


@dataclass
class Position:
    """Where a rank is in an epoch.

    Attributes:
        trained: batches of the epoch that are behind it.
        now: random states.
        ahead: batches that were fetched before they are needed.
        cycles: see :func:`lightning_smddp._compat.loops.cycles`.
        facts: of each loader, see :func:`facts_of`.
        courses: of each loader.
    """

    trained: int
    now: dict[str, Any]
    ahead: int = 0
    cycles: list[bool] = field(default_factory=list)
    facts: list[dict[str, Any]] = field(default_factory=list)
    courses: list[Course] = field(default_factory=list)

    def to_plain(self, rank: LayoutRank) -> dict[str, Any]:
        """What a checkpoint says about ``rank``."""
        return {
            "replica": rank.replica,
            "place": rank.pipeline_rank,
            "seed": torch.initial_seed(),
            "now": to_plain(self.now),
            "ahead": self.ahead,
            "cycles": self.cycles,
            "facts": self.facts,
            "loaders": [course.to_plain() for course in self.courses],
        }


@dataclass
class Resumption:
    """What a rank does at the start of a resumed run.

    Attributes:
        now: random states at the time of the checkpoint; None: they start anew.
        courses: of each loader.
        ahead: batches that had been fetched before they were needed.
        cycles: see :func:`lightning_smddp._compat.loops.cycles`.
        differs: what is not as it was, in words.
        in_epoch: the same, of the rest of this epoch.
    """

    now: dict[str, Any] | None
    courses: list[Course]
    ahead: int = 0
    cycles: list[bool] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)
    in_epoch: list[str] = field(default_factory=list)


def facts_of(loader: Any) -> dict[str, Any]:
    """What decides which samples are in which batch, and which random numbers the dataset draws."""
    return {
        "batch_size": getattr(loader, "batch_size", None),
        "workers": getattr(loader, "num_workers", 0),
    }


def resume_at(
    saved: Mapping[str, Any], rank: LayoutRank, loaders: Sequence[Any], trained: int, accumulate: int = 1
) -> Resumption:
    """What this rank does with what a checkpoint ``saved``.

    Args:
        saved: the checkpoint's, of all ranks.
        rank: this one.
        loaders: of this run.
        trained: this epoch's batches before the checkpoint.
        accumulate: batches between optimizer steps, counted from the epoch's first.
    """
    # Three cases. The same layout: this rank goes on with its own random numbers and data. Another one, but the same
    # batches: it goes on with the data, and random numbers start anew. Other batches: the epoch's data begin anew too.
    same_layout = rank.layout == saved["layout"]
    pipeline_rank = rank.pipeline_rank
    if not same_layout:
        pipeline_rank = 0  # every pipeline has one; what matters is the data, which all ranks of a replica have
    found = _rank_in(saved, rank.replica, pipeline_rank)
    facts = [facts_of(loader) for loader in loaders]
    result = Resumption(None, [Course() for _ in loaders])
    if not same_layout:
        now, before = _in_words(rank.layout), _in_words(saved["layout"])
        result.differs.append(f"{now} instead of {before}")
        result.differs.append("random numbers start anew from the seed")
    if found is None or not _has_same_batches(saved, found, rank, facts):
        result.in_epoch.append(
            "this epoch's order of samples is another one, so that it may have samples twice or not at all"
        )
        if same_layout:
            result.differs.append("other batches than those of the checkpoint")
    else:
        if same_layout:
            result.now = from_plain(found["now"])
        if found["loaders"]:  # else it was saved between two fits, or the loaders save themselves
            result.courses = [Course.from_plain(course) for course in found["loaders"]]
            result.ahead = found["ahead"]
            result.cycles = found["cycles"]
            if _each(found["facts"], "workers") != _each(facts, "workers"):
                result.differs.append("the number of data loader workers, by which random numbers in the dataset go")
    begun = trained % accumulate
    if begun:  # Lightning steps after each multiple of `accumulate`, and divides by it
        text = f"the first optimizer step has the gradients of {accumulate - begun} of {accumulate} batches"
        result.in_epoch.append(text)
    return result


def _rank_in(saved: Mapping[str, Any], replica: int, pipeline_rank: int) -> Mapping[str, Any] | None:
    for found in saved["ranks"]:
        if found["replica"] == replica and found["place"] == pipeline_rank:
            return dict(found)
    return None


def _has_same_batches(
    saved: Mapping[str, Any], found: Mapping[str, Any], rank: LayoutRank, facts: Sequence[Mapping[str, Any]]
) -> bool:
    """Whether this run's loaders give the samples that those of the checkpoint gave, in the same batches."""
    if not found["loaders"]:
        return True
    if saved["layout"]["replicas"] != rank.replicas:
        return False
    for course in found["loaders"]:
        if course.get("begin"):  # an earlier version had left samples out in front
            return False
    return _each(found["facts"], "batch_size") == _each(facts, "batch_size")


def _each(facts: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    return [fact[key] for fact in facts]


def _in_words(layout: Mapping[str, int]) -> str:
    return f"{counted(layout['replicas'], 'replica')} of {layout['size']} rank(s)"
