"""Pipelines on 1, 2 and 4 devices, and on 2 x 2: the same training as on one device."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smddp import Compression
from tests.devices import kinds, on_gpus
from tests.ranks import run_trainer_ranks
from tests.strategies.learners import IN_ANOTHER_LAYOUT, RESUMING
from tests.strategies.pipeline_learners import Case, Matrix, assert_same, name_of
from tests.strategies.test_pipeline_checkpoints import best_and_last, tied
from tests.strategies.test_pipeline_features import TOLERANCE, bf16_mixed, fp16_with_overflow, gpt
from tests.strategies.test_pipeline_memory import assert_in_parts, saved
from tests.strategies.test_pipeline_replicas import replicas
from tests.strategies.test_pipeline_schedules import everything, training

pytestmark = [*RESUMING, IN_ANOTHER_LAYOUT]


def schedule(name: str, **options: Any) -> Case:
    """All four steps, before and after training; the last batch of each loader is smaller."""
    return functools.partial(everything, options={"schedule": name, **options})


# What `make test` runs on simulated devices is what devices make different; the CPU has tests of its own of the rest,
# which is `exhaustive` here.
SCHEDULES = [schedule("1f1b", activation_checkpointing=True)]
OTHER_SCHEDULES = [
    *(schedule("1f1b"), training("interleaved_zero_bubble")),
    *map(training, ("dualpipev", "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "zbv_zero_bubble")),
]
OPTIMIZATION = [fp16_with_overflow]  # which clips
OTHER_OPTIMIZATION = [bf16_mixed, gpt]
CHECKPOINTS = [best_and_last, tied]  # in `make test`: tests/gpu/test_data_parallel.py
SPLITS = [training("interleaved_1f1b", num_microbatches=4), training("1f1b"), training("dualpipev")]
REPLICAS = [
    replicas(),
    replicas({"schedule": "interleaved_zero_bubble"}, accumulate_grad_batches=2, gradient_clip_val=0.1),
]
COMPRESSED = replicas({"algorithm": "balanced", "compression": Compression("bf16", scope="all")})
SPREAD = [
    replicas({"placement": "spread", "algorithm": "hierarchical", "schedule": "interleaved_zero_bubble"}),
    replicas({"placement": "spread", "algorithm": "hierarchical"}),
    COMPRESSED,
]
SLOW, REST = pytest.mark.slow, pytest.mark.exhaustive
RUNS = [
    (Matrix([training("1f1b"), training("zbv_zero_bubble"), fp16_with_overflow], 1), REST),
    (Matrix([*SCHEDULES, *OPTIMIZATION], 2, timeout=110), SLOW),
    *((Matrix(cases, 2, timeout=110), REST) for cases in (OTHER_SCHEDULES, OTHER_OPTIMIZATION, CHECKPOINTS)),
    *((Matrix(cases, 4, timeout=110), REST) for cases in (SPLITS, REPLICAS)),
    (Matrix(SPREAD[:1], 4, timeout=110, node_ids=list("aabb")), SLOW),
    (Matrix([training("1f1b"), *SPREAD[1:]], 4, timeout=110, node_ids=list("aabb")), REST),
]
TOLERANCES = {**TOLERANCE, COMPRESSED: 0.05}


@pytest.mark.parametrize(
    ("matrix", "case", "device"),
    [
        pytest.param(matrix, case, kind, marks=[mark, when], id=f"{matrix.ranks}-{name_of(case)}-{kind}")
        for matrix, when in RUNS
        for case in matrix.cases
        for kind, mark in kinds(matrix.ranks).items()
    ],
)
def test_the_same_training(matrix: Matrix, case: Case, device: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    nodes = len(set(matrix.node_ids or ["here"]))
    directory = tmp_path_factory.getbasetemp() / f"{matrix.ranks}-{nodes}"
    matrix.compare(case, str(directory), TOLERANCES.get(case, 1e-5))


@pytest.mark.slow
@on_gpus(2)
def test_meta_init(device: str, tmp_path: Path) -> None:
    """Equal to the run with all stages on one rank."""
    options = {"meta_init": True}, {"max_epochs": 1}
    [(expected, _, _, one)] = run_trainer_ranks(saved, 1, str(tmp_path / "one"), *options)
    results = run_trainer_ranks(saved, 2, str(tmp_path / "two"), *options)
    assert_in_parts(results)
    for metrics, *_ in results:
        assert_same(metrics, expected)
    states = [torch.load(path, weights_only=True)["state_dict"] for path in (results[0][3], one)]
    assert_same(*states)
