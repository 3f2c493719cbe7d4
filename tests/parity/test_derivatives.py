"""Derivatives in forward, and vmap: losses and gradients are those of one process.

Penalties of critics, equations of physics, forces, meta-learning: the derivative of a derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.func import functional_call, stack_module_state, vmap

import autopar
from autopar import Manual, NotSupportedError
from tests.helpers.jobs import machine
from tests.helpers.nightly import one_in, sampled
from tests.parity.table import TOLERANCE

ROWS, WIDTH = 8, 6
Net = Callable[[Tensor], Tensor]


def penalty(net: Net, x: Tensor) -> Tensor:
    """WGAN-GP: the norm of the derivative by each row."""
    x = x.requires_grad_(True)
    out = net(x)
    (slope,) = grad(out.sum(), x, create_graph=True)
    return out.mean() + (slope.flatten(1).norm(dim=1) - 1).pow(2).mean()


def forces(net: Net, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    energy = net(x)
    ones = torch.ones_like(energy)
    force = -grad(outputs=energy, inputs=x, grad_outputs=ones, create_graph=True)[0]
    return energy.pow(2).mean() + (force - x.detach()).pow(2).sum(1).mean()


def equation(net: Net, x: Tensor) -> Tensor:
    """The second derivatives by each coordinate: derivatives of derivatives."""
    x = x.requires_grad_()
    u = net(x)
    (slope,) = grad(u.sum(), x, create_graph=True)
    curvature = torch.zeros_like(u[:, 0])
    for i in range(2):
        (second,) = grad(slope[:, i].sum(), x, create_graph=True)
        curvature = curvature + second[:, i]
    return (curvature - u.squeeze(-1)).pow(2).mean()


def constant(net: Net, x: Tensor) -> Tensor:
    """Without create_graph, the derivative has no derivative."""
    x = x.requires_grad_()
    out = net(x)
    (slope,) = grad(out.sum(), x, retain_graph=True)
    return (out.squeeze(1) * slope.sum(1)).mean()


def by_labels(net: Net, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    scores = torch.cat([net(x), -net(x)], 1)
    loss = nn.functional.cross_entropy(scores, torch.arange(ROWS) % 2, reduction="sum")
    (slope,) = grad(loss, x, create_graph=True)
    return (loss + slope.pow(2).sum()) / ROWS


def meta_step(net: Any, x: Tensor) -> Tensor:
    """MAML: the loss after one step of gradient descent."""
    weights = dict(net.named_parameters())
    found = grad(net(x).pow(2).mean(), list(weights.values()), create_graph=True)
    moved = {n: p - 0.1 * g for (n, p), g in zip(weights.items(), found, strict=True)}
    return functional_call(net, moved, (x,)).pow(2).mean()


def stacked(net: Any, x: Tensor) -> Tensor:
    """vmap over rows, and over weights."""
    rows = vmap(lambda row: net(row[None])[0])(x)
    scales = torch.arange(1.0, 4.0, dtype=x.dtype)
    outer = vmap(vmap(lambda s, row: net(s * row[None]).sum(), (None, 0)), (0, None), 1)(scales, x)
    return rows.pow(2).mean() + outer.pow(2).mean()


def functional(net: Any, x: Tensor) -> Tensor:
    """The derivatives of torch.func, by rows, by weights, in both modes."""
    each = vmap(torch.func.grad(lambda row: net(row[None]).sum()))(x)
    jvp, vjp = cast(Any, torch.func.jvp), cast(Any, torch.func.vjp)
    value, along = jvp(net, (x,), (torch.ones_like(x),))
    out, pull = vjp(net, x)
    weights = dict(net.named_parameters())
    slopes, loss = torch.func.grad_and_value(lambda w: functional_call(net, w, (x,)).pow(2).mean())(
        weights
    )
    moved = {n: w - 0.1 * slopes[n] for n, w in weights.items()}
    inner = functional_call(net, moved, (x,)).pow(2).mean() + loss
    squares = (each.pow(2).sum(1), (value * along)[:, 0], pull(out)[0].pow(2).sum(1))
    return inner + torch.stack(squares).mean()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 24), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x[:, None] * torch.arange(1.0, 4.0, dtype=x.dtype)[:, None]
        q, k, v = self.qkv(tokens).chunk(3, -1)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v)).mean(1)


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(5, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.table(x[:, 0].detach().abs().long() % 5) + x))


def mlp(inner: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), inner, nn.Linear(8, 1))


def image(*layers: nn.Module, n_out: int) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, WIDTH)), *layers, nn.Flatten(), nn.Linear(n_out, 1))


FIRST = nn.Conv1d(1, 4, 3, padding=1)
STRIDED = nn.Conv1d(4, 6, 2, padding=1, stride=2, groups=2)
WIDENED = nn.ConvTranspose1d(4, 6, 3, padding=1, stride=2, output_padding=1, groups=2)

CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Tensor]]] = {
    "penalty": (lambda: mlp(nn.SiLU()), penalty),
    "forces": (lambda: mlp(nn.Tanh()), forces),
    "equation": (lambda: mlp(nn.Tanh()), equation),
    "constant": (lambda: mlp(nn.Tanh()), constant),
    "labels": (lambda: mlp(nn.Sigmoid()), by_labels),
    "meta step": (lambda: mlp(nn.Tanh()), meta_step),
    "vmap": (lambda: mlp(nn.Tanh()), stacked),
    "torch.func": (lambda: mlp(nn.SiLU()), functional),
    "attention": (Attention, penalty),
    "embedding": (Embedded, penalty),
    "embedding, weights": (Embedded, meta_step),
    "convolution": (lambda: image(FIRST, nn.Tanh(), STRIDED, n_out=24), penalty),
    "convolution, weights": (lambda: image(FIRST, nn.Tanh(), STRIDED, n_out=24), meta_step),
    "transposed": (lambda: image(FIRST, nn.Tanh(), WIDENED, n_out=72), penalty),
    "transposed, weights": (lambda: image(FIRST, nn.Tanh(), WIDENED, n_out=72), meta_step),
    "upsampled": (lambda: image(FIRST, nn.Upsample(scale_factor=2), n_out=48), penalty),
    "pooled": (lambda: image(FIRST, nn.MaxPool1d(2), nn.Tanh(), n_out=12), penalty),
    "instance norm": (lambda: image(FIRST, nn.InstanceNorm1d(4), nn.Tanh(), n_out=24), penalty),
    "layer norm": (lambda: mlp(nn.LayerNorm(8)), penalty),
    "group norm": (lambda: mlp(nn.GroupNorm(2, 8)), penalty),
    "RMS norm": (lambda: mlp(nn.RMSNorm(8)), penalty),
}
ACTIVATIONS = (
    "GELU ReLU Softplus ELU LeakyReLU Mish Hardtanh SELU CELU Hardswish LogSigmoid PReLU"
).split()
CASES |= {name: (partial(lambda n: mlp(getattr(nn, n)()), name), penalty) for name in ACTIVATIONS}
LAYOUTS = {"one": Manual(), "dp": Manual(dp=2), "tp": Manual(tp=2), "zero3": Manual(dp=2, zero=3)}
BY_DAY = [(name, "one") for name in CASES] + [("penalty", "dp"), ("meta step", "tp")]
ALL = [(name, layout) for name in CASES for layout in LAYOUTS]


class Model(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        make, self.loss = CASES[name]
        self.net = make()

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.net, x)


@one_in(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "layout"), sampled(ALL, BY_DAY))
def test_a_step_is_eagers(name: str, layout: str) -> None:
    torch.manual_seed(0)
    model = Model(name).double()
    shape = (1, 1) if layout == "one" else (1, 2)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    report = autopar.verify(
        model, machine(shape), {"x": x}, precision="fp64", manual=LAYOUTS[layout], microbatches=1,
    )  # fmt: skip
    report.raise_if_wrong()
    assert report.not_compared is None
    assert report.tolerance == report.capture_tolerance == TOLERANCE


class Ensemble(nn.Module):
    """vmap over the stacked parameters of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.shape = (mlp(nn.Tanh()).to("meta"),)  # no submodule: its weights are below
        weights, _ = stack_module_state([mlp(nn.Tanh()) for _ in range(3)])
        self.weights = nn.ParameterDict({n.replace(".", "_"): w for n, w in weights.items()})

    def forward(self, x: Tensor) -> Tensor:
        weights = {n.replace("_", "."): w for n, w in self.weights.items()}
        each = vmap(lambda w, v: functional_call(self.shape[0], w, (v,)), (0, None))(weights, x)
        return each.var(0).mean() + each.pow(2).mean()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["one", "dp"])
