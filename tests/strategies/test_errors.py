"""Wrong input, and ranks that differ: a ``ValueError`` on every rank, at once, with the values and the cure."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lightning.fabric.strategies
import lightning.pytorch.strategies
import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader

from lightning_smddp import PipelineStrategy, SMDDPFabricStrategy, SMDDPStrategy
from tests.strategies.grouped import grouped
from tests.strategies.learners import CLASSES, Learner, make_trainer, samples, silent
from tests.strategies.pipeline_learners import Cases


@pytest.mark.parametrize("strategy", [SMDDPStrategy, SMDDPFabricStrategy])
@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"algorithm": "ring"}, ["algorithm='ring'", "'auto', 'native', 'shared_memory', 'hierarchical', 'balanced'"]),
        ({"algorithm": ["native"]}, ["algorithm=['native']", "'auto'"]),
        ({"compression": "zip"}, ["compression='zip'", "None, or one of ('bf16', 'fp16', 'int8', 'powersgd')"]),
        ({"compression": {"method": "powersgd", "rank": 0}}, ["rank=0", "at least 1"]),
        ({"compression": {"method": "int8", "block_size": 0}}, ["block_size=0", "at least 1"]),
        ({"compression": {"method": "int8", "scope": "node"}}, ["'node'", "'inter_node', 'all'"]),
        ({"bucket_cap_mb": 0}, ["bucket_cap_mb=0", "positive"]),
        ({"bucket_cap_mb": float("nan")}, ["bucket_cap_mb=nan", "positive"]),
    ],
    ids=str,
)
def test_arguments(strategy: type, arguments: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ValueError, match=r"\w") as caught:
        strategy(**arguments)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["ddp_comm_hook", "model_averaging_period"])
def test_what_replaces_our_communication_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}` replaces our communication"):
        SMDDPStrategy(**{name: 1})


@pytest.mark.parametrize(
    ("ours", "stock"),
    [
        (SMDDPStrategy, lightning.pytorch.strategies.DDPStrategy),
        (SMDDPFabricStrategy, lightning.fabric.strategies.DDPStrategy),
    ],
)
def test_arguments_by_position_are_those_of_ddp(ours: type, stock: type) -> None:
    """In its order; all of ours are keywords."""
    parameters = inspect.signature(stock.__init__).parameters.values()  # type: ignore[misc]
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"]
    given: dict[str, Any] = {name: object() for name in names}
    given |= {"parallel_devices": [torch.device("cpu")], "timeout": timedelta(seconds=7), "start_method": "fork"}
    given |= dict.fromkeys(("ddp_comm_hook", "model_averaging_period") & given.keys())  # refused
    if "ddp_comm_hook" not in given:
        del given["checkpoint_io"]  # of a type that is looked at
        given = {name: given.get(name) for name in names}
    strategy = ours(*given.values())
    assert strategy._accelerator is given["accelerator"]
    assert strategy.parallel_devices == given["parallel_devices"]
    kept = set(names) - {"accelerator", "parallel_devices", "precision_plugin", "precision", "checkpoint_io"}
    for name in kept:
        assert getattr(strategy, f"_{name}", getattr(strategy, name, None)) is given[name], name
    with pytest.raises(TypeError, match="too many positional arguments"):
        ours(*given.values(), "native")


# ---- found out at fit ----


def strategy_of(name: str, options: dict[str, Any]) -> Any:
    if name == "smddp":
        return silent(**options)
    size = 2 if name == "stages" else 1
    return PipelineStrategy(**grouped(pipeline_parallel_size=size, verbose=False, algorithm="native"))


def fit_error(name: str, options: list[dict[str, Any]], make_model: Callable[[], Any]) -> str:
    """The message of the ``ValueError``, and that it came fast; each rank's options, or those of all."""
    strategy = strategy_of(name, options[int(os.environ["RANK"]) % len(options)])
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"\w") as caught:
        make_trainer(strategy, use_distributed_sampler=False).fit(make_model())
    assert time.monotonic() - start < 30
    return str(caught.value)


class DifferentShape(Learner):
    def configure_model(self) -> None:
        self.net[2] = nn.Linear(16, CLASSES + self.global_rank)


class Complex(Learner):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.ones(3, dtype=torch.complex64), requires_grad=False)  # has no gradient
        self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))


class Uneven(Learner):
    def train_dataloader(self) -> Any:
        return DataLoader(samples(16 + 8 * self.global_rank), batch_size=4)


