"""Hooks see a divided module as if it were whole: each case is what a hook does, on two ranks and on one."""

from __future__ import annotations

import copy
import io
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from lightning_smddp.pipeline.mesh import Channel, Ownership
from lightning_smddp.pipeline.state.meta_parameters import release
from lightning_smddp.pipeline.state.state_dict import unshard
from lightning_smddp.pipeline.view.global_tensor import GlobalViewError
from lightning_smddp.pipeline.view.view import GlobalView
from tests.pipeline.models import assert_same
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


class Net(nn.Module):
    """A student and a teacher; the first layers are on rank 0, the last ones on rank 1, ``tied`` is on both."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.student, self.teacher = layers(), layers()
            self.tied = nn.Parameter(torch.randn(5))
            # As replicas have them: all gradients are parts of one tensor.
            sizes = [parameter.numel() for parameter in self.student.parameters()]
            flat = torch.randn(sum(sizes))
            for parameter, part in zip(self.student.parameters(), flat.split(sizes), strict=True):
                parameter.grad = part.view_as(parameter)
            self.tied.grad = torch.randn(5)
            self.student[3].running_mean.copy_(torch.randn(8))
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x)


def placed(module: nn.Module) -> Ownership:
    def rank(name: str) -> tuple[int, ...]:
        if name == "tied":
            return (0, 1)
        return (0,) if name.split(".")[1] == "0" else (1,)

    parameters = {name: rank(name) for name, _ in module.named_parameters()}
    return Ownership(parameters, {name: rank(name)[0] for name, _ in module.named_buffers()})


def divided(module: nn.Module, ownership: Ownership | None = None) -> GlobalView:
    """The view of a module, of which this rank keeps its own part with its gradients."""
    group = dist.group.WORLD
    assert group is not None
    ownership = ownership or placed(module)
    gradients = {name: p.grad for name, p in module.named_parameters()}
    release(module, ownership, group.rank())
    for name, parameter in module.named_parameters():
        if ownership.is_mine(name, group.rank()):
            parameter.grad = gradients[name]
    return GlobalView(module, ownership, group, CPU, Channel(group, CPU))


def features() -> Tensor:
    return torch.linspace(-1, 1, 18).view(3, 6)


Hook = Callable[[Net], Any]


def reads(net: Net) -> Any:
    total = sum(p.norm() ** 2 for p in net.parameters())
    weight, bias = net.student[2].weight, net.student[2].bias
    pairs = list(zip(net.teacher.parameters(), net.student.parameters(), strict=True))
    return {
        "norms": (total.sqrt().item(), [p.abs().max().item() for p in net.parameters()]),
        "of gradients": {name: float(value) for name, value in grad_norm(net, 2).items()},
        "counts": [sum(p.numel() for p in net.parameters()), [str(p.device) for p in net.parameters()]],
        "equal": [torch.equal(t, s) for t, s in pairs],
        "close": [torch.allclose(t, s, atol=10.0) for t, s in pairs],
        "decision": bool((weight > 0).any()),
        "shapes by values": [weight[weight > 0].sum().item(), weight.nonzero().shape[0], torch.unique(bias).tolist()],
        "text": [repr(bias.data), f"{bias.sum():.3f}", net.tied.tolist(), str(net.tied.numpy(force=True))],
        "is_meta": net.tied.is_meta,
    }


def clip(net: Net) -> Any:
    totals = [float(nn.utils.clip_grad_norm_(net.parameters(), 0.5, foreach=each)) for each in (None, True)]
    nn.utils.clip_grad_value_(net.parameters(), 0.1)
    return totals


def ema_by_data(net: Net) -> Any:
    for t, s in zip(net.teacher.parameters(), net.student.parameters(), strict=True):
        t.data.mul_(0.9).add_(s.data, alpha=0.1)


def averaged(net: Net) -> Any:
    model = torch.optim.swa_utils.AveragedModel(net.student)
    model.update_parameters(net.student)
    with torch.no_grad():
        net.student[0].weight.mul_(2)
    model.update_parameters(net.student)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def noise(net: Net) -> Any:
    torch.manual_seed(5)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
            p.add_(torch.randn(p.shape) * 0.1)
    return torch.rand(3).tolist()


def assign(net: Net) -> Any:
    """What the module holds under a name is set again."""
    net.student[3].running_mean = net.student[3].running_mean * 2 + net.student[0].bias.detach()
    net.teacher[3].num_batches_tracked += 5
    with torch.no_grad():
        net.student[4].bias += 1
        net.tied -= net.student[0].bias[:5]
    return net.student[3].running_mean.sum().item(), net.tied.tolist()


def freeze(net: Net) -> Any:
    net.student[0].requires_grad_(False)
    net.student[2].weight.requires_grad = False
    return [p.requires_grad for p in net.parameters()]


def save(net: Net) -> Any:
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    return torch.load(file)


def load(net: Net) -> Any:
    net.teacher.load_state_dict(net.student.state_dict())
    net.student[4].load_state_dict({"weight": torch.ones(4, 8), "bias": torch.zeros(4)})


def swap(net: Net) -> Any:
    """An EMA's weights for a validation, and back: parameters point elsewhere meanwhile."""
    backup = [p.data for p in net.student.parameters()]
    for s, t in zip(net.student.parameters(), net.teacher.parameters(), strict=True):
        s.data = t.data
    seen = net.eval()(features()).sum().item()
    for s, data in zip(net.student.parameters(), backup, strict=True):
        s.data = data
    return seen, net(features()).sum().item()


