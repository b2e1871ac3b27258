"""NaN and inf in gradients: named on every rank, and the step not taken, or left out, under both strategies."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_smddp.communication.nonfinite import NonFiniteGradientError
from lightning_smddp.communication.objects import RankFailedError
from tests.strategies.grouped import grouped
from tests.strategies.learners import Learner, make_trainer, samples
from tests.strategies.pipeline_learners import Cases, call
from tests.strategies.test_transparency import Manual

BAD_STEP = 1
ALL = -1  # ranks
EPOCH = {"max_epochs": 1}
COMMON = {"verbose": False, "algorithm": "native"}


class Spoiler(Learner):
    """On one rank, or on all, in one step, one parameter's gradient is not finite, or too large; the loss is."""

    def __init__(self, rank: int, value: float) -> None:
        super().__init__()
        self.rank, self.value = rank, value

    def on_fit_start(self) -> None:
        self.net[2].bias.register_hook(self.spoil)

    def train_dataloader(self) -> Any:
        data = samples(self.count)
        sampler: Any = DistributedSampler(data, shuffle=False, **self.trainer.distributed_sampler_kwargs)
        return DataLoader(data, batch_size=self.batch_size, sampler=sampler)

    def spoil(self, gradient: Tensor) -> Tensor:
        trainer = self.trainer
        if trainer.global_step == BAD_STEP and self.rank in (self.global_rank, ALL):
            gradient = gradient.clone()
            gradient[1] = self.value
        return gradient


class Seeing(Spoiler):
    """As users do to look at gradients; they see what ``ddp`` shows, also in the step that is left out."""

    bad_steps = 0

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        self.bad_steps += not all(bool(gradient.isfinite().all()) for gradient in gradients)


def strategy_of(name: str, **options: Any) -> Any:
    from lightning_smddp import PipelineStrategy, SMDDPStrategy

    if name == "smddp":
        return SMDDPStrategy(**grouped(**{**COMMON, **options}))
    return PipelineStrategy(**grouped(check=False, **{**COMMON, **options}))


def fails(name: str, options: dict[str, Any], rank: int, value: float, trainer_options: dict[str, Any]) -> Any:
    model = Spoiler(rank, value)
    trainer = make_trainer(strategy_of(name, **options), **EPOCH, **trainer_options)
    with pytest.raises((NonFiniteGradientError, RankFailedError)) as caught:
        trainer.fit(model)
    weights = [p for p in model.parameters() if not p.is_meta]
    assert weights
    assert all(bool(p.isfinite().all()) for p in weights)
    return str(caught.value), trainer.global_step


NAN = float("nan")
NAMES = Cases(
    fails,
    [
        ("smddp", {"algorithm": "shared_memory"}, 0, float("-inf"), {}),
        ("smddp", {"algorithm": "shared_memory"}, ALL, float("inf"), {}),
        ("smddp", {"algorithm": "shared_memory"}, ALL, 3e38, {}),  # whose sum is too large: no rank brought that
        ("smddp", {}, 1, NAN, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}),
        ("smddp", {"gradient_as_bucket_view": False}, 1, float("inf"), {"accumulate_grad_batches": 2}),
    ],
)


@pytest.mark.parametrize("case", NAMES.cases, ids=["one", "all", "overflow", "native", "accumulating"])
def test_smddp_names_step_and_parameter_and_through_shared_memory_the_rank(case: Any) -> None:
    _, options, rank, value, _ = case
    results = NAMES.results(case)
    message, step = results[0]
    assert results == [(message, step)] * 2
    assert step == BAD_STEP
    kind = "nan" if value != value else "inf"
    assert f"step {BAD_STEP} (epoch 0, batch " in message
    assert f"in the averages net.2.bias ({kind} in 1 of 3 elements)" in message
    named = [other for other in range(2) if f"on rank {other} (host " in message]
    bad = [other for other in range(2) if rank in (other, ALL)]
    assert named == (bad if "algorithm" in options and value != 3e38 else [])
    assert message.count(f"net.2.bias ({kind} in 1 of 3 elements)") == len(named) + 1
    assert "\n" not in message


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 1], ids=["stages", "replicas"])
def test_a_pipeline_names_rank_step_and_parameter(size: int) -> None:
    """The last stage is on rank 1; of two replicas of one stage, rank 1 is the second."""
    (heard, _), (message, step) = SLOW.results(fails_in_pipeline(size))
    assert step == BAD_STEP
    assert heard == message if size == 1 else f"at step {BAD_STEP} (optimizer): NonFiniteGradientError: " in heard
    for text in (heard, message):
        assert f"step {BAD_STEP} (epoch 0, batch " in text
        assert "on rank 1 (host" in text
        assert "on rank 0" not in text
        assert "net.2.bias (nan in 1 of 3 elements)" in text


