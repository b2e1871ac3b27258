"""Pipelines on 1, 2 and 4 devices, and on 2 x 2: the same training as on one device."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_smddp import Compression
from tests.devices import kinds, on_gpus
from tests.ranks import run_trainer_ranks
from tests.strategies.pipeline_learners import Bench, Case, Matrix, assert_same, name_of
from tests.strategies.test_pipeline_checkpoints import best_and_last, tied
from tests.strategies.test_pipeline_features import TOLERANCE, bf16_mixed, fp16_with_overflow, gpt
from tests.strategies.test_pipeline_memory import Configured
from tests.strategies.test_pipeline_replicas import replicas
from tests.strategies.test_pipeline_schedules import everything, training

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* is not empty:UserWarning"),
    pytest.mark.filterwarnings("ignore:The run is not continued exactly:UserWarning"),  # in another layout
    pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning"),
    pytest.mark.filterwarnings("ignore:It is recommended to use `self.log:UserWarning"),  # right with replicas
]


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


def meta_init(bench: Bench, directory: str) -> Any:
    """Metrics, names of the parameters that this rank has, and whether any rank ever had the whole module."""
    torch.manual_seed(7)
    module, checkpoint = Configured(), ModelCheckpoint(directory)
    trainer = bench.trainer({"meta_init": True}, callbacks=[checkpoint], enable_checkpointing=True, max_epochs=1)
    trainer.fit(module)
    here = [name for name, parameter in module.named_parameters() if not parameter.is_meta]
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, here, module.born_whole


def trained_with_meta_init(directory: str) -> Any:
    return meta_init(Bench({"num_microbatches": 4}), directory)


@pytest.mark.slow
@on_gpus(2)
def test_meta_init(device: str, tmp_path: Path) -> None:
    """Equal to the run with all stages on one rank."""
    files = {ranks: str(tmp_path / str(ranks)) for ranks in (1, 2)}
    ((expected, *_),) = run_trainer_ranks(trained_with_meta_init, 1, files[1])
    results = run_trainer_ranks(trained_with_meta_init, 2, files[2])
    names = [name for _, here, _ in results for name in here]
    assert len(names) == len(set(names)) == 5 * Configured.depth + 2
    for metrics, _, born_whole in results:
        assert not born_whole
        assert_same(metrics, expected)
    one, two = (torch.load(next(Path(files[ranks]).glob("*.ckpt")), weights_only=True) for ranks in (1, 2))
    assert_same(two["state_dict"], one["state_dict"])
