"""More examples: random numbers, changes in place, and ways for tensors other than arguments and results."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.pipeline.example_modules import D, Layer, Net, member

# ---- random numbers ----


@member
def diffusion() -> nn.Module:
    def body(s: Net, x: Tensor) -> Tensor:
        noise, t = torch.randn_like(x), torch.randint(0, 10, (len(x),))
        noisy = F.dropout(x, 0.1) + noise * t[:, None] / 10
        h = F.dropout(s.b(s.a(noisy)), 0.2)
        return F.mse_loss(s.d(s.c(h) + torch.empty(D).uniform_()), noise)

    return Net(body)


@member
def a_generator() -> nn.Module:
    def body(s: Net, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        mask = torch.rand(x.shape, generator=generator) > 0.5
        h = s.b(s.a(x) * mask)
        return (s.c(h) * torch.rand(x.shape, generator=generator)).square().mean()

    return Net(body)


# ---- changes in place ----


@member
def in_place() -> nn.Module:
    def body(s: Net, x: Tensor) -> Tensor:
        h = s.a(x)
        h += x
        h = h * 1
        h[x > 0] = 0
        h.masked_fill_(x < -1, 1.0)
        total = torch.zeros(D, D)
        total.index_add_(0, torch.arange(len(x)), s.b(h))
        total[0] += s.c(total[:1].clone())[0]
        rows = s.d(total)
        rows.mul_(2).add_(total)
        return rows.square().mean() + total.mean()

    return Net(body)


@member
def in_place_on_views() -> nn.Module:
    def body(s: Net, x: Tensor) -> Tensor:
        h = s.a(x) * 1
        view = h.view(-1)
        view.mul_(2)
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


@member
def an_old_value_is_gone() -> nn.Module:
    def body(s: Net, x: Tensor) -> Tensor:
        h = s.a(x).mean(-1, keepdim=True)
        wide = h.expand(-1, D) + 0
        with torch.no_grad():
            h.mul_(3)
        return s.c(s.b(wide)).mean() + h.mean()

    return Net(body)


@member
def changed_buffers() -> nn.Module:
    def body(s: Net, x: Tensor) -> Tensor:
        h = s.a(x) * (1 + s.count)
        h = s.b(h)
        with torch.no_grad():
            s.count.add_(1)
            s.average.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return s.d(s.bn(s.c(h))).square().mean() + s.average.mean()

    return Net(body, bn=nn.BatchNorm1d(D), count=torch.zeros(()), average=torch.zeros(D))


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
    return net


@member
def matching_in_python() -> nn.Module:
    def match(s: Layer, h: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.as_tensor([max(range(D), key=row.__getitem__) for row in h.tolist()])

    def body(s: Net, x: Tensor) -> Tensor:
        h = s.b(s.a(x))
        return F.cross_entropy(s.c(h), s.match(h)) + s.d(h).mean()

    return Net(body, match=Layer(match))


@member
def free_tail() -> nn.Module:
    def body(s: Net, x: Tensor) -> Tensor:
        h = s.d(s.c(s.b(s.a(x))))
        loss = h.square().mean()
        assert loss.item() >= 0
        if h.mean() > 100:
            loss = loss * 2
        print(f"{loss:.1f} {loss}", end="")
        return loss * (2 if (h > 0).any() else 1)

    return Net(body)


@member
def packed_sequences() -> nn.Module:
    def body(s: Net, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(s.a(x).expand(3, -1, -1), torch.tensor([4, 3, 2]), batch_first=True)
        out, _ = pad_packed_sequence(s.lstm(packed)[0], batch_first=True)
        return s.d(out).square().mean()

    return Net(body, lstm=nn.LSTM(D, D, batch_first=True))


@member
def sparse_tensors() -> nn.Module:
    def body(s: Net, x: Tensor) -> Tensor:
        sparse = s.b(s.a(x))[:, :4].to_sparse()
        return s.d(torch.sparse.mm(sparse, s.c(x)) + torch.sparse.mm(torch.eye(4).to_sparse(), x)).square().mean()

    return Net(body)
