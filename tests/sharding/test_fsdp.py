"""``Trainer(strategy="smddp_fsdp")``: the same numbers as data parallelism, with a share of the memory."""

from __future__ import annotations

import math
import sys
from importlib import import_module
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_smddp._compat.fsdp import whole_parameters
from tests.ranks import RanksFailedError, run_trainer_ranks
from tests.strategies.grouped import grouped
from tests.strategies.learners import Learner, Outcome, assert_equal, make_trainer, outcome
from tests.strategies.pipeline_learners import run_each


def fully_sharded(**options: Any) -> Any:
    from lightning_smddp import SMDDPFSDPStrategy

    return SMDDPFSDPStrategy(**grouped(**{"verbose": False, **options}))


class Short(Learner):
    """Two or three steps an epoch."""

    def __init__(self) -> None:
        super().__init__(count=24)


class AdamLearner(Short):
    """AdamW on two groups, with a schedule."""

    def configure_optimizers(self) -> Any:
        first = {"params": self.net[0].parameters(), "lr": 0.05}
        optimizer = torch.optim.AdamW([first, {"params": self.net[2].parameters()}], lr=0.01, weight_decay=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        return x + torch.tanh(self.mix(self.norm(x)))


class Tied(Short):
    """Blocks, an embedding whose weight is the head's and is used by a function, a parameter of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def loss(self, batch: Any) -> Any:
        tokens = (batch[0] * 4).long() % 16
        x = self.embed(tokens).mean(1) * self.scale
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), batch[1]) + F.linear(x, self.embed.weight).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW((p for n, p in self.named_parameters() if "net" not in n), lr=0.01)


class Convolution(Short):
    """A weight in channels-last order, a layer that is used twice, one that is frozen, and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3)).to(memory_format=torch.channels_last)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def loss(self, batch: Any) -> Any:
        x = self.frozen(self.frozen(batch[0]))
        image = x.view(-1, 2, 2, 2).to(memory_format=torch.channels_last)
        return F.cross_entropy(self.conv(image).flatten(1) + self.net(x), batch[1])

    def on_train_end(self) -> None:
        self.losses += self.conv[1].running_mean.tolist()


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.maybe = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Any, more: bool) -> Any:
        return self.always(x) + self.maybe(x) if more else self.always(x)


class Unused(Short):
    """Parameters that one rank uses and the others not, and some that no rank uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Sometimes() for _ in range(2))
        self.never = nn.Linear(8, 8)

    def loss(self, batch: Any) -> Any:
        x = batch[0]
        for block in self.blocks:
            x = block(x, self.trainer.global_rank == 0)
        return super().loss([x, batch[1]])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.5)


class Outside(AdamLearner):
    """Uses parameters outside of their units: by themselves, by a module in a unit, and all of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.Sequential(Block(8), Block(8))

    def loss(self, batch: Any) -> Any:
        x = F.linear(batch[0], self.net[0].weight)[:, :8] + self.blocks[1].mix(batch[0])
        penalty = sum(p.square().sum() for p in self.net.parameters())
        return super().loss([self.blocks(x), batch[1]]) + 0.1 * penalty

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Side(Block):
    """Used by a method of its own, which is not ``forward``."""

    def encode(self, x: Any) -> Any:
        return F.linear(self.mix(self.norm(x)), self.mix.weight)


class Attributes(AdamLearner):
    """Blocks in attributes, as in a U-Net; one is called twice, and one is never called itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.down1, self.down2, self.up1, self.side = Block(8), Block(8), Block(8), Side(8)

    def loss(self, batch: Any) -> Any:
        x = self.down2(self.down1(batch[0]))
        x = self.up1(self.down1(x)) + self.side.encode(x)
        return super().loss([x, batch[1]])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Looking(Outside):
    """Measures gradients in a hook, as many do."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.losses.append(math.sqrt(sum(p.grad.norm().item() ** 2 for p in self.parameters())))
        self.losses.append(float(grad_norm(self, 2)["grad_2.0_norm_total"]))
        self.log_dict(grad_norm(self.net, 2))
        with torch.no_grad():
            self.net[0].weight[0] = 0.5
            self.net[2].weight.copy_(torch.ones(3, 16))


class Factored(AdamLearner):
    """An optimizer that looks at whole parameters."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), lr=0.01)


class AllAtOnce(AdamLearner):
    """One that looks at all of them."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Regularized(AdamLearner):
    """Changes gradients and parameters in hooks."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            p.grad.mul_(0.5)

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for p in self.parameters():
                p.mul_(0.99)


class Unfreezing(Callback):
    """The first layer trains from the second epoch on."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net[0].requires_grad_(trainer.current_epoch == 1)


