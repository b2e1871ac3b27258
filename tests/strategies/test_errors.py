"""Wrong input is a ``ValueError`` on every rank, at once, with the values and the cure."""

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
from torch import nn

from lightning_smddp import PipelineStrategy, SMDDPFabricStrategy, SMDDPStrategy
from tests.ranks import RanksFailedError, run_trainer_ranks
from tests.strategies.grouped import grouped
from tests.strategies.learners import CLASSES, Learner, make_trainer, silent

CLASSES_OF_BOTH = [SMDDPStrategy, SMDDPFabricStrategy]


@pytest.mark.parametrize("strategy", CLASSES_OF_BOTH)
@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"algorithm": "ring"}, ["algorithm='ring'", "'auto', 'native', 'shared_memory', 'hierarchical', 'balanced'"]),
        ({"algorithm": None}, ["algorithm=None", "'auto'"]),
        ({"algorithm": ["native"]}, ["algorithm=['native']", "'auto'"]),
        ({"compression": "zip"}, ["compression='zip'", "None, 'bf16', 'fp16', 'int8', 'powersgd'"]),
        ({"compression": {"method": "zip"}}, ["'zip'", "'int8'"]),
        ({"compression": {"rank": 2}}, ["{'rank': 2}", "method"]),
        ({"compression": {"method": "int8", "block": 2}}, ["'block': 2", "block_size"]),
        ({"compression": {"method": "powersgd", "rank": 0}}, ["rank=0", "at least 1"]),
        ({"compression": {"method": "int8", "scope": "node"}}, ["'node'", "'inter_node', 'all'"]),
        ({"bucket_cap_mb": 0}, ["bucket_cap_mb=0", "positive", "None"]),
        ({"bucket_cap_mb": float("nan")}, ["bucket_cap_mb=nan", "positive"]),
        ({"bucket_cap_mb": "25"}, ["bucket_cap_mb='25'", "positive"]),
        ({"collective_timeout": 0}, ["collective_timeout=0", "positive", "timedelta"]),
        ({"collective_timeout": float("inf")}, ["collective_timeout=inf", "positive"]),
        ({"collective_timeout": "60"}, ["collective_timeout='60'", "positive"]),
        ({"verbose": "no"}, ["verbose='no'", "True or False"]),
        ({"timeout": "x"}, ["timeout='x'", "timedelta"]),
        ({"accelerator": "native"}, ["accelerator='native'", "write algorithm='native'"]),
    ],
    ids=str,
)
def test_arguments(strategy: type, arguments: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ValueError, match=r"\w") as caught:
        strategy(**grouped(**arguments))
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"check": "no"}, ["check='no'", "True or False"]),
        ({"activation_checkpointing": 1}, ["activation_checkpointing=1", "True or False"]),
        ({"meta_init": "yes"}, ["meta_init='yes'", "True or False"]),
        ({"sharded": "no"}, ["sharded='no'", "True or False"]),
        ({"async_save": None}, ["async_save=None", "True or False"]),
        ({"batch_size_fn": 3}, ["batch_size_fn=3", "function"]),
        ({"memory_limit_gb": "x"}, ["memory_limit_gb='x'", "positive"]),
        ({"timeout": "x"}, ["timeout='x'", "timedelta"]),
    ],
    ids=str,
)
def test_arguments_of_a_pipeline(arguments: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ValueError, match=r"\w") as caught:
        PipelineStrategy(**grouped(**arguments))
    for part in parts:
        assert part in str(caught.value)


def test_unknown_arguments_of_a_pipeline_are_named_with_its_public_name() -> None:
    with pytest.raises(TypeError, match="PipelineStrategy has no argument 'scedule'. Did you mean 'schedule'"):
        PipelineStrategy(scedule="gpipe")
    with pytest.raises(TypeError, match="PipelineStrategy has no argument 'find_unused_parameters'. It is Distrib"):
        PipelineStrategy(find_unused_parameters=True)


@pytest.mark.parametrize("arguments", [{"algorithm": "native"}, {"compression": "int8"}], ids=str)
def test_a_hook_and_our_communication(arguments: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="Give either the hook or these") as caught:
        SMDDPStrategy(ddp_comm_hook=lambda state, bucket: None, **arguments)
    ((name, value),) = arguments.items()
    assert f"{name}={value!r}" in str(caught.value)


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


def fit_error(make_strategy: Callable[..., Any], arguments: dict[str, Any], make_model: Callable[[], Any]) -> str:
    """The message of the ``ValueError``, and that it came fast."""
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"\w") as caught:
        make_trainer(make_strategy(**arguments)).fit(make_model())
    assert time.monotonic() - start < 5
    return str(caught.value)


class Frozen(Learner):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class FrozenOnRankOne(Learner):
    def setup(self, stage: str) -> None:
        self.requires_grad_(self.global_rank == 0)


class DifferentShape(Learner):
    def configure_model(self) -> None:
        self.net[2] = nn.Linear(16, CLASSES + self.global_rank)


class OneMore(Learner):
    def configure_model(self) -> None:
        if self.global_rank == 1:
            self.extra = nn.Linear(2, 2)


