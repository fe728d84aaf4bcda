"""Random small models, whose activations outweigh their parameters: blocks of many kinds of ops, and a random loss."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["random_model"]

Model = tuple[nn.Module, dict[str, Any], str]
BATCH, LENGTH, WIDTH, ENTRIES = 8, 64, 64, 512


class _Swish(torch.autograd.Function):
    """x * sigmoid(2 x), with a backward of several ops."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """[...] -> [...]."""
        ctx.save_for_backward(x)
        return x * torch.sigmoid(2 * x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """By its formula."""
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(2 * x)
        return gradients[0] * (gate + 2 * x * gate * (1 - gate))


class _Block(nn.Module):
    """``x + f(norm(x))``, or without the sum or the norm; x is [batch, length, width]."""

    def __init__(self, body: nn.Module, norm: nn.Module | None, *, adds: bool) -> None:
        super().__init__()
        self.body, self.norm, self.adds = body, norm, adds

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x if self.norm is None else self.norm(x))
        return x + y if self.adds else y


class _Between(nn.Module):
    """A product to a wider space, an op there, and a product back."""

    def __init__(self, op: Callable[[Tensor], Tensor], factor: int, back: int) -> None:
        super().__init__()
        self.up, self.down, self.op = nn.Linear(WIDTH, factor * WIDTH), nn.Linear(back * WIDTH, WIDTH), op

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.op(self.up(x)))


class _Attention(nn.Module):
    """Fused or written out, with dropout, a window, or a bias of positions that is learned."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.heads = kind, 4
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.zeros(4, LENGTH, LENGTH)) if kind == "biased" else None

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        if self.kind == "fused":
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5
            if self.bias is not None:
                scores = scores + self.bias
            if self.kind == "capped":
                scores = 30 * torch.tanh(scores / 30)
            mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            scores = scores.masked_fill(~mask, float("-inf"))
            weights = scores.float().softmax(-1).to(v.dtype) if self.kind == "wide" else scores.softmax(-1)
            if self.kind == "dropped":
                weights = functional.dropout(weights, 0.1, self.training)
            y = weights @ v
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class _Convolution(nn.Module):
    """Along the length, with a norm of channels."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        groups = WIDTH if kind == "depthwise" else 1
        self.first = nn.Conv1d(WIDTH, 2 * WIDTH, 3, padding=1, groups=groups)
        norms = {"batch": nn.BatchNorm1d(2 * WIDTH), "group": nn.GroupNorm(8, 2 * WIDTH),
                 "instance": nn.InstanceNorm1d(2 * WIDTH, affine=True)}  # fmt: skip
        self.norm = norms.get(kind, nn.Identity())
        self.second = nn.Conv1d(2 * WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(functional.relu(self.norm(self.first(x.transpose(1, 2))))).transpose(1, 2)


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.cells: Any = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x)[0]


class _RootMeanSquare(nn.Module):
    """In float32, as in LLaMA."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class _Op(nn.Module):
    """A function of x."""

    def __init__(self, op: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x)


def _glu(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, -1)
    return functional.silu(gate) * value


def _squared_relu(x: Tensor) -> Tensor:
    return functional.relu(x).square()


def _gelu_by_hand(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x.pow(3))))


def _rotated(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    angle = torch.arange(x.shape[1], device=x.device)[:, None] * 0.1
    turned = torch.cat([-second, first], -1)
    return x * angle.cos() + turned * angle.sin()


def _outer(x: Tensor) -> Tensor:
    return (x[..., :8, None] * x[..., None, 8:40]).sum(-2).repeat(1, 1, 2)


def _normalized(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5)


def _logsumexp_gate(x: Tensor) -> Tensor:
    return x - x.logsumexp(-1, keepdim=True)


def _pooled(x: Tensor) -> Tensor:
    small = functional.max_pool1d(x.transpose(1, 2), 2)
    return functional.interpolate(small, scale_factor=2.0, mode="nearest").transpose(1, 2)


def _averaged(x: Tensor) -> Tensor:
    small = functional.avg_pool1d(x.transpose(1, 2), 2)
    return functional.interpolate(small, scale_factor=2.0, mode="linear").transpose(1, 2)


def _best(x: Tensor) -> Tensor:
    values, _ = x.topk(16, -1)
    return x * (x >= values[..., -1:])


def _unfolded(x: Tensor) -> Tensor:
    return functional.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).mean(-1)


OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "swish function": lambda x: _Swish.apply(x),  # pyright: ignore
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": _logsumexp_gate,
    "standardized": _normalized,
    "F.normalize": lambda x: functional.normalize(x, dim=-1),
    "rms_norm": lambda x: functional.rms_norm(x, (x.shape[-1],)),
    "layer_norm": lambda x: functional.layer_norm(x, (x.shape[-1],)),
    "cumsum": lambda x: x.cumsum(1) * 0.1,
    "rotary": _rotated,
    "outer": _outer,
    "max pool": _pooled,
    "mean pool": _averaged,
    "top": _best,
    "unfold": _unfolded,
    "roll": lambda x: x + x.roll(1, 1),
    "flip": lambda x: x.flip(1),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x.exp()),
    "clamp": lambda x: x.clamp(-1, 1),
    "maximum": lambda x: torch.maximum(x, x.flip(-1)),
    "pow": lambda x: (x.abs() + 1e-3).pow(1.5),
    "erf": lambda x: x * 0.5 * (1 + torch.erf(x / 1.414)),
    "softplus": lambda x: x * torch.tanh(functional.softplus(x)),
    "dropout": lambda x: functional.dropout(x, 0.1),
    "distances": lambda x: (x[:, :, None, :16] - x[:, None, :, :16]).abs().mean(2).repeat(1, 1, 4),
    "einsum": lambda x: torch.einsum("bld,bmd,bme->ble", x, x, x) / x.shape[1] ** 2,
    "cat": lambda x: torch.cat([x[:, 1:], x[:, :1]], 1) * torch.stack([x, -x], 0).sum(0),
    "prod": lambda x: x * (1 + 0.01 * x[..., :4]).prod(-1, keepdim=True),
    "gather": lambda x: x.gather(1, x.argsort(1)),
    "mean of batch": lambda x: x - x.mean(1, keepdim=True) ** 2,
    "amax": lambda x: (x - x.amax(-1, keepdim=True)).exp(),
    "bilinear": lambda x: functional.cosine_similarity(x[:, 1:], x[:, :-1], dim=-1).mean(1)[:, None, None] * x,
}  # fmt: skip
INNER: dict[str, tuple[Callable[[Tensor], Tensor], int, int]] = {
    "gelu": (functional.gelu, 4, 4), "relu": (functional.relu, 4, 4), "swiglu": (_glu, 8, 4),
    "squared relu": (_squared_relu, 4, 4), "gelu by hand": (_gelu_by_hand, 4, 4), "glu": (functional.glu, 8, 4),
    "mish": (functional.mish, 4, 4), "wide function": (lambda x: _Swish.apply(x), 4, 4),  # pyright: ignore
    "wide softmax": (lambda x: x.softmax(-1), 4, 4),
    "wide norm": (lambda x: functional.rms_norm(x, (4 * WIDTH,)), 4, 4),
    "elu": (functional.elu, 4, 4), "sin": (torch.sin, 4, 4), "tanh": (lambda x: x * x.tanh(), 4, 4),
    "wide dropout": (lambda x: functional.dropout(functional.relu(x), 0.1), 4, 4),
}  # fmt: skip
NORMS: dict[str, Callable[[], nn.Module | None]] = {
    "none": lambda: None, "layer": lambda: nn.LayerNorm(WIDTH), "rms": lambda: nn.RMSNorm(WIDTH),
    "rms by hand": _RootMeanSquare,
}  # fmt: skip


def _random_block(random_: random.Random) -> tuple[nn.Module, str]:
    kind = random_.choice(("inner", "inner", "op", "op", "op", "attention", "convolution", "recurrent"))
    if kind == "inner":
        name = random_.choice(list(INNER))
        body: nn.Module = _Between(*INNER[name])
    elif kind == "op":
        name = random_.choice(list(OPS))
        body = _Op(OPS[name])
    elif kind == "attention":
        name = random_.choice(("fused", "biased", "capped", "wide", "dropped", "plain"))
        body = _Attention(name)
        name = f"attention {name}"
    elif kind == "convolution":
        name = random_.choice(("batch", "group", "instance", "depthwise", "none"))
        body = _Convolution(name)
        name = f"conv {name}"
    else:
        name = random_.choice(("LSTM", "GRU"))
        body = _Recurrent(getattr(nn, name))
    norm, adds = random_.choice(list(NORMS)), random_.random() < 0.6
    return _Block(body, NORMS[norm](), adds=adds), f"{name}{'' if norm == 'none' else f'({norm})'}{'+' if adds else ''}"


def _ids(random_: random.Random, *shape: int, entries: int = ENTRIES) -> Tensor:
    return torch.randint(0, entries, shape, generator=torch.Generator().manual_seed(random_.randrange(1 << 30)))


def _z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return loss + 1e-4 * logits.logsumexp(-1).square().mean()


def _distilled(logits: Tensor, labels: Tensor) -> Tensor:
    teacher = functional.one_hot(labels, ENTRIES).to(logits.dtype) * 0.9 + 0.1 / ENTRIES
    return functional.kl_div(logits.log_softmax(-1), teacher, reduction="batchmean")


