"""Small modules, each of which uses something that a step may use. Each returns its loss."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutput

D = 6
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


# ---- what models are made of ----


@member
def views_of_the_batch() -> nn.Module:
    def body(s: Net, x: Tensor) -> Tensor:
        mask = (x[:, :1] > 0).float()
        h = s.a(x)
        h = s.c(s.b(h * mask.expand_as(h)) + mask)
        h, wide = torch.broadcast_tensors(h, mask)
        return ((s.d(h * wide) - x.view_as(h)).square() * mask + x.abs()).mean()

    return Net(body)


@member
def sequential() -> nn.Module:
    return Net(lambda s, x: s.seq(x).square().mean(), seq=nn.Sequential(*(nn.Linear(D, D) for _ in range(4))))


@member
def residual() -> nn.Module:
    def body(s: Net, x: Tensor) -> Tensor:
        x = x + s.a(x)
        x = x + s.b(F.gelu(x))
        x = x + torch.tanh(s.c(x))
        return (x + s.d(x)).square().mean()

    return Net(body)


@member
def u_net() -> nn.Module:
    def body(s: Net, x: Tensor) -> Tensor:
        h1 = s.a(x).relu()
        h2 = s.b(F.avg_pool1d(h1[None], 2).repeat(1, 1, 2)[0])
        h3 = s.c(h2).sigmoid()
        up = torch.cat([h3, h2], -1)[..., ::2]
        return s.d(torch.stack([up, h1]).sum(0)).square().mean()

    return Net(body)


@member
def resnet() -> nn.Module:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = (nn.Conv1d(4, 4, 3, padding=1, bias=False) for _ in range(2))
            self.bn1, self.bn2, self.relu = nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
            out += x
            return self.relu(out)

    class ResNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Conv1d(1, 4, 3, padding=1), nn.Linear(4, 3)
            self.layer1, self.layer2 = nn.Sequential(Block(), Block()), Block()
            self.pool = nn.AdaptiveAvgPool1d(1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer2(self.layer1(self.stem(x[:, None])))
            return F.cross_entropy(self.head(self.pool(x).flatten(1)), torch.zeros(len(x), dtype=torch.long))

    return ResNet()


@member
def recurrent() -> nn.Module:
    def body(s: Net, x: Tensor) -> Tensor:
        h, (last, _) = s.lstm(s.a(x)[None])
        h, _ = s.gru(h, last)
        return s.b(h).square().mean() + last.mean()

    return Net(body, lstm=nn.LSTM(D, D, 2, batch_first=True), gru=nn.GRU(D, D, 2, batch_first=True, dropout=0.2))


@member
def attention() -> nn.Module:
    def body(s: Net, x: Tensor) -> Tensor:
        h, weights = s.attention(s.a(x)[None], x[None], x[None])
        return s.decoder(s.encoder(h), h).square().mean() + weights.std()

    return Net(
        body,
        attention=nn.MultiheadAttention(D, 2, batch_first=True),
        encoder=nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 8, 0.1, batch_first=True), 2),
        decoder=nn.TransformerDecoder(nn.TransformerDecoderLayer(D, 2, 8, 0.1, batch_first=True), 2),
    )


@member
def tied_embedding_and_parameters_between_units() -> nn.Module:
    def body(s: Net, x: Tensor) -> Tensor:
        ids = (x[:, :3] > 0).long()
        h = torch.cat([s.cls.expand(len(x), 1, D), s.emb(ids)], 1) + s.positions[:4]
        h = s.b(s.a(h))
        return F.cross_entropy(F.linear(h[:, 1:], s.emb.weight).flatten(0, 1), ids.flatten())

    return Net(
        body,
        emb=nn.Embedding(5, D),
        cls=nn.Parameter(torch.randn(1, 1, D)),
        positions=nn.Parameter(torch.randn(8, D)),
    )


@member
def shared_units() -> nn.Module:
    def body(s: Net, x: Tensor) -> Tensor:
        for _ in range(3):
            x = s.norm(x + s.a(x))
        return (s.alias(x) + s.b(x)).square().mean()

    net = Net(body, norm=nn.LayerNorm(D))
    net.alias = net.a
    return net


@member
def without_parameters() -> nn.Module:
    def body(s: Net, x: Tensor) -> Tensor:
        h = s.identity(s.flat(s.drop(s.act(s.a(x)))))
        return s.loss(s.b(h), torch.zeros(len(x), dtype=torch.long))

    return Net(
        body, act=nn.GELU(), drop=nn.Dropout(0.3), flat=nn.Flatten(), identity=nn.Identity(), loss=nn.CrossEntropyLoss()
    )


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


@member
def integers_and_masks_cross() -> nn.Module:
    def body(s: Net, x: Tensor) -> Tensor:
        h = s.a(x)
        order, mask = h.argsort(-1), h > 0
        best = h.topk(2, -1)
        h = s.b(s.c(h).masked_fill(mask, 0.0))
        return h.gather(-1, order).mul(torch.arange(D)).mean() + (best.values * best.indices).sum()

    return Net(body)


@member
def shapes_and_places() -> nn.Module:
    def body(s: Net, x: Tensor) -> Tensor:
        h = s.a(x)
        batch, width = h.shape
        text = f"{h} {h.sum():.2f} {h.shape} {h.device} {h.dtype} {len(h)}"
        assert "4" in text
        assert isinstance(h, Tensor)
        assert h is not None
        assert torch.is_tensor(h)
        assert h.type() == "torch.FloatTensor"
        assert h.requires_grad
        assert not h.is_cuda
        assert h.device.type == next(s.parameters()).device.type == s.d.weight.device.type == "cpu"
        assert s.d.weight.dtype == h.dtype
        positions = torch.arange(width, device=h.device) + h.new_zeros(batch, 1) + torch.zeros_like(h)
        h = s.b(h + positions.to(h)) + torch.full((h.size(0), 1), 2.0, dtype=h.dtype) + torch.zeros_like(s.c.weight[0])
        rows = [row * i for i, row in enumerate(s.c(h))]
        left, right = torch.stack(rows).chunk(2, dim=-1)
        parts = left.split(1, -1)
        return torch.einsum("ij,kj->ik", s.d(torch.cat([right, *parts], -1)), h).mean() + sum(
            r.sum() for r in rows[0:2]
        )

    return Net(body)


@member
def filled_by_a_value() -> nn.Module:
    """In the likeness of one tensor, with a value that a module made: by keyword, behind the first argument."""

    def body(s: nn.Module, x: Tensor) -> Tensor:
        h = s.a(x)
        level = h.detach().mean()
        h = s.b(h) + torch.full_like(x, fill_value=level)
        return s.d(s.c(h)).square().mean()

    return Net(body)


# ---- gradients and modes ----


@member
def stopped_gradients() -> nn.Module:
    def body(s: Net, x: Tensor) -> Tensor:
        online = s.b(s.a(x))
        with torch.no_grad():
            target = s.d(s.c(x))
        stopped = s.c(online.detach() * 2)
        return F.mse_loss(online, target) + stopped.mean()

    net = Net(body)
    net.d.requires_grad_(False)
    return net


@member
def frozen_start() -> nn.Module:
    net = Net(lambda s, x: s.d(s.c(s.b(s.a(x)).relu())).square().mean())
    net.a.requires_grad_(False)
    net.b.requires_grad_(False)
    return net


@member
def autocast() -> nn.Module:
    def body(s: Net, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = s.b(s.a(x))
            h = h @ s.c(h).T
        return s.d(h.float() @ x).square().mean()

    return Net(body)


@member
def gradient_hooks() -> nn.Module:
    def body(s: Net, x: Tensor) -> Tensor:
        h = s.a(x)
        h.register_hook(lambda g: g * 2)
        y = h * 3
        if y.requires_grad:
            y.register_hook(lambda g: g + 1)
            y.retain_grad()
        return s.c(s.b(y) + h).square().mean()

    net = Net(body)
    net.b.register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.5,))
    return net


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        y = x * x
        return y * x * scale, y > 1

    @staticmethod
    def backward(ctx, g, _):
        (x,) = ctx.saved_tensors
        return 3 * x * x * g * ctx.scale, None


@member
def autograd_functions() -> nn.Module:
    def body(s: Net, x: Tensor) -> Tensor:
        h, mask = Cube.apply(s.a(x), 2.0)
        return s.b(s.inner(h * mask)).mean()

    return Net(body, inner=Layer(lambda s, x: Cube.apply(s.linear(x), 1.0)[0]))


@member
def checkpoints() -> nn.Module:
    def body(s: Net, x: Tensor) -> Tensor:
        def part(h: Tensor) -> Tensor:
            return s.c(s.drop(s.b(h.sin())).relu()) * h

        h = checkpoint(part, s.a(x), use_reentrant=False)
        h = checkpoint(part, h, use_reentrant=True)
        return checkpoint(s.d, h, use_reentrant=False).square().mean()

    return Net(body, drop=nn.Dropout(0.3))


@member
def vmapped_batch() -> nn.Module:
    def body(s: Net, x: Tensor) -> Tensor:
        weights = torch.vmap(lambda row: row.softmax(-1) * 2)(x)
        return s.b(s.a(x) * weights).square().mean()

    return Net(body)


@member
def vmapped_in_a_module() -> nn.Module:
    layer = Layer(lambda s, x: torch.vmap(lambda row: row.softmax(-1) * 2)(s.linear(x)))
    return Net(lambda s, x: s.b(s.vmapped(s.a(x))).square().mean(), vmapped=layer)