def fails_in_pipeline(size: int) -> Any:
    return fails, "pipeline", {"pipeline_parallel_size": size, "algorithm": "shared_memory"}, 1, NAN, {}


def skips(name: str, options: dict[str, Any]) -> Any:
    model = Seeing(1, float("nan"))
    strategy = strategy_of(name, on_nonfinite="skip", **options)
    trainer = make_trainer(strategy, gradient_clip_val=1.0, **EPOCH)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before: list[Tensor] = []
        after: list[Tensor] = []
        model.on_train_batch_end = lambda *_: (after if trainer.global_step > BAD_STEP else before).append(  # type: ignore
            torch.cat([p.detach().clone().flatten() for p in model.parameters() if not p.is_meta])
        )
        trainer.fit(model)
    texts = [str(w.message) for w in caught if "on_nonfinite" in str(w.message)]
    assert all(bool(weights.isfinite().all()) for weights in (*before, *after))
    assert torch.equal(after[0], before[-1])  # the step left out
    assert not torch.equal(after[1], after[0])  # the one after it
    return texts, strategy._guard.skipped, model.bad_steps


LEFT_OUT = [
    (skips, "smddp", {"algorithm": "shared_memory"}),
    (skips, "pipeline", {"pipeline_parallel_size": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", LEFT_OUT, ids=["shared_memory", "stages"])
def test_a_step_is_left_out_on_all_ranks(case: Any) -> None:
    first, second = SLOW.results(case)
    assert (len(first[0]), len(second[0])) == (1, 0)  # said once
    assert "on rank 1 (host" in first[0][0]
    assert "net.2.bias (nan in 1 of 3 elements)" in first[0][0]
    assert first[1] == second[1] == 1
    assert second[2] == 1


def ignores() -> int:
    model = Spoiler(1, float("nan"))
    make_trainer(strategy_of("smddp", on_nonfinite="ignore")).fit(model)
    return sum(int((~p.isfinite()).sum()) for p in model.parameters())


def test_ignored_it_spreads() -> None:
    """What the option protects from."""
    assert all(count > 0 for count in SEVERAL.results((ignores,)))


# ---- code of the user's between the backward pass and the step ----


def clean(module: Any) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None and not parameter.is_meta:
            parameter.grad.nan_to_num_(0.0, 0.0, 0.0)


class CleansAfterBackward(Spoiler):
    def on_after_backward(self) -> None:
        clean(self)


class CleansInsteadOfClipping(Spoiler):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        clean(self)


class CleansAsCallback(Callback):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        clean(pl_module)


CLEANING = [CleansAfterBackward, CleansInsteadOfClipping]


def cleans(name: str, options: dict[str, Any], makes: Any = CLEANING) -> list[dict[str, Tensor]]:
    """Weights after training with code that cleans, which is not stopped."""
    found = []
    for make, callbacks in [*((make, []) for make in makes), (Spoiler, [CleansAsCallback()])]:
        model = make(1, NAN)
        strategy = "ddp" if name == "ddp" else strategy_of(name, **options)
        make_trainer(strategy, callbacks=callbacks, **EPOCH).fit(model)
        found.append({key: value.clone() for key, value in model.state_dict().items()})
    return found


CLEANED = [
    (cleans, "ddp", {}),
    (cleans, "smddp", {"algorithm": "shared_memory", "gradient_as_bucket_view": False}),
    (cleans, "pipeline", {"on_nonfinite": "error"}, [CleansInsteadOfClipping]),
]


@pytest.mark.slow
def test_gradients_are_looked_at_after_the_users_code_has_cleaned_them() -> None:
    expected, actual, of_pipelines = (SLOW.results(case) for case in CLEANED)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-7)
    for weights in (weights for results in of_pipelines for weights in results):
        assert all(bool(value.isfinite().all()) for value in weights.values())


class CleansOnOneRank(Spoiler):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_rank == self.rank:
            clean(self)


def cleans_on_one_rank() -> str:
    with pytest.raises(NonFiniteGradientError) as caught:
        make_trainer(strategy_of("smddp")).fit(CleansOnOneRank(1, NAN))
    return str(caught.value)


def test_gradients_that_one_rank_alone_has_cleaned_are_refused_on_all() -> None:
    first, second = SEVERAL.results((cleans_on_one_rank,))
    assert first == second
    assert f"step {BAD_STEP} (epoch 0, batch " in first


class MakesNaN(Learner):
    """Behind the averaging, which has seen finite sums."""

    def on_after_backward(self) -> None:
        gradient = self.net[2].bias.grad
        if self.trainer.global_step == BAD_STEP and gradient is not None:
            gradient[1] = NAN


class MakesNaNInItsStep(Learner):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        def closure() -> Any:
            loss = optimizer_closure()
            MakesNaN.on_after_backward(self)  # type: ignore[arg-type]
            return loss

        optimizer.step(closure)


class MakesNaNByHand(MakesNaN, Manual):
    """Under manual optimization."""


def makes(name: str, options: dict[str, Any], make: type[Learner] = MakesNaN) -> str:
    with pytest.raises(NonFiniteGradientError) as caught:
        make_trainer(strategy_of(name, algorithm="shared_memory", **options)).fit(make())
    return str(caught.value)


MADE = [
    (makes, "smddp", {}),
    (makes, "smddp", {}, MakesNaNInItsStep),
    (makes, "smddp", {}, MakesNaNByHand),
    (makes, "pipeline", {"pipeline_parallel_size": 1}),
]


@pytest.mark.parametrize("case", MADE, ids=["smddp", "optimizer_step", "manual", "replicas"])
def test_what_users_code_makes_of_averages_is_seen_in_the_same_step(case: Any) -> None:
    first, second = SEVERAL.results(case)
    assert first == second
    step = BAD_STEP + (MakesNaNByHand in case)  # of the second optimizer, which has this gradient
    assert f"step {step} (epoch 0, batch " in first
    assert "in the averages net.2.bias (nan in 1 of 3 elements)" in first


class BadLoss(Spoiler):
    """On one rank one batch gives a loss that is not finite."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch)
        if self.trainer.global_step == BAD_STEP and self.global_rank == self.rank:
            loss = loss * float("nan")
        return loss

    def spoil(self, gradient: Tensor) -> Tensor:
        return gradient


def names_by_loss() -> str:
    with pytest.raises(NonFiniteGradientError) as caught:
        make_trainer(strategy_of("smddp"), **EPOCH, accumulate_grad_batches=2).fit(BadLoss(1, NAN))
    return str(caught.value)


def test_a_rank_is_named_by_its_loss() -> None:
    first, second = SEVERAL.results((names_by_loss,))
    assert first == second
    assert "on rank 1 (host" in first
    assert "the loss (nan)" in first
    assert "on rank 0" not in first


OF_SMDDP = (ignores, names_by_loss, cleans_on_one_rank)
SEVERAL = Cases(call, [*((body,) for body in OF_SMDDP), *MADE])
# The last one ends with its process, which the other one waits for.
SLOW = Cases(call, [*LEFT_OUT, *CLEANED, fails_in_pipeline(1), fails_in_pipeline(2)])


def with_fabric(strategy: str, how: str) -> str:
    """``how`` the step comes to its gradients: by ``fabric.backward``, by a closure, or the script writes to them."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    net = torch.nn.Linear(2, 1)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    scale = float("inf") if os.environ["RANK"] == "1" and how != "writes" else 1.0

    def closure() -> Tensor:
        loss: Tensor = model(torch.ones(1, 2)).sum() * scale
        fabric.backward(loss)
        return loss

    if how != "closure":
        closure()
    if how == "writes":
        assert net.bias.grad is not None
        net.bias.grad.fill_(NAN)
    with pytest.raises(NonFiniteGradientError) as caught:
        optimizer.step(closure if how == "closure" else None)
    assert all(bool(p.isfinite().all()) for p in net.parameters())
    fabric.strategy.teardown()  # else the view of divided tensors ends whenever the next one of the process is there
    return str(caught.value)


BY_RANK, LOSS = "on rank 1 (host", "the loss ("
LOOKED = {
    ("smddp", "backward"): [BY_RANK, "weight (inf in 2 of 2 elements)"],
    ("smddp", "closure"): [BY_RANK, "weight (inf in 2 of 2 elements)"],
    ("smddp", "writes"): ["in the averages bias (nan in 1 of 1 element)"],
    ("smddp_fsdp", "backward"): [BY_RANK, LOSS],
    ("smddp_fsdp", "closure"): [BY_RANK, LOSS],
}
FABRIC = Cases(with_fabric, [*LOOKED])


@pytest.mark.parametrize("case", LOOKED, ids="-".join)
def test_fabric(case: Any) -> None:
    first, second = FABRIC.results(case)
    assert first == second
    assert all(part in first for part in LOOKED[case])
