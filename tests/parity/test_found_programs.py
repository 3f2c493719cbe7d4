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
    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.into, self.cell, self.body = nn.Linear(4, 4), nn.Linear(4, 4), body
        self.blocks = nn.ModuleList(Tanh() for _ in range(N_BLOCKS))
        self.scale = nn.Parameter(torch.ones(1))  # of the last stage

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(self, self.into(x)) * self.scale).square().mean()


def test_microbatches_of_an_empty_value() -> None:
    """torch joins blocks with zeros of which some have no elements."""
    net, x = Net(block_diagonal).double(), torch.randn(8, 4, 4, dtype=torch.float64)
    report = autopar.verify(net, (1, 1), {"x": x}, precision="fp64", microbatches=2)
    assert report.ok, report.text()


@one_in(3)
@pytest.mark.parametrize("name", BODIES)
def test_a_step_is_eagers(name: str) -> None:
    net, x = Net(BODIES[name]).double(), torch.randn(4, 4, 4, dtype=torch.float64)
    for mesh, manual in (
        ((1, 1), Manual()),
        ((1, 2), Manual(dp=2)),
        ((1, 2), Manual(tp=2)),
        ((1, 2), Manual(pp=2)),
    ):
        report = autopar.verify(net, mesh, {"x": x}, precision="fp64", manual=manual)
        assert report.ok, report.text()


class States(nn.Module):
    """A gradient is summed up for several states at once."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        states = [x * self.w]
        for _ in range(4):
            h = states[-1]
            states.append(h + torch.hypot(h, h + 2) + states[0])
        return (torch.stack(states) * self.v).mean()


def test_stages_of_states_that_are_all_read() -> None:
    x = torch.randn(8, 4, 4, dtype=torch.float64)
    manual = Manual(pp=2)
    report = autopar.verify(States().double(), (1, 2), {"x": x}, precision="fp64", manual=manual)
    assert report.ok, report.text()


class Sums(nn.Module):
    """A cut behind equal blocks hands over what each of them gave."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        z, states = x * self.a, [x]
        for _ in range(N_BLOCKS):
            states.append(states[-1] + z + x)
        return (self.a + self.b + torch.stack(states)).square().mean()


def test_stages_that_hand_over_all_states() -> None:
    x = torch.randn(8, 4, 4, dtype=torch.float64)
    report = autopar.verify(Sums().double(), (1, 2), {"x": x}, precision="fp64")
    assert report.ok, report.text()


class Complex(nn.Module):
    """All parameters are complex."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.w.dtype) @ self.w).abs().square().mean()


def test_complex_parameters_alone() -> None:
    x = torch.randn(4, 4, dtype=torch.float64)
    for manual in (Manual(dp=2), Manual(tp=2)):
        report = autopar.verify(Complex(), (1, 2), {"x": x}, precision="fp64", manual=manual)
        assert report.ok, report.text()


class Norms(nn.Module):
    """The first term of a gradient is a part of a larger one; a kernel reads the sum, which takes
    no strides."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.GroupNorm(1, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        states = [x]
        for block in self.blocks:
            states.append(states[-1] + block(states[-1]))
        return (torch.stack(states[1:], 1) * x.mean()).sin().sum() + states[-1].relu().mean()


def test_sums_of_gradients_have_the_strides_that_kernels_were_recorded_with() -> None:
    x = torch.randn(4, 4, 8, dtype=torch.float64)
    report = autopar.verify(Norms().double(), (1, 1), {"x": x}, precision="fp64")
    assert report.ok, report.text()


class Labels(nn.Module):
    """Labels of mean losses that operators with several results, or random numbers, make."""

    def __init__(self, body: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.body = nn.Linear(4, 4), body

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.body(self.layer, x, y)


def mixed_up(layer: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    order, share = torch.randperm(len(x)), 0.3
    logits = layer(x * (1 - share) + x[order] * share)
    first = F.cross_entropy(logits, y[:, 0]) * (1 - share)
    return first + share * F.cross_entropy(logits, y[order, 0], ignore_index=2)


def guessed(layer: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    sure, guess = layer(x).detach().softmax(-1).max(-1)
    return F.cross_entropy(layer(x * 1.1), torch.where(sure > 0.3, guess, -100))


@pytest.mark.parametrize(
    "body",
    [
        lambda layer, x, y: F.cross_entropy(layer(x), y.unbind(1)[0]),
        lambda layer, x, y: F.nll_loss(layer(x).log_softmax(-1), y.max(1)[1]),
        mixed_up,
        guessed,
    ],
)
def test_labels_that_are_made_in_forward(body: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.randint(4, (8, 2))
    for mesh, manual in (((1, 1), Manual()), ((1, 2), Manual(dp=2)), ((1, 2), Manual(pp=2))):
        batch = {"x": x, "y": y}
        net = Labels(body).double()
        report = autopar.verify(net, mesh, batch, precision="fp64", manual=manual)
        assert report.ok, report.text()


class Judged(nn.Module):
    """Running statistics are gathered between two reductions on the loss's way."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Conv2d(3, 3, 1)
        self.judge = nn.Sequential(
            nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1),
            nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 1, 1),
        )  # fmt: skip

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made = self.make(x)
        first, second = self.judge(made), self.judge(y)
        loss = first.square().mean() + (made - y).abs().mean() + 1 - (made * y).mean()
        return loss + second.square().mean()


def test_calls_keep_their_order_beside_a_loss_that_waits() -> None:
    batch = {name: torch.rand(8, 3, 8, 8, dtype=torch.float64) for name in "xy"}
    manual = Manual(tp=2, sp=True)
    report = autopar.verify(Judged().double(), (1, 2), batch, precision="fp64", manual=manual)
    assert report.ok, report.text()


class Hidden(nn.Module):
    """Masked places get a vector that is trained, as wav2vec 2's do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mark = nn.Linear(4, 4), nn.Parameter(torch.randn(4))
        self.rows = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.layer(x)
        h[mask] = self.mark
        h[mask[:, 0]] = self.rows
        return h.square().mean()


def test_masked_places_get_a_vector() -> None:
    batch = {"x": torch.randn(4, 6, 4, dtype=torch.float64), "mask": torch.rand(4, 6) > 0.5}
    for manual in (Manual(dp=2), Manual(tp=2)):
        report = autopar.verify(Hidden().double(), (1, 2), batch, precision="fp64", manual=manual)
        assert report.ok, report.text()


class Recurrent(nn.Module):
    """Gradients of all states are views of one tensor; a cut hands over one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, states = x[:, 0], list[Tensor]()
        for k in range(6):
            h = torch.tanh(self.cell(torch.cat([h, x[:, k]], -1)))
            states.append(h)
        scores = self.head(torch.stack(states, 1))
        return F.cross_entropy(scores.flatten(0, 1), y.flatten())


def test_stages_that_end_inside_of_a_recurrent_loop() -> None:
    batch = {"x": torch.randn(4, 6, 8), "y": torch.randint(3, (4, 6))}
    report = autopar.verify(Recurrent(), (1, 2), batch, precision="fp64", manual=Manual(pp=2))
    assert report.ok, report.text()
