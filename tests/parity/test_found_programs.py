"""Small programs that random ones were reduced to, each of a kind that once went wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar import Manual
from tests.helpers.nightly import one_in

N_BLOCKS = 5
DP, TP, PP = Manual(dp=2), Manual(tp=2), Manual(pp=2)
Batch = dict[str, Any]


def drawn(**shapes: tuple[int, ...]) -> Batch:
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


class Tanh(nn.Module):
    """A block without weights: what it saves is what the block before handed on."""

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(h)


def long_skips(net: Net, z: Tensor) -> Tensor:
    first = z
    for block in net.blocks:
        z = block(z) + first
    return z


def recurrent_blocks(net: Net, z: Tensor) -> Tensor:
    """Each block is a scan; one state is read after the last block, without gradient."""
    states = list[Tensor]()
    for block in net.blocks:
        h, steps = z[:, 0], []
        for t in range(4):
            h = torch.tanh(net.cell(h) + z[:, t])
            steps.append(h)
        z = block(torch.stack(steps, 1))
        states.append(z)
    return z + states[2].detach() * 0.5


def written_after_dropout(net: Net, z: Tensor) -> Tensor:
    mixed = F.scaled_dot_product_attention(z, z, z, dropout_p=0.3)
    return mixed.relu_() + z


def noise_after_a_region(net: Net, z: Tensor) -> Tensor:
    """The region draws nothing, and runs again when the generator is where the noise was drawn."""
    mixed = checkpoint(F.scaled_dot_product_attention, z, z, z, use_reentrant=False)
    return mixed.sum(1) * (1 + torch.rand_like(z[:, 0]))


def pairs(net: Net, z: Tensor) -> Tensor:
    numbers = torch.view_as_complex(z.mT.unflatten(-1, (-1, 2)).contiguous())
    return numbers.abs() + torch.view_as_complex(z.unflatten(-1, (-1, 2))).imag.square()


def block_diagonal(net: Net, z: Tensor) -> Tensor:
    return torch.block_diag(z.sum(2), z.sum(1))


BODIES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "long skips over equal blocks": long_skips,
    "equal blocks that are scans": recurrent_blocks,
    "written after attention with dropout": written_after_dropout,
    "noise after a checkpointed region": noise_after_a_region,
    "pairs that lie apart as complex numbers": pairs,
    "a conjugate of a cast": lambda net, z: torch.fft.hfft(z.to(torch.complex128)),
    "parts of a conjugate": lambda net, z: (c := torch.fft.fft(z).mH).real * c.imag.conj(),
    "distances of rows that lie apart": lambda net, z: z * torch.pdist(z[:, 0, ::2]).sum(),
    "a margin of one score": lambda net, z: z * F.multi_margin_loss(z.sum(), torch.tensor(0)),
    "a product of a copy": lambda net, z: (
        z * torch.kron(z.mean(0).mT.ravel().view(4, 4), z[0, :1, :1])
    ),
    "one chunk": lambda net, z: torch.cat(z.unsqueeze(1).chunk(2, 1), 1),
    "one split": lambda net, z: torch.cat(z.split([4], 1), 1),
    "a reduction of a number": lambda net, z: z * z.max().logsumexp(-1) + z.mean().amax(0),
    "zeroed in place": lambda net, z: z * z.clone().zero_().add(0.5),
    "a sign, whose gradient has no memory": lambda net, z: z * torch.sgn(z),
    "powers of a vector": lambda net, z: z @ torch.vander(z.detach()[0, 0], N=4),
    "a mask of two numbers": lambda net, z: z * torch.where(z.lt(0), 0.5, 1.0),
}


class Net(nn.Module):
    """`body` between a layer and a loss; blocks, a cell and a scale that bodies may read."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.into, self.cell, self.body = nn.Linear(4, 4), nn.Linear(4, 4), body
        self.blocks = nn.ModuleList(Tanh() for _ in range(N_BLOCKS))
        self.scale = nn.Parameter(torch.ones(1))  # of the last stage

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(self, self.into(x)) * self.scale).square().mean()


def check(net: nn.Module, batch: Batch, *layouts: Manual, **options: Any) -> None:
    """A step under each layout is the eager one."""
    for manual in layouts:
        shape = (1, manual.n_ranks)
        report = autopar.verify(net, shape, batch, precision="fp64", manual=manual, **options)
        assert report.ok, report.text()


def test_microbatches_of_an_empty_value() -> None:
    """torch joins blocks with zeros of which some have no elements."""
    check(Net(block_diagonal).double(), drawn(x=(8, 4, 4)), Manual(), microbatches=2)


@one_in(6)
@pytest.mark.parametrize("name", BODIES)
def test_a_step_is_eagers(name: str) -> None:
    check(Net(BODIES[name]).double(), drawn(x=(4, 4, 4)), Manual(), DP, TP, PP)


class Parts(nn.Module):
    """A model of these parts, whose loss is `body` of itself and the batch."""

    def __init__(self, body: Callable[..., Tensor], **parts: Tensor | nn.Module) -> None:
        super().__init__()
        self.body = body
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.body(self, x) if y is None else self.body(self, x, y)


def all_states(m: Any, x: Tensor) -> Tensor:
    """A gradient is summed up for several states at once."""
    states = [x * m.w]
    for _ in range(4):
        h = states[-1]
        states.append(h + torch.hypot(h, h + 2) + states[0])
    return (torch.stack(states) * m.v).mean()


