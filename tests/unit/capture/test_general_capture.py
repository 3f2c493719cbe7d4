"""Operators without a rule of their own: capture makes operators with rules that equal eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import MissingRuleError
from autopar.program import operators_of
from autopar.rules import has_rule
from tests.helpers.capture_harness import Module, check, targets
from tests.helpers.nightly import one_in

aten = torch.ops.aten
Body = Callable[[Tensor, Tensor], Tensor]

LABELS = torch.tensor([0, 2, 2, 3])
ROWS = torch.tensor([3, 1, 0])
WEIGHTS = torch.arange(1.0, 9.0, dtype=torch.float64)


def written_by_mask(p: Tensor, x: Tensor) -> Tensor:
    y = p.sin()
    y[x > 0] = 0.0
    y[x[:, 0] > 1] = 1.5
    return y


def written_by_index(p: Tensor, x: Tensor) -> Tensor:
    y = p.sin()
    y[ROWS, 1] = x[:3, 0]
    return y


def ignored(x: Tensor) -> Tensor:
    return torch.where(x[:, 0] > 0, -100, LABELS)


# Functions of a parameter p and an input x, both [4, 8].
GROUPS: dict[str, tuple[Body, ...]] = {
    "repeats and moves": (
        lambda p, x: p.repeat(2, 3, 1),
        lambda p, x: x * p[:1].repeat(4, 1),
        lambda p, x: p.tile(2),
        lambda p, x: p.repeat_interleave(2, 0),
        lambda p, x: p.repeat_interleave(3, -1),
        lambda p, x: p.movedim(0, 1),
        lambda p, x: p.swapaxes(0, 1),
        lambda p, x: p.narrow(1, 2, 3),
        lambda p, x: p.tensor_split(3, 1)[1],
        lambda p, x: torch.hstack([x, p]) * torch.vstack([p, x]).view(4, 16),
        lambda p, x: torch.concat([x, p], 1),
        lambda p, x: torch.stack(torch.meshgrid(p[0], x[0], indexing="ij")),
        lambda p, x: torch.block_diag(x, p),
        lambda p, x: p.rot90() * x.T,
        lambda p, x: p.roll((1, 2), (0, 1)),
        lambda p, x: p.flip(0),
        lambda p, x: p.unfold(1, 4, 2),
        lambda p, x: p.diagonal() + torch.diag(x[:, :4]),
        lambda p, x: torch.diag_embed(p),
        lambda p, x: (
            F.pixel_shuffle(p.view(1, 8, 2, 2), 2) + F.pixel_unshuffle(p.view(2, 4, 4), 2).mean()
        ),
        lambda p, x: F.channel_shuffle(p.view(1, 8, 2, 2), 2),
    ),
    "places": (
        lambda p, x: p.index_select(1, LABELS),
        lambda p, x: p.take(LABELS),
        lambda p, x: p[:, LABELS] + p[LABELS, LABELS].sum(),
        lambda p, x: torch.take_along_dim(p, LABELS[:, None], 1),
        lambda p, x: written_by_mask(p, x),
        lambda p, x: written_by_index(p, x),
        lambda p, x: F.one_hot(LABELS, 4).double() @ p,
        lambda p, x: (x * p).sort(-1)[0],
        lambda p, x: p.gather(1, x.argsort(-1)),
        lambda p, x: (x * p).topk(2).values,
        lambda p, x: x.scatter(1, LABELS[:, None], p[:, :1]),
        lambda p, x: torch.zeros_like(x).scatter_add_(1, LABELS[:, None], p[:, :1]),
        lambda p, x: x.index_add(1, LABELS, p[:, :4]),
        lambda p, x: x.masked_scatter(x > 0, p),
        lambda p, x: x.new_empty(4, 8).copy_(p),
        lambda p, x: torch.empty_like(x).fill_(1.0) * p,
        lambda p, x: F.embedding_bag(LABELS.view(2, 2), p),
        lambda p, x: p * torch.histc(x, 8),
        lambda p, x: (x * p).median(-1).values,
    ),
    "elements": (
        lambda p, x: torch.max(x, p) * torch.min(x, p),
        lambda p, x: p.clamp(min=x),
        lambda p, x: torch.multiply(p, x) - torch.true_divide(p, x.exp()),
        lambda p, x: F.prelu(x, p[0]) + F.selu(p) + F.relu6(p) + F.hardshrink(p),
        lambda p, x: F.glu(p * x),
        lambda p, x: torch.addcmul(x, p, p, value=0.3) + torch.addcdiv(x, p, x.exp()),
        lambda p, x: torch.lerp(x, p, 0.3) + torch.lerp(x, p, x),
        lambda p, x: F.softmin(p, 1) + F.logsigmoid(p) + F.tanhshrink(p),
        lambda p, x: torch.hypot(p, x) + torch.logaddexp(p, x) + torch.xlogy(x.abs(), p.exp()),
        lambda p, x: p.where(x > 0, 0.0) + torch.where(x > 0, p, x),
    ),
    "products": (
        lambda p, x: torch.einsum("...i,ij", x, p.T),
        lambda p, x: torch.einsum("ii,ij->j", p[:, :4], p),
        lambda p, x: torch.einsum("b...,b...->...", p, x),
        lambda p, x: torch.outer(p[0], x[0]),
        lambda p, x: torch.tensordot(x, p, ([1], [1])),
        lambda p, x: torch.kron(x, p[:2, :2]),
        lambda p, x: torch.addr(p, x[:, 0], x[0]) + torch.addmv(x[:, 0], p, x[0])[:, None],
        lambda p, x: torch.dot(x[0], p[0]) + torch.inner(p, x),
        lambda p, x: F.bilinear(x, p, p.view(2, 4, 4).repeat(1, 2, 2), p[0, :2]),
        lambda p, x: torch.cross(x[:, :3], p[:, :3], dim=1),
        lambda p, x: F.linear(x, torch._weight_norm(p, x[:, :1], 0)),
    ),
    "statistics": (
        lambda p, x: F.normalize(p) * x,
        lambda p, x: (p - torch.std_mean(p)[1]) / torch.std_mean(p, -1, keepdim=True)[0],
        lambda p, x: (x * p).mean() + (x * p).mean((0, 1), keepdim=True) + p.mean(-1)[:, None],
        lambda p, x: (x * p).var(0) + (x * p).std(0) + (x * p).prod(0),
        lambda p, x: p.norm(dim=-1) + p.norm() + torch.linalg.norm(x * p),
        lambda p, x: (x * p).cumprod(-1) + (x * p).cumsum(0) + (x * p).logcumsumexp(-1),
        lambda p, x: torch.quantile(x * p, 0.5, dim=-1),
        lambda p, x: torch.trapezoid(p, dim=1),
        lambda p, x: F.cosine_similarity(x, p) + F.pairwise_distance(x, p),
        lambda p, x: torch.cdist(x, p),
    ),
    "matrices": (
        lambda p, x: (p @ x.T).tril() + (p @ x.T).triu(1),
        lambda p, x: torch.linalg.inv(p[:, :4]) + torch.logdet(p @ p.T),
        lambda p, x: torch.linalg.solve(p[:, :4], x),
        lambda p, x: torch.linalg.qr(p)[0],
    ),
    "transforms": (
        lambda p, x: torch.fft.fftn(p * x, dim=(0, 1)).real,
        lambda p, x: torch.fft.irfft(torch.fft.rfft(p) * torch.fft.rfft(x), n=8),
        lambda p, x: (torch.fft.fft(p).conj() * torch.fft.fft(x)).imag,
        lambda p, x: torch.fft.fft(p).abs() + torch.fft.fftshift(p),
        lambda p, x: torch.view_as_real(
            torch.polar(torch.ones_like(x[:, :4]), x[:, :4])
            * torch.view_as_complex(p.view(4, 4, 2))
        ),
    ),
    "losses of labels": (
        lambda p, x: F.cross_entropy(p * x, x.softmax(-1), label_smoothing=0.1),
        lambda p, x: F.cross_entropy(p * x, x.softmax(-1), weight=WEIGHTS),
        lambda p, x: F.cross_entropy(p * x, x.softmax(-1), reduction="none"),
        lambda p, x: F.cross_entropy(p * x, LABELS * 2, weight=WEIGHTS),
        lambda p, x: F.cross_entropy(p * x, ignored(x), weight=WEIGHTS, label_smoothing=0.2),
        lambda p, x: F.nll_loss((p * x).log_softmax(-1), ignored(x), weight=WEIGHTS),
        lambda p, x: F.nll_loss((p * x).log_softmax(-1), LABELS, reduction="sum"),
    ),
    "losses of elements": (
        lambda p, x: F.binary_cross_entropy_with_logits(p, x.sigmoid(), pos_weight=WEIGHTS),
        lambda p, x: F.binary_cross_entropy(p.sigmoid(), x.sigmoid(), WEIGHTS),
        lambda p, x: (
            F.smooth_l1_loss(p, x) + F.huber_loss(p, x) + F.mse_loss(p, x, reduction="sum")
        ),
        lambda p, x: F.soft_margin_loss(p, x.sign()) + F.poisson_nll_loss(p, x.abs()),
        lambda p, x: F.kl_div(p.log_softmax(-1), x.softmax(-1), reduction="batchmean"),
        lambda p, x: F.triplet_margin_loss(x, p, x * 2) + F.margin_ranking_loss(x, p, x.sign()),
        lambda p, x: F.hinge_embedding_loss(p, x.sign()),
        lambda p, x: F.cosine_embedding_loss(x, p, x[:, 0].sign()),
    ),
}


class Sums(nn.Module):
    """Sum of the absolute values of all results, complex ones included."""

    def __init__(self, bodies: tuple[Body, ...]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.p = nn.Parameter(torch.randn(4, 8, generator=generator, dtype=torch.float64))
        self.bodies = bodies

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([body(self.p, x).abs().sum() for body in self.bodies]).sum()


@pytest.fixture
def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {"x": torch.randn(4, 8, generator=generator, dtype=torch.float64)}


@one_in(2)
@pytest.mark.parametrize("group", GROUPS)
def test_a_family_equals_eager_and_has_rules(group: str, batch: dict[str, Tensor]) -> None:
    program = check(Sums(GROUPS[group]), batch)
    operators_of(program)  # raises for a call without a rule


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_unrolled(kind: type[nn.Module], batch: dict[str, Tensor]) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = kind(8, 4, num_layers=2, batch_first=True, bidirectional=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.view(2, 2, 8))[0].square().sum()

    program = check(Recurrent(), batch)
    assert all(has_rule(str(t)) for t in targets(program))


def test_parts_keep_the_line_and_the_module_of_the_user(batch: dict[str, Tensor]) -> None:
    program = capture(Sums((lambda p, x: torch.kron(p, x),)), batch)
    assert {line.rpartition(":")[0] for line in program.sources.values()} == {__file__}


def test_composites_with_hidden_no_grad_parts_are_kept(batch: dict[str, Tensor]) -> None:
    """It clamps norms without gradient inside; decomposed, its gradient would differ."""
    program = capture(Sums((lambda p, x: F.cosine_similarity(x, p * 1e-9),)), batch)
    assert aten.cosine_similarity.default in targets(program)
    check(Sums((lambda p, x: F.cosine_similarity(x, p * 1e-9),)), batch)


def test_an_operator_made_of_nothing_simpler_is_missing(batch: dict[str, Tensor]) -> None:
    program = capture(Sums((lambda p, x: torch.geqrf(p)[0],)), batch)
    with pytest.raises(MissingRuleError, match=r"geqrf.*\n.*test_general_capture"):
        operators_of(program)


def test_complex_numbers_are_lifted_too(batch: dict[str, Tensor]) -> None:
    """A complex value carries gradient, and has 16 bytes per element under fp64."""
    model = Sums((lambda p, x: torch.fft.fft(p.float()).real,))
    program = capture(model.float(), batch, precision="fp64")
    transform = next(n for n in program.operators if n.target == aten._fft_r2c.default)
    assert transform.meta["val"].dtype == torch.complex128
    assert transform.name in program.has_grad


def test_sums_that_begin_with_zeros_add_nothing_to_them() -> None:
    """A partial sum of rows adds to nothing else in place."""

    def body(self: Any, x: Tensor) -> dict[str, Tensor]:
        total = torch.zeros(x.shape[1], dtype=x.dtype)
        for part in (x * self.linear.weight.sum(), x):
            total = total + part.sum(0)
        return {"loss": total.square().sum()}

    program = check(Module(body), (torch.randn(4, 8, dtype=torch.float64),))
    assert targets(program).count(torch.ops.aten.add.Tensor) == 1