class DifferentType(Learner):
    def configure_model(self) -> None:
        if self.global_rank == 1:
            self.net[0].double()


class Complex(Learner):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))


@pytest.mark.parametrize(
    ("arguments", "model", "nodes", "parts"),
    [
        ({"algorithm": "shared_memory"}, Learner, True, ["on 2 (a, b)", "algorithm='hierarchical'"]),
        ({}, Frozen, False, ["Frozen has no parameter that requires a gradient (4", "Unfreeze"]),
        ({}, FrozenOnRankOne, False, ["parameter net.0.weight", "frozen"]),
        ({}, DifferentShape, True, ["rank 0 (host ", "has parameter ", "(3, 16)", "rank 1 (host ", "(4, 16)"]),
        ({}, OneMore, False, ["has nothing more", "parameter extra.weight"]),
        ({}, DifferentType, False, ["net.0.weight", "torch.float32", "torch.float64"]),
        ({"compression": "int8"}, Complex, True, ["'phase'", "torch.complex64", "compression=None"]),
        ({"process_group": "a group"}, Learner, False, ["`process_group`", "DDPStrategy"]),
        ({"device_mesh": "a mesh"}, Learner, False, ["`device_mesh`", "DDPStrategy"]),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_fit(arguments: dict[str, Any], model: type[Learner], nodes: bool, parts: list[str]) -> None:
    node_ids = ["a", "b"] if nodes else None
    messages = run_trainer_ranks(fit_error, 2, silent, arguments, model, node_ids=node_ids)
    for message in messages:
        for part in parts:
            assert part in message


def by_rank(*arguments: dict[str, Any]) -> Any:
    return silent(**arguments[int(os.environ["RANK"])])


def options_error(arguments: list[dict[str, Any]]) -> str:
    return fit_error(lambda: by_rank(*arguments), {}, Learner)


@pytest.mark.parametrize(
    ("first", "second", "parts"),
    [
        ({"algorithm": "native"}, {"algorithm": "shared_memory"}, ["algorithm='native'", "algorithm='shared_memory'"]),
        ({}, {"compression": "int8"}, ["None", "method='int8'"]),
        ({"bucket_cap_mb": 1}, {"bucket_cap_mb": 2}, ["bucket_cap_mb=1;", "bucket_cap_mb=2."]),
    ],
    ids=["algorithm", "compression", "bucket_cap_mb"],
)
def test_options_that_differ_between_ranks(first: dict[str, Any], second: dict[str, Any], parts: list[str]) -> None:
    for message in run_trainer_ranks(options_error, 2, [first, second]):
        for part in ("rank 0 (", "rank 1 (", *parts):
            assert part in message


def set_up_with_too_many_devices(fabric: bool) -> None:
    if fabric:
        from lightning.fabric import Fabric

        Fabric(accelerator="cpu", devices=3, strategy="smddp").launch()
    else:
        make_trainer("smddp", devices=3).fit(Learner())


@pytest.mark.parametrize("fabric", [False, True])
def test_devices_that_contradict_the_launcher(fabric: bool) -> None:
    with pytest.raises(RanksFailedError) as caught:
        run_trainer_ranks(set_up_with_too_many_devices, 2, fabric)
    assert sorted(caught.value.tracebacks) == [0, 1]
    assert caught.value.hung == {}
    for text in caught.value.tracebacks.values():
        assert "ValueError" in text
        assert "devices=3" in text


def test_the_strategys_own_check_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning looks at the whole world only."""
    from lightning_smddp.strategies.session import check_devices

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    check_devices(2, creates_processes_externally=True)
    check_devices(4, creates_processes_externally=False)
    with pytest.raises(ValueError, match="devices=4") as caught:
        check_devices(4, creates_processes_externally=True)
    for part in ("LOCAL_WORLD_SIZE=2", "Set devices=2", "--nproc-per-node=4"):
        assert part in str(caught.value)


# ---- unknown arguments ----


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: SMDDPStrategy(algoritm="native"),
            "no argument 'algoritm'. Did you mean 'algorithm'?",
        ),
        (lambda: SMDDPStrategy(static_graf=True), "Did you mean 'static_graph'?"),
        (
            lambda: SMDDPFabricStrategy(resume="auto"),
            "has no argument 'resume'. Valid: .*reliability",
        ),
        (
            lambda: SMDDPStrategy(colective_timeout=9),
            r"Did you mean communication=CommunicationOptions\(collective_timeout=...\)\?",
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


# ---- numbers that the launcher contradicts ----


def wrong_numbers(devices: int) -> str:
    with pytest.raises(ValueError, match="torchrun") as caught:
        make_trainer(silent(), devices=devices).fit(Learner())
    return str(caught.value)


@pytest.mark.parametrize("devices", [1, 4])
def test_a_number_of_ranks_that_torchrun_did_not_start_has_a_cure(devices: int) -> None:
    for message in run_trainer_ranks(wrong_numbers, 2, devices):
        assert "torchrun started 2 ranks" in message
        assert f"num_nodes=1 and devices={devices} ask for {devices}" in message
        assert f"torchrun --nnodes=1 --nproc-per-node={devices}" in message