def test_vmap_over_stacked_parameters(layout: str) -> None:
    shape = (1, 1) if layout == "one" else (1, 2)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    autopar.verify(
        Ensemble().double(), machine(shape), {"x": x}, precision="fp64", manual=LAYOUTS[layout]
    ).raise_if_wrong()


def dropped(net: Net, x: Tensor) -> Tensor:
    return penalty(lambda v: nn.functional.dropout(net(v)), x)


def backwards(net: Net, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    net(x).sum().backward()
    assert x.grad is not None
    return x.grad.mean()


def batched(net: Net, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    out = net(x)
    return grad(out, x, torch.ones(2, ROWS, 1), is_grads_batched=True)[0].mean()


def jacobian(net: Net, x: Tensor) -> Tensor:
    return vmap(torch.func.jacrev(net))(x).pow(2).mean()


def unseen(net: Net, x: Tensor) -> Tensor:
    def row(v: Tensor) -> Tensor:
        with torch.no_grad():
            scale = net(v[None])
        return net(v[None]) * scale

    return vmap(row)(x).mean()


@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        (dropped, NotSupportedError, "draws random numbers"),
        (backwards, NotSupportedError, "backward\\(\\) in forward"),
        (batched, NotSupportedError, "is_grads_batched"),
        (jacobian, NotSupportedError, "jacrev"),
        (unseen, NotSupportedError, "no_grad"),
    ],
)
def test_what_is_refused(
    loss: Callable[[Net, Tensor], Tensor], error: type[Exception], words: str
) -> None:
    model = Model("forces")
    model.loss = loss
    with pytest.raises(error, match=words):
        autopar.plan(model, machine((1, 1)), {"x": torch.randn(ROWS, WIDTH)})
    assert torch.autograd.grad.__code__.co_name == "grad", "torch is as it was"