def _focal(logits: Tensor, labels: Tensor) -> Tensor:
    each = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


def _likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    return -logits.log_softmax(-1).gather(-1, labels[..., None]).mean()


def _entropies(logits: Tensor, labels: Tensor) -> Tensor:
    chances = logits.softmax(-1)
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return loss + 0.01 * (chances * chances.clamp_min(1e-6).log()).sum(-1).mean()


def _ctc(logits: Tensor, labels: Tensor) -> Tensor:
    rows, length = labels.shape
    full = torch.full((rows,), length, dtype=torch.int64, device=labels.device)
    wanted = labels[:, : length // 4].clamp_min(1)
    return functional.ctc_loss(logits.log_softmax(-1).transpose(0, 1), wanted, full, full // 4)


def _cross(**settings: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda logits, labels: functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), **settings)


CLASSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross entropy": _cross(), "smoothed": _cross(label_smoothing=0.1), "ignoring": _cross(ignore_index=3),
    "summed": _cross(reduction="sum"), "by class": lambda x, y: functional.cross_entropy(x.transpose(1, 2), y),
    "z": _z_loss, "kl": _distilled, "focal": _focal, "likelihood": _likelihood, "entropy": _entropies, "ctc": _ctc,
    "nll": lambda x, y: functional.nll_loss(x.log_softmax(-1).flatten(0, 1), y.flatten()),
    "float32": lambda x, y: functional.cross_entropy(x.flatten(0, 1).float(), y.flatten()),
    "bce": lambda x, y: functional.binary_cross_entropy_with_logits(x, functional.one_hot(y, ENTRIES).to(x.dtype)),
    "sigmoid bce": lambda x, y: functional.binary_cross_entropy(
        x.sigmoid().float(), functional.one_hot(y, ENTRIES).float()),
    "margin": lambda x, y: functional.multi_margin_loss(x.flatten(0, 1), y.flatten()),
}  # fmt: skip
TARGETS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": functional.mse_loss, "huber": functional.huber_loss, "smooth l1": functional.smooth_l1_loss,
    "l1": functional.l1_loss, "squares": lambda x, y: (x - y).pow(2).mean(),
    "cosine": lambda x, y: (1 - functional.cosine_similarity(x, y, dim=-1)).mean(),
    "cosine embedding": lambda x, y: functional.cosine_embedding_loss(
        x.flatten(0, 1), y.flatten(0, 1), torch.ones(x.shape[0] * x.shape[1], device=x.device)),
    "gaussian": lambda x, y: functional.gaussian_nll_loss(x, y, torch.ones_like(x)),
    "poisson": lambda x, y: functional.poisson_nll_loss(x, y.abs()),
    "soft margin": lambda x, y: functional.soft_margin_loss(x, y.sign()),
    "charbonnier": lambda x, y: torch.sqrt((x - y) ** 2 + 1e-6).mean(),
    "log cosh": lambda x, y: torch.log(torch.cosh(x - y)).mean(),
}  # fmt: skip


class _Random(nn.Module):
    """An embedding (or a product of features), blocks, a head and a loss."""

    def __init__(self, blocks: list[nn.Module], first: nn.Module, last: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.layers, self.last, self.loss = first, nn.ModuleList(blocks), last, loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.loss(self.last(x), labels)


def random_model(random_: random.Random) -> Model:
    """A model, its inputs, and what it is made of."""
    made = [_random_block(random_) for _ in range(random_.randint(1, 3))]
    repeats = random_.randint(1, 2)
    blocks = [each for each, _ in made]
    for _ in range(repeats - 1):
        blocks += [copy.deepcopy(each) for each, _ in made]
    is_tokens, is_classes = random_.random() < 0.7, random_.random() < 0.7
    draw = torch.Generator().manual_seed(random_.randrange(1 << 30))
    x = _ids(random_, BATCH, LENGTH) if is_tokens else torch.randn(BATCH, LENGTH, WIDTH, generator=draw)
    labels = _ids(random_, BATCH, LENGTH) if is_classes else torch.randn(BATCH, LENGTH, 4 * WIDTH, generator=draw)
    losses = CLASSES if is_classes else TARGETS
    loss = random_.choice(list(losses))
    first = nn.Embedding(ENTRIES, WIDTH) if is_tokens else nn.Linear(WIDTH, WIDTH)
    last = nn.Linear(WIDTH, ENTRIES if is_classes else 4 * WIDTH)
    names = " ".join(name for _, name in made)
    return _Random(blocks, first, last, losses[loss]), {"x": x, "labels": labels}, f"{repeats} x [{names}] {loss}"
