"""Small modules, each of which uses something that a step may use. Each returns its loss."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from transformers.modeling_outputs import BaseModelOutput

from lightning_smddp.pipeline.capture.graph import StepGraph
from lightning_smddp.pipeline.capture.graph_builder import Modules, build_graph
from lightning_smddp.pipeline.capture.records import Trace
from lightning_smddp.pipeline.capture.tracer import trace

D = 6
CPU = torch.device("cpu")
EXAMPLES: dict[str, Callable[[], nn.Module]] = {}


def member(function: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    EXAMPLES[function.__name__] = function
    return function


class Net(nn.Module):
    """``body(self, x)`` on linear layers ``a`` to ``d``, and what else is given."""

    def __init__(self, body: Callable[..., Tensor], **modules: nn.Module | nn.Parameter | Tensor) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(D, D) for _ in range(4))
        self.body = body
        for name, module in modules.items():
            if isinstance(module, Tensor) and not isinstance(module, nn.Parameter):
                self.register_buffer(name, module)
            else:
                setattr(self, name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


class Layer(nn.Module):
    """``body(self, ...)`` around one linear layer."""

    def __init__(self, body: Callable[..., object], **buffers: Tensor) -> None:
        super().__init__()
        self.linear, self.body = nn.Linear(D, D), body
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.body(self, *args, **kwargs)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(x, scale=1.0):
        y = x * x
        return y * x * scale, y > 1

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.scale = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx, g, _):
        (x,) = ctx.saved_tensors
        return 3 * x * x * g * ctx.scale, None


def batch(rows: int = 4) -> Tensor:
    return torch.linspace(-2, 2, rows * D).reshape(rows, D).sin() * 2


def children(name: str) -> bool:
    return name != "net"


def leaf_modules(name: str) -> bool:
    return name.count(".") > 1 or name in ("net.a", "net.b", "net.c", "net.d")


def record(net: nn.Module) -> tuple[Trace, Modules]:
    root = nn.ModuleDict({"net": net})
    found = trace(lambda: net(batch()), root, CPU)
    return found, Modules(found, root)


def graph_of(
    body: Callable[..., Tensor], is_small: Callable[[str], bool] = children, **modules: nn.Module
) -> StepGraph:
    found, known = record(Net(body, **modules))
    return build_graph(found, known, filter(is_small, known.calls))


def example(name: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"net": EXAMPLES[name]()})


def step_of(root: nn.Module) -> Callable[[], Tensor]:
    return lambda: root["net"](batch())


# ---- what models are made of ----


@member
def batch_norms() -> nn.Module:
    def body(s: Net, x: Tensor) -> Tensor:
        h = s.bn1(s.a(x))
        h += s.bn2(s.b(s.relu(h)))
        return F.cross_entropy(s.d(s.relu(s.c(h))), torch.zeros(len(x), dtype=torch.long))

    return Net(body, bn1=nn.BatchNorm1d(D), bn2=nn.BatchNorm1d(D), relu=nn.ReLU())


# ---- what units take and return ----


@member
def structures() -> nn.Module:
    pair = namedtuple("pair", "first second")

    @dataclass
    class Data:
        h: Tensor
        more: dict[str, object]

    def body(s: Net, x: Tensor) -> Tensor:
        t = s.t(x)
        n = s.n(*t[:2])
        d = s.dc(n.first, y=n.second, text="a", flag=None)
        m = s.m(d.h + d.more["h"][0], scale=d.more["k"])
        assert (d.more["none"], d.more["k"], d.more["size"]) == (None, 3, torch.Size([4]))
        assert m["hidden_states"][0] is m[1][0]
        return (m.last_hidden_state * m.hidden_states[1]).mean()

    return Net(
        body,
        t=Layer(lambda s, x: (s.linear(x), [x, None], {"n": 1})[:2]),
        n=Layer(lambda s, x, y: pair(s.linear(x), s.linear(y[0]))),
        dc=Layer(
            lambda s, x, y, text, flag: Data(
                s.linear(x), {"h": [y.sin()], "none": flag, "k": len(text) + 2, "size": x.shape[:1]}
            )
        ),
        m=Layer(lambda s, x, scale: BaseModelOutput(s.linear(x) * scale, hidden_states=(x.exp(), x.cos()))),
    )


# ---- changes in place ----


@member
def in_place_on_views() -> nn.Module:
    def body(s: Net, x: Tensor) -> Tensor:
        h = s.a(x) * 1
        h.view(-1).mul_(2)
        pair = s.b(h) * 1
        left, right = pair[:, :3], pair[:, 3:]
        left.add_(right)
        out = s.c(torch.cat([left, right], -1)).T.contiguous()
        out += 1
        return s.d(h).mean() + out.square().mean()

    return Net(body)


@member
def in_place_in_units() -> nn.Module:
    def change(s: Layer, x: Tensor) -> Tensor:
        x += s.linear(x.clone())
        x *= 2
        return x

    def body(s: Net, x: Tensor) -> Tensor:
        h = s.a(x) * 1
        s.change(h)
        g = s.relu(s.b(h))
        return s.c(h + g).square().mean()

    return Net(body, change=Layer(change), relu=nn.ReLU(inplace=True))


# ---- other ways for tensors ----


@member
def attributes_and_lists() -> nn.Module:
    def body(s: Net, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        cache: dict[str, Tensor] = {}
        h = s.write(s.a(x), found, cache)
        h = s.read(h, cache)
        return h.mean() + sum(t.square().mean() for t in found) + s.write.context.mean()

    def write(s: Layer, x: Tensor, found: list[Tensor], cache: dict[str, Tensor]) -> Tensor:
        s.context = s.linear(x)
        cache["k"] = s.context.sin()
        found.append(s.context)
        return s.context.relu()

    return Net(body, write=Layer(write), read=Layer(lambda s, x, cache: s.linear(x) + cache["k"]))


@member
def forward_hooks() -> nn.Module:
    seen: dict[str, Tensor] = {}

    def body(s: Net, x: Tensor) -> Tensor:
        h = s.c(s.outer(s.a(x)))
        return h.square().mean() + seen.pop("inner").mean() + seen.pop("c")

    net = Net(body, outer=Layer(lambda s, x: s.linear(x).relu()))
    net.outer.linear.register_forward_hook(lambda m, i, o: seen.update(inner=o))
    net.a.register_forward_hook(lambda m, i, o: o * 2)
    net.c.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    net.c.register_forward_hook(lambda m, i, o: seen.update(c=o.mean()))
    return net


@member
def weight_norm() -> nn.Module:
    net = Net(lambda s, x: s.d(s.c(s.b(s.a(x)))).square().mean())
    net.b = nn.utils.parametrizations.weight_norm(net.b)
    net.c = nn.utils.parametrizations.spectral_norm(net.c)
    net.d = nn.utils.spectral_norm(net.d)  # by a hook, which writes to buffers
    return net


@member
def queue() -> nn.Module:
    def body(s: Net, x: Tensor) -> Tensor:
        h = s.a(x)
        old = s.queue.clone()
        s.queue[: len(x)] = h.detach()
        h = s.b(h)
        similar = (h @ old.T).logsumexp(-1).mean()
        return s.d(s.c(h)).square().mean() + similar

    return Net(body, queue=torch.linspace(-1, 1, 8 * D).reshape(8, D))


@member
def packed_sequences() -> nn.Module:
    def body(s: Net, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(s.a(x).expand(3, -1, -1), torch.tensor([4, 3, 2]), batch_first=True)
        out, _ = pad_packed_sequence(s.lstm(packed)[0], batch_first=True)
        return s.d(out).square().mean()

    return Net(body, lstm=nn.LSTM(D, D, batch_first=True))