def forward(net: Net) -> Any:
    with torch.no_grad():
        evaluated = net.eval()(features())
        return evaluated, net.teacher(features()).argmax(1).tolist(), net.train()(features()).tolist()


def backward_on_top(net: Net) -> Any:
    """Adds to the gradients that are there, at which nobody has looked."""
    (net(features()).square().sum() + net.tied.square().sum()).backward()


def gradients_by_hand(net: Net) -> Any:
    for p in net.parameters():
        if p.grad is not None:
            p.grad.nan_to_num_()
            p.grad = p.grad * 2 if p.ndim > 1 else None
    net.student[0].bias.grad = torch.ones(8)
    return [p.grad is None for p in net.parameters()]


CASES = [
    reads, clip, ema_by_data, averaged, noise, assign, freeze, save, load, swap, forward, backward_on_top,
    gradients_by_hand,
]  # fmt: skip


def on_rank(hook: Hook, times: int = 2) -> Any:
    """What this rank has in the end."""
    torch.manual_seed(dist.get_rank())
    net = Net()
    view = divided(net)
    results = []
    for _ in range(times):
        with view.entered():
            results.append(view.plain(hook(net)))
    ownership = placed(net)
    gradients = {n: p.grad for n, p in net.named_parameters() if ownership.is_mine(n, dist.get_rank())}
    held = {n: p.detach().clone() for n, p in net.named_parameters() if ownership.is_mine(n, dist.get_rank())}
    unshard(view)
    assert all(torch.equal(net.get_parameter(name), value) for name, value in held.items())  # also of what is tied
    return results, dict(net.state_dict()), gradients, [p.requires_grad for p in net.parameters()]


def all_cases() -> dict[str, Any]:
    """Of each case, and of those below, in which ranks do different things."""
    found: dict[str, Any] = {"different": differing(DIFFERENT), "refused": differing(list(REFUSED)), "kept": kept()}
    for hook in CASES:
        try:
            found[hook.__name__] = on_rank(hook)
        except Exception:
            found[hook.__name__] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(all_cases, 2)


def assert_equal(actual: Any, expected: Any) -> None:
    assert_same(actual, expected, rtol=1e-5, atol=1e-6)


def alone(hook: Hook, times: int = 2) -> Any:
    net = Net()
    results = [hook(net) for _ in range(times)]
    gradients = {n: p.grad for n, p in net.named_parameters()}
    return results, dict(net.state_dict()), gradients, [p.requires_grad for p in net.parameters()]


@pytest.mark.parametrize("hook", CASES, ids=lambda hook: hook.__name__)
def test_as_if_it_were_whole(hook: Hook, ranks: list[dict[str, Any]]) -> None:
    with torch.random.fork_rng(devices=[]):
        expected_results, expected_state, expected_gradients, expected_flags = alone(hook)
    everyones: dict[str, Any] = {}
    for rank in ranks:
        assert not isinstance(rank[hook.__name__], str), [r[hook.__name__] for r in ranks]
        results, state_dict, gradients, flags = rank[hook.__name__]
        assert_equal(results, expected_results)
        assert_equal(state_dict, expected_state)
        assert flags == expected_flags
        everyones |= gradients
    assert_equal({name: everyones[name] for name in expected_gradients}, expected_gradients)
    assert everyones.keys() == expected_gradients.keys()


# ---- ranks that do different things ----


def on_first_rank(net: Net, rank: int) -> Any:
    """What code under `if trainer.is_global_zero` may do."""
    if rank != 0:
        return None
    half = {name: (value.detach().cpu() / 2).clone() for name, value in net.state_dict().items()}
    gradients = [p.grad.cpu().norm().item() for p in net.student.parameters()]
    return {name: value.numpy().sum().item() for name, value in half.items()}, gradients, net.tied[1:3].tolist()