class BadBatch(AdamLearner):
    """One batch has a NaN."""

    def loss(self, batch: Any) -> Any:
        loss = super().loss(batch)
        return loss * float("nan") if len(self.losses) == 2 else loss


class Validating(AdamLearner):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validated", self.loss(batch), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log("after", self(torch.ones(2, 8)).sum(), sync_dist=True)

    def forward(self, x: Any) -> Any:
        return self.net(x)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "groups and a schedule": (AdamLearner, {}),
    "tied weights": (Tied, {}),
    "layouts of memory": (Convolution, {}),
    "clipping by norm": (Tied, {"gradient_clip_val": 0.1}),
    "accumulation": (Tied, {"accumulate_grad_batches": 2}),
    "16-bit": (AdamLearner, {"precision": "bf16-true"}),
    "mixed": (AdamLearner, {"precision": "bf16-mixed"}),
    "hooks that write, clipping by value": (
        Regularized,
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    "outside of units": (Outside, {}),
    "looking at gradients": (Looking, {}),
    "blocks in attributes": (Attributes, {}),
    "whole parameters": (Factored, {}),
    "all parameters": (AllAtOnce, {}),
    "unfreezing": (Short, {"callbacks": Unfreezing}),
    "unused parameters": (Unused, {}),
    "a skipped step": (BadBatch, {}),
    "validation": (Validating, {}),
}

TOLERANCES = {"16-bit": 0.05, "mixed": 0.05}  # sums of three ranks in another order


def train(case: str, strategy: Any) -> Outcome:
    make, options = CASES[case]
    options = {"max_epochs": 2, **options}
    if "callbacks" in options:
        options["callbacks"] = [options["callbacks"]()]
    model = make()
    trainer = make_trainer(strategy, **options)
    trainer.fit(model)
    return outcome(model, trainer)


def train_both(cases: list[str], options: dict[str, Any]) -> dict[str, list[Outcome]]:
    from tests.strategies.learners import silent

    found = {}
    for case in cases:
        mode = "skip" if case == "a skipped step" else "error"
        reference = silent(on_nonfinite=mode, find_unused_parameters=CASES[case][0] in (Tied, Short, Unused))
        found[case] = [train(case, reference), train(case, fully_sharded(on_nonfinite=mode, **options))]
    return found


def assert_same(results: dict[str, list[Outcome]]) -> None:
    for case, (expected, actual) in results.items():
        try:
            assert_equal(actual, expected, tolerance=TOLERANCES.get(case, 1e-5))
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from None


COMPARED = [case for case in CASES if case != "a skipped step"]
SOME = ["groups and a schedule", "clipping by norm", "blocks in attributes"]
# On more ranks, or in others: "clipping by norm" has tied weights, "looking at gradients" is outside of units.
ELSEWHERE = ["tied weights", "accumulation", "outside of units", "layouts of memory"]
OTHERS = [case for case in COMPARED if case not in [*SOME, *ELSEWHERE]]
# Whose units stay whole, and of whose parameters three ranks have unequal parts.
WHOLE_MEANWHILE = ["layouts of memory", "looking at gradients"]


@pytest.mark.parametrize(
    ("ranks", "sharding", "cases"),
    [
        pytest.param(2, "full", SOME, id="2-full"),
        pytest.param(2, "full", OTHERS, marks=pytest.mark.slow, id="2-full-others"),
        pytest.param(3, "grad_op", WHOLE_MEANWHILE, marks=pytest.mark.slow, id="3-grad_op"),
        pytest.param(3, "grad_op", ELSEWHERE, marks=pytest.mark.exhaustive, id="3-grad_op-elsewhere"),
        pytest.param(4, "hybrid", ["accumulation"], marks=pytest.mark.slow, id="4-hybrid"),
    ],
)
def test_the_same_numbers_as_data_parallelism(ranks, sharding, cases):
    options: dict[str, Any] = {"sharding": sharding}
    if sharding == "hybrid":
        options["shard_size"] = 2
    for results in run_trainer_ranks(train_both, ranks, cases, options, timeout=110.0):
        assert_same(results)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Gradients are not finite")
def test_a_step_with_bad_gradients_is_left_out():
    for results in run_trainer_ranks(train_both, 2, ["a skipped step"], {}):
        for losses in (results["a skipped step"][0].losses, results["a skipped step"][1].losses):
            assert sum(map(math.isnan, losses)) == 1
            losses.remove(next(filter(math.isnan, losses)))
        assert_same(results)


def fit_bad() -> None:
    make_trainer(fully_sharded()).fit(BadBatch())


def test_bad_gradients_end_the_run():
    with pytest.raises(RanksFailedError, match=r"on rank 0 .* the loss \(nan\)"):
        run_trainer_ranks(fit_bad, 2)


