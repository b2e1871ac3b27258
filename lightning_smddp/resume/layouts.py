"""Where a run goes on in an epoch: in the layout that its checkpoint was saved with, and in another one.

A layout is how many replicas there are, of how many ranks each, and what their loaders do. In the same one all is taken
up as it was. In another one the *global order* of samples is kept where a sampler has one for any number of
replicas: ``DistributedSampler`` deals out one permutation in turn, so what all replicas have used up is its beginning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from lightning_smddp.pipeline.partition.mesh import Groups
from lightning_smddp.resume.random_states import from_plain, to_plain
from lightning_smddp.resume.recorded_loader import Course


@dataclass(frozen=True)
class Place:
    """This rank among the others: ``place`` is in its pipeline, whose ``size`` is 1 without pipelines."""

    replica: int
    place: int
    replicas: int
    size: int

    @classmethod
    def of(cls, groups: Groups) -> Place:
        """That of a rank in pipelines."""
        return cls(groups.replica, groups.pipeline_rank, groups.mesh.num_replicas, groups.pipeline.size())

    @property
    def layout(self) -> dict[str, int]:
        """What has to be equal for an exact continuation."""
        return {"replicas": self.replicas, "size": self.size}


@dataclass(frozen=True)
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
    ahead: int
    cycles: list[bool]
    facts: list[dict[str, Any]]
    courses: list[Course]

    def to_plain(self, place: Place) -> dict[str, Any]:
        """For a checkpoint, of the rank at ``place``."""
        return {
            "replica": place.replica,
            "place": place.place,
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
        shift: by how much this epoch has more batches behind it than in the other layout.
        differs: what is not as it was, in words.
        in_epoch: the same, of the rest of this epoch.
    """

    now: dict[str, Any] | None
    courses: list[Course]
    ahead: int = 0
    cycles: list[bool] = field(default_factory=list)
    shift: int = 0
    differs: list[str] = field(default_factory=list)
    in_epoch: list[str] = field(default_factory=list)


def facts_of(loader: Any) -> dict[str, Any]:
    """What decides which samples are in which batch."""
    return {
        "batch_size": getattr(loader, "batch_size", None),
        "workers": getattr(loader, "num_workers", 0),
        "order": _order_of(loader),
    }


def _order_of(loader: Any) -> dict[str, Any] | None:
    """The order of samples that is the same for any number of replicas, or None if there is none or it is unknown."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    sampler: Any = loader.batch_sampler.sampler if type(loader.batch_sampler) is BatchSampler else None
    if type(sampler) is SequentialSampler:
        return {"shuffle": False, "seed": 0, "length": len(sampler)}
    if type(sampler) is DistributedSampler:
        seed = sampler.seed if sampler.shuffle else 0
        return {"shuffle": sampler.shuffle, "seed": seed, "length": len(sampler.dataset)}  # type: ignore[arg-type]
    return None


def resume_at(
    saved: Mapping[str, Any], place: Place, loaders: Sequence[Any], trained: int, accumulate: int = 1
) -> Resumption:
    """What this rank does with what a checkpoint ``saved``.

    Args:
        saved: the checkpoint's, of all ranks.
        place: of this rank.
        loaders: of this run.
        trained: this epoch's batches before the checkpoint.
        accumulate: batches between optimizer steps, counted from the epoch's first.
    """
    result = _resume_at(saved, place, loaders, trained)
    begun = (trained + result.shift) % accumulate
    if begun:  # Lightning steps after each multiple of `accumulate`, and divides by it
        text = f"the first optimizer step has the gradients of {accumulate - begun} of {accumulate} batches"
        result.in_epoch.append(text)
    return result


def _resume_at(saved: Mapping[str, Any], place: Place, loaders: Sequence[Any], trained: int) -> Resumption:
    facts = [facts_of(loader) for loader in loaders]
    keys = {(rank["replica"], rank["place"]): rank for rank in saved["ranks"]}
    same = place.layout == saved["layout"]
    mine = keys.get((place.replica, place.place if same else 0))
    differs = [] if same else [_describe(saved["layout"], place.layout)]
    differs += [] if mine is None or same else ["random numbers start anew from the seed"]
    if mine is not None and not mine["loaders"]:  # saved between two fits, or the loaders save themselves
        return Resumption(from_plain(mine["now"]) if same else None, [Course() for _ in loaders], differs=differs)
    if mine is None or saved["layout"]["replicas"] != place.replicas or not _same_batches(mine["facts"], facts):
        result = _go_on_in_order(saved, place, loaders, facts, trained)
        result.differs[:0] = differs or [_describe(saved["layout"], place.layout)]
        return result
    courses = [Course.from_plain(course) for course in mine["loaders"]]
    if [fact["workers"] for fact in mine["facts"]] != [fact["workers"] for fact in facts]:
        differs.append("the number of data loader workers, by which random numbers in the dataset go")
    return Resumption(
        from_plain(mine["now"]) if same else None, courses, mine["ahead"], mine["cycles"], differs=differs
    )


def _same_batches(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> bool:
    keys = ("batch_size", "order")
    return [[f[key] for key in keys] for f in one] == [[f[key] for key in keys] for f in other]


def _describe(saved: Mapping[str, int], here: Mapping[str, int]) -> str:
    def text(layout: Mapping[str, int]) -> str:
        return f"{layout['replicas']} replica{'s' * (layout['replicas'] != 1)} of {layout['size']} rank(s)"

    if dict(saved) == dict(here):
        return "other batches than those of the checkpoint"
    return f"{text(here)} instead of {text(saved)}"


def _go_on_in_order(
    saved: Mapping[str, Any], place: Place, loaders: Sequence[Any], facts: Sequence[Mapping[str, Any]], trained: int
) -> Resumption:
    """Leave out in front what all replicas together have used up; else the epoch's samples begin anew."""
    before = saved["ranks"][0]
    orders = [fact["order"] for fact in before["facts"]]
    if len(loaders) != 1 or orders != [facts[0]["order"]] or orders[0] is None:
        courses = [Course() for _ in loaders]
        text = "this epoch's order of samples is another one, so that it may have samples twice or not at all"
        return Resumption(None, courses, in_epoch=[text])
    loader, course, old = loaders[0], before["loaders"][0], saved["layout"]["replicas"]
    used = old * (course["begin"] + course["count"] * before["facts"][0]["batch_size"])
    begin = min(used // place.replicas, len(loader.sampler))
    left = (len(loader.sampler) - begin) / loader.batch_size
    left = math.floor(left) if loader.drop_last else math.ceil(left)
    text = "samples go on in the same global order"
    return Resumption(None, [Course(begin=begin)], shift=len(loader) - left - trained, in_epoch=[text])