def writes_on_first_rank(net: Net, rank: int) -> Any:
    if rank == 0:
        net.student[4].weight.data.zero_()


def gradients_that_others_changed(net: Net, rank: int) -> Any:
    """The first rank looks when the last one has gone on."""
    if rank == 0:
        net.student[4].weight.grad.tolist()
    else:
        net.student[4].weight.grad.mul_(2)


def computed_on_first_rank(net: Net, rank: int) -> Any:
    """The other rank has not computed it."""
    if rank == 0:
        net.student[4].weight.norm().item()


def other_amounts(net: Net, rank: int) -> Any:
    net.student[4].weight.data.mul_(0.5 + rank)


def read_by_last_rank(net: Net, rank: int) -> Any:
    if rank == 1:
        net.student[0].weight.tolist()


def first_rank_and_all(net: Net, rank: int) -> Any:
    """The first rank looks alone, then all at the same."""
    found: list[Any] = []
    for _ in range(2):
        if rank == 0:
            found.append(net.student[4].weight.tolist())
        found.append(net.student[0].weight.std().item())
        found.append(net.student[4].weight.tolist())
        if rank == 0:
            found.append(sum(p.grad.cpu().norm().item() for p in net.student.parameters()))
        found.append(bool(net.student[4].weight.grad is None))
    return found


def new_parameter(net: Net, rank: int) -> Any:
    net.student[2].weight = nn.Parameter(torch.zeros(8, 8))


def other_shape(net: Net, rank: int) -> Any:
    net.student[2].weight.data = torch.zeros(3, 3)


def shape_in_place(net: Net, rank: int) -> Any:
    net.student[4].weight.data.t_()


def differing(hooks: list[Any]) -> list[Any]:
    found = []
    for hook in hooks:
        net = Net()
        view = divided(net)
        try:
            with view.entered():
                result = hook(net, dist.get_rank())
            found.append(result)
        except GlobalViewError as error:
            found.append(str(error))
        dist.barrier()
    return found


DIFFERENT = [on_first_rank, first_rank_and_all]


def test_values_for_one_rank_alone_and_then_for_all(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        assert_equal(found["different"], [hook(Net(), rank) for hook in DIFFERENT])


CHANGED_LAST = "do different things in a hook or callback: rank 0 has changed"
REFUSED = {
    writes_on_first_rank: f"{CHANGED_LAST} 'student.4.weight' last, at ",
    other_amounts: f"{CHANGED_LAST} 'student.4.weight' last, at ",
    gradients_that_others_changed: "rank 0 needs the values of 'grad:student.4.weight', a tensor of shape (4, 8) at ",
    computed_on_first_rank: "callback: rank 0 needs the values of a tensor of shape () at ",
    new_parameter: "Parameter 'weight' of a Linear is replaced by another one at ",
    other_shape: "`.data` of a tensor of shape (8, 8), torch.float32 is set at ",
    shape_in_place: "changes the shape of 'student.4.weight', a tensor of shape (4, 8) in place",
    read_by_last_rank: "rank 0 is at the end of a hook; rank 1 needs the values of 'student.0.weight'",
}


def test_what_ranks_do_differently_is_an_error_on_all(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        for text, error in zip(REFUSED.values(), found["refused"], strict=True):
            assert text in error
            assert "test_global_view.py:" in error


def kept() -> Any:
    """A hook keeps what it made: an error outside of hooks, a plain tensor at the end."""
    net = Net()
    view = divided(net)
    with view.entered():
        average = {name: p.detach().clone() for name, p in net.named_parameters()}
        clone = copy.deepcopy(net.student)
    with view.entered():
        for name, p in net.named_parameters():
            average[name] = average[name] * 0.5 + p.detach() * 0.5
    message = ""
    try:
        average["student.0.weight"].sum()
    except GlobalViewError as error:
        message = str(error)
    view.close()
    unshard(view)
    kinds = {type(value) for value in average.values()} | {type(p) for p in clone.parameters()}
    return message, kinds, average, dict(clone.state_dict())


def test_what_hooks_keep(ranks: list[dict[str, Any]]) -> None:
    whole = Net()
    for message, kinds, average, state in (found["kept"] for found in ranks):
        assert "whose values are on rank 0 of the pipeline" in message
        assert "test_global_view.py:" in message
        assert kinds == {Tensor, nn.Parameter}
        assert_equal(average, {name: p.detach() for name, p in whole.named_parameters()})
        assert_equal(state, dict(whole.student.state_dict()))