class Growing(Learner):
    """One rank's loader gets shorter after the first epoch, and is not reloaded."""

    def train_dataloader(self) -> Any:
        data = [samples(8)[:4]] * (6 if self.global_rank else 4)
        loader = DataLoader(data, batch_size=None)
        loader.__class__ = type("Changing", (DataLoader,), {"__len__": lambda _: self.length()})
        return loader

    def length(self) -> int:
        return 4 - (self.current_epoch * self.global_rank)


class OtherRate(Learner):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1 * (1 + self.global_rank))


SHAPES = ["rank 0 has parameter net.2.weight", "(3, 16)", "rank 1 has", "(4, 16)"]
RATES = ["SGD 0, group 0: lr=0.1", "SGD 0, group 0: lr=0.2"]
FIT: list[tuple[str, list[dict[str, Any]], type[Learner], list[str]]] = [
    ("smddp", [{"algorithm": "shared_memory"}], Learner, ["on 2. ", "algorithm='hierarchical'"]),
    ("smddp", [{}], DifferentShape, SHAPES),
    ("stages", [{}], DifferentShape, SHAPES[1:]),
    ("smddp", [{"compression": "int8"}], Complex, ["'phase' is of torch.complex64", "compression=None"]),
    ("smddp", [{"process_group": "a group"}], Learner, ["`process_group`", "DDPStrategy"]),
    ("smddp", [{"device_mesh": "a mesh"}], Learner, ["`device_mesh`", "DDPStrategy"]),
    ("replicas", [{}], Uneven, ["batches in epoch 0 differ", "rank 0 has 4; rank 1 has 6. "]),
    ("smddp", [{}], Growing, ["batches in epoch 1 differ", "rank 0 has 4; rank 1 has 3. ", "limit_train_batches"]),
    ("smddp", [{}], OtherRate, RATES),
    ("stages", [{}], OtherRate, RATES),
    ("smddp", [{"algorithm": "native"}, {"algorithm": "hierarchical"}], Learner, ["rank 1 has", "'hierarchical'"]),
    ("smddp", [{}, {"compression": "int8"}], Learner, ["rank 0 has", "rank 1 has", "None", "method='int8'"]),
]
ON_TWO_NODES = Cases(fit_error, [case[:3] for case in FIT], node_ids=["a", "b"])


@pytest.mark.parametrize("case", FIT, ids=lambda case: f"{case[0]}-{case[1]}-{case[2].__name__}")
def test_fit(case: Any) -> None:
    *arguments, parts = case
    for message in ON_TWO_NODES.results(tuple(arguments)):
        for part in parts:
            assert part in message


# ---- numbers that the launcher contradicts ----


def wrong_numbers(devices: int, fabric: bool) -> str:
    def start() -> None:
        if fabric:
            Fabric(accelerator="cpu", devices=devices, strategy="smddp").launch()
        make_trainer(silent(), devices=devices).fit(Learner())

    with pytest.raises(ValueError, match=f"devices={devices}") as caught:
        start()
    return str(caught.value)


NUMBERS = Cases(wrong_numbers, [(1, False), (4, False), (3, True)])


@pytest.mark.parametrize(("devices", "fabric"), NUMBERS.cases)
def test_a_number_of_ranks_that_torchrun_did_not_start_is_an_error(devices: int, fabric: bool) -> None:
    for message in NUMBERS.results((devices, fabric)):
        assert "does not match the world size (2)" in message


# ---- unknown arguments ----


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: SMDDPStrategy(algoritm="native"), "'algoritm'. Did you mean 'algorithm'. Valid: .*static_graph"),
        (lambda: SMDDPFabricStrategy(resum="auto"), "has no argument 'resum'. .* Valid: .*reliability"),
        (
            lambda: PipelineStrategy(find_unused_parameters=True),
            "PipelineStrategy has no argument 'find_unused_parameters'. Valid",
        ),
    ],
)
def test_an_unknown_argument_is_refused_at_once(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        make()


def test_arguments_of_ddp_and_of_subclasses_are_known() -> None:
    class Own(SMDDPStrategy):
        def __init__(self, mine: int = 0, **kwargs: Any) -> None:
            super().__init__(**kwargs)

    SMDDPStrategy(find_unused_parameters=True, gradient_as_bucket_view=False, start_method="fork")
    Own(1, static_graph=True, timeout=timedelta(seconds=5))