@pytest.mark.slow
@pytest.mark.parametrize("compression", [pytest.param(None, marks=pytest.mark.exhaustive), "bf16"])
def test_gradients_between_nodes(compression):
    """Two nodes: within one through shared memory, between them through the network, in 16 bits if asked for."""
    options = {"compression": compression, "sharding": "hybrid", "shard_size": 2}
    cases, nodes = ["groups and a schedule"], ["a", "a", "b", "b"]
    for results in run_trainer_ranks(train_both, 4, cases, options, node_ids=nodes):
        expected, actual = results[cases[0]]
        assert_equal(actual, expected, tolerance=0.05 if compression else 1e-5)
        differs = actual.weights["net.0.weight"].ne(expected.weights["net.0.weight"]).any()
        assert differs or not compression


def train_root_alone() -> list[Tensor]:
    found = []
    for compression in (None, "bf16"):
        model = Learner()
        torch.manual_seed(5)
        model.net = nn.Linear(8, 3)  # a module that has no unit of its own
        make_trainer(fully_sharded(compression=compression), max_steps=1).fit(model)
        found.append(model.net.weight.detach().clone())
    return found


def test_compression_is_of_parameters_outside_of_units_too() -> None:
    for exact, compressed in run_trainer_ranks(train_root_alone, 2):
        assert not torch.equal(exact, compressed)
        torch.testing.assert_close(exact, compressed, rtol=0.05, atol=1e-2)


class Holding(Callback):
    """Notes how much memory of whole parameters there is, when all are divided."""

    def __init__(self) -> None:
        self.seen: dict[str, set[int]] = {"train": set(), "validation": set()}

    def note(self, trainer: Any, when: str) -> None:
        parameters = whole_parameters(trainer.lightning_module)
        self.seen[when].add(sum(parameter.untyped_storage().nbytes() for _, parameter in parameters))

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.note(trainer, "train")

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        self.note(trainer, "validation")


def memory_held(sharding: str) -> tuple[dict[str, set[int]], int]:
    model, holding = Validating(), Holding()
    make_trainer(fully_sharded(sharding=sharding), max_epochs=2, callbacks=[holding]).fit(model)
    return holding.seen, sum(p.numel() * p.itemsize for p in model.parameters())


@pytest.mark.slow
def test_memory_stays_between_steps_where_all_of_it_is_needed_again():
    ((seen, size), (seen_in_full, _)), _ = run_trainer_ranks(run_each, 2, memory_held, [("grad_op",), ("full",)])
    assert min(seen["train"]) >= size
    assert seen["validation"] == {0}
    assert seen_in_full == {"train": {0}, "validation": {0}}


def table(wrap: Any = None, cpu_offload: bool = False) -> str:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_smddp.strategies.tables.say", lambda text, _: said.append(text))
        strategy = fully_sharded(verbose=True, wrap=wrap, cpu_offload=cpu_offload)
        make_trainer(strategy, max_epochs=1).fit(Tied())
    return "\n".join(said)


def test_the_table_says_what_is_whole_when():
    first, other = run_trainer_ranks(table, 2)
    assert other == ""
    for text in ("2 on cpu, 2 to a copy", "net.0 ... blocks.2", "gathered for forward and again", "shared memory"):
        assert text in first


def test_units_that_are_given():
    first, _ = run_trainer_ranks(table, 2, ["net.0", nn.Embedding], True)
    assert "1 (net.0), gathered" in first
    assert "embed stays with the root" in first
    assert "cpu_offload=True changes nothing" in first


@pytest.mark.parametrize(
    ("package", "ours"),
    [
        ("lightning.pytorch", "lightning_smddp"),
        ("pytorch_lightning", "lightning_smddp.strategies.pytorch_lightning"),
    ],
)
def test_from_the_command_line(package, ours, monkeypatch):
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # it warns of Lightning's use of it
    monkeypatch.setattr(sys, "argv", ["train.py"])
    cli = import_module(f"{package}.cli").LightningCLI
    model = import_module(f"{package}.demos.boring_classes").BoringModel
    arguments = [f"--trainer.strategy={ours}.SMDDPFSDPStrategy", "--trainer.strategy.wrap=[Linear]"]
    arguments += ["--trainer.logger=false", "--trainer.accelerator=cpu"]
    options = {"run": False, "save_config_callback": None, "seed_everything_default": False}
    strategy = cli(model, args=arguments, **options).trainer.strategy
    assert isinstance(strategy, import_module(f"{package}.strategies").DDPStrategy)
    assert (type(strategy).__name__, strategy._sharding.wrap) == ("SMDDPFSDPStrategy", ["Linear"])