def all_sums(m: Any, x: Tensor) -> Tensor:
    """A cut behind equal blocks hands over what each of them gave."""
    z, states = x * m.w, [x]
    for _ in range(N_BLOCKS):
        states.append(states[-1] + z + x)
    return (m.w + m.v + torch.stack(states)).square().mean()


def complex_weights(m: Any, x: Tensor) -> Tensor:
    return (x.to(m.w.dtype) @ m.w).abs().square().mean()


def norms(m: Any, x: Tensor) -> Tensor:
    """The first term of a gradient is a part of a larger one; a kernel reads the sum, which takes
    no strides."""
    states = [x]
    for block in m.blocks:
        states.append(states[-1] + block(states[-1]))
    return (torch.stack(states[1:], 1) * x.mean()).sin().sum() + states[-1].relu().mean()


def mixed_up(m: Any, x: Tensor, y: Tensor) -> Tensor:
    order, share = torch.randperm(len(x)), 0.3
    logits = m.layer(x * (1 - share) + x[order] * share)
    first = F.cross_entropy(logits, y[:, 0]) * (1 - share)
    return first + share * F.cross_entropy(logits, y[order, 0], ignore_index=2)


def guessed(m: Any, x: Tensor, y: Tensor) -> Tensor:
    sure, guess = m.layer(x).detach().softmax(-1).max(-1)
    return F.cross_entropy(m.layer(x * 1.1), torch.where(sure > 0.3, guess, -100))


def judged(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """Running statistics are gathered between two reductions on the loss's way: calls keep their
    order beside a loss that waits."""
    made = m.make(x)
    first, second = m.judge(made), m.judge(y)
    loss = first.square().mean() + (made - y).abs().mean() + 1 - (made * y).mean()
    return loss + second.square().mean()


def hidden(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    """Masked places get a vector that is trained, as wav2vec 2's do."""
    h = m.layer(x)
    h[mask] = m.mark
    h[mask[:, 0]] = m.rows
    return h.square().mean()


def recurrent(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """Gradients of all states are views of one tensor; a cut hands over one of them."""
    h, states = x[:, 0], list[Tensor]()
    for k in range(6):
        h = torch.tanh(m.cell(torch.cat([h, x[:, k]], -1)))
        states.append(h)
    scores = m.head(torch.stack(states, 1))
    return F.cross_entropy(scores.flatten(0, 1), y.flatten())


def judge() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 1, 1),
    )  # fmt: skip


def two() -> Any:
    return {"w": torch.randn(4, 4), "v": torch.randn(4, 4)}


def layer() -> Any:
    return {"layer": nn.Linear(4, 4)}


def labelled() -> Batch:
    return drawn(x=(8, 4)) | {"y": torch.randint(4, (8, 2))}


EVERY = (Manual(), DP, PP)
# Name -> body, parts, batch, layouts.
MODELS: dict[str, tuple[Callable[..., Tensor], Callable[[], Any], Callable[[], Batch], Any]] = {
    "states that are all read": (all_states, two, lambda: drawn(x=(8, 4, 4)), (PP,)),
    "all states cross": (all_sums, two, lambda: drawn(x=(8, 4, 4)), (DP, PP)),
    "complex parameters alone": (
        complex_weights, lambda: {"w": torch.randn(4, 4, dtype=torch.complex128)},
        lambda: drawn(x=(4, 4)), (DP, TP),
    ),
    "strides of sums of gradients": (
        norms, lambda: {"blocks": nn.ModuleList(nn.GroupNorm(1, 4) for _ in range(3))},
        lambda: drawn(x=(4, 4, 8)), (Manual(),),
    ),
    "labels of one of several results": (
        lambda m, x, y: F.cross_entropy(m.layer(x), y.unbind(1)[0]), layer, labelled, EVERY,
    ),
    "labels of the largest": (
        lambda m, x, y: F.nll_loss(m.layer(x).log_softmax(-1), y.max(1)[1]), layer, labelled, EVERY,
    ),
    "labels that are mixed up": (mixed_up, layer, labelled, EVERY),
    "labels that are guessed": (guessed, layer, labelled, EVERY),
    "a loss that waits": (
        judged, lambda: {"make": nn.Conv2d(3, 3, 1), "judge": judge()},
        lambda: drawn(x=(8, 3, 8, 8), y=(8, 3, 8, 8)), (Manual(tp=2, sp=True),),
    ),
    "masked places get a vector": (
        hidden, lambda: layer() | {"mark": torch.randn(4), "rows": torch.randn(6, 4)},
        lambda: drawn(x=(4, 6, 4)) | {"y": torch.rand(4, 6) > 0.5}, (DP, TP),
    ),
    "a cut inside of a recurrent loop": (
        recurrent, lambda: {"cell": nn.Linear(16, 8), "head": nn.Linear(8, 3)},
        lambda: drawn(x=(4, 6, 8)) | {"y": torch.randint(3, (4, 6))}, (PP,),
    ),
}  # fmt: skip


@one_in(3)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_of_these_parts_is_eagers(name: str) -> None:
    body, parts, batch, layouts = MODELS[name]
    check(Parts(body, **parts()).double(), batch(), *layouts)
