"""Models that draw random numbers: every plan draws the same ones, every step new ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import autopar
from autopar.capture import capture, reference_step
from autopar.errors import MissingRuleError, NotSupportedError
from autopar.operators import ATTENTION_DROPOUT, DROPOUT, Stream
from autopar.passes.analysis import Analysis, find_runs
from autopar.program.graph import Program
from autopar.runtime.launch import WorkerPool
from tests.helpers.capture_harness import Module
from tests.helpers.jobs import tokens
from tests.helpers.models.dropout_models import (
    BATCH,
    Noisy,
    P,
    dropped_gpt2,
    rows,
    train_interrupted,
)
from tests.helpers.nightly import one_in


def test_rows_of_masks_are_rows_of_the_batch() -> None:
    """Vectors of positions along the batch dim are cut as the batch; equally long ones are not."""
    analysis = Analysis.of(capture(Noisy(), rows(0), precision="fp64"))
    assert analysis.batch.broken_at is None
    cut = [name for name in analysis.program.constants if name in analysis.batch.cells]
    assert 0 < len(cut) < len(analysis.program.constants)


def test_equal_positions_are_delivered_once() -> None:
    """GPT-2 has 7 dropouts here, of tensors of 3 and 4 dims, and 5 different vectors."""
    plan = autopar.plan(dropped_gpt2(), (1, 1), tokens(0), microbatches=2)
    assert plan.bound is not None
    delivered = [d for d in plan.bound.pipeline.stages[0].delivered if d.source.startswith("pos")]
    assert len(plan.bound.analysis.program.constants) > 20
    lengths = [(d.local.shape, d.batch_cell) for d in delivered]
    assert len(set(lengths)) == len(lengths) <= 5


def test_layers_with_dropout_are_alike() -> None:
    """Each layer draws its own bits, yet the joint search plans only one layer."""
    model = dropped_gpt2(6)
    (run,) = find_runs(Analysis.of(capture(model, tokens(0), precision="fp64")))
    assert run.count == 6


def drawn(body: Callable[[Tensor], Any], seed: int = 0, x: Tensor | None = None) -> Any:
    """The output of `body` in the captured program; the input is ones by default."""
    model = Module(lambda self, x: body(x))
    x = torch.ones(BATCH, 8, 512) if x is None else x
    program = capture(model, (x,), training=False)
    _, outputs = reference_step(program, dict(model.named_parameters()), {"0": x}, seed=seed)
    return outputs


def share_of_zeros(y: Tensor) -> float:
    return (y == 0).double().mean().item()


def test_dropout_scales_what_it_keeps() -> None:
    y = drawn(lambda x: F.dropout(x, P))
    assert abs(share_of_zeros(y) - P) < 0.01
    assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / (1 - P)).item()}


def test_masks_differ_between_steps_layers_and_rows() -> None:
    def body(x: Tensor) -> tuple[Tensor, Tensor]:
        return F.dropout(x, 0.5), F.dropout(x, 0.5)

    stream, later = Stream(3), Stream(3, 1)
    one, other = drawn(body, stream.seed)
    masks = [one, other, *drawn(body, later.seed), one.roll(1, 0), one.roll(1, 1)]
    for a, b in itertools.combinations([m != 0 for m in masks], 2):
        assert abs((a == b).double().mean() - 0.5) < 0.01
    assert torch.equal(one, drawn(body, stream.seed)[0])


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_nothing_or_all(p: float) -> None:
    y = drawn(lambda x: F.dropout(x, p))
    assert share_of_zeros(y) == p


def test_whole_channels() -> None:
    y = drawn(lambda x: F.dropout1d(x, P))
    assert torch.equal(y, y[..., :1].expand_as(y)) and 0 < share_of_zeros(y) < 0.6


def test_alpha_dropout_keeps_mean_and_variance() -> None:
    x = torch.randn(BATCH, 8, 512, generator=torch.Generator().manual_seed(0))
    elements = drawn(lambda x: F.alpha_dropout(x, P, True), x=x)
    channels = drawn(lambda x: F.feature_alpha_dropout(x, P, True), x=x)
    for y, n in ((elements, x.numel()), (channels, x.shape[:2].numel())):
        assert abs(y.mean()) < 5 / n**0.5 and abs(y.var() - 1) < 20 / n**0.5


def test_noise_has_the_moments_it_is_asked_for() -> None:
    """Mean and variance of 2^16 numbers; randint's values are checked in `test_integers`."""
    wanted: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
        "rand_like": (torch.rand_like, 0.5, 1 / 12),
        "rand": (lambda x: torch.rand(x.shape), 0.5, 1 / 12),
        "uniform_": (lambda x: torch.empty_like(x).uniform_(2, 4), 3, 4 / 12),
        "randn": (lambda x: torch.randn(x.shape), 0, 1),
        "normal_": (lambda x: torch.empty_like(x).normal_(1, 3), 1, 9),
        "normal": (lambda x: torch.normal(2 * x, 0.5), 2, 0.25),
        "exponential_": (lambda x: torch.empty_like(x).exponential_(2), 0.5, 0.25),
        "bernoulli": (lambda x: torch.bernoulli(x * 0.25), 0.25, 3 / 16),
        "bernoulli_": (lambda x: torch.empty_like(x).bernoulli_(0.25), 0.25, 3 / 16),
        "randint": (lambda x: torch.randint_like(x, 6), 2.5, 35 / 12),
    }
    for name, (draw, mean, variance) in wanted.items():
        y = drawn(draw).double()
        sigma = math.sqrt(variance)
        assert abs(y.mean() - mean) < 5 * sigma / 256, name
        assert abs(y.var() / variance - 1) < 0.05, name


def test_integers() -> None:
    y = drawn(lambda x: x * torch.randint(-2, 3, x.shape))
    assert set(y.unique().tolist()) == {-2.0, -1.0, 0.0, 1.0, 2.0}
    order = drawn(lambda x: (x.sum(), torch.randperm(64)))[1]
    assert sorted(order.tolist()) == list(range(64)) != order.tolist()


def test_a_scalar_and_rrelu() -> None:
    assert 0 < drawn(lambda x: x[0, 0, 0] * torch.rand([])).item() < 1
    y = -drawn(lambda x: F.rrelu(-x, 0.2, 0.4, training=True))
    assert 0.2 <= y.min() < 0.21 and 0.39 < y.max() <= 0.4


def test_evaluation_draws_nothing() -> None:
    program = capture(dropped_gpt2(), {"input_ids": tokens(0)["input_ids"]}, training=False)
    assert program.seed is None and DROPOUT not in [n.target for n in program.operators]


def test_what_cannot_be_drawn_is_refused() -> None:
    mine = torch.Generator()
    with pytest.raises(NotSupportedError, match=r"draws from a torch\.Generator"):
        drawn(lambda x: x * torch.rand(x.shape, generator=mine))
    with pytest.raises(MissingRuleError, match="multinomial"):
        autopar.plan(
            Module(lambda self, x: (self.linear(x) * torch.multinomial(x, 4)).sum()),
            (1, 2), (torch.rand(2, 4),),
        )  # fmt: skip


NEVER = 1e-300  # a probability that drops nothing
MASKS: dict[str, Callable[[], dict[str, Any]]] = {
    "none": dict,
    "causal": lambda: {"is_causal": True},
    "scale": lambda: {"scale": 0.7},
    "bool": lambda: {"attn_mask": torch.rand(3, 1, 5, 6) < 0.5},
    "row that sees nothing": lambda: {"attn_mask": torch.arange(5)[:, None] != torch.zeros(1, 6)},
    "added": lambda: {"attn_mask": torch.randn(4, 5, 6, dtype=torch.float64)},
    "grouped": lambda: {"enable_gqa": True},
}


class Attention(torch.nn.Module):
    """Attention of three parameters, with dropout, weighted by the input; `learned`: its mask is a
    parameter too."""

    def __init__(self, p: float, name: str, learned: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.p, self.options = p, MASKS[name]()
        heads = 2 if name == "grouped" else 4
        shapes = (3, 4, 5, 8), (3, heads, 6, 8), (3, heads, 6, 7)
        self.q, self.k, self.v = (torch.nn.Parameter(torch.randn(s).double()) for s in shapes)
        if learned:
            self.mask = torch.nn.Parameter(self.options.pop("attn_mask"))
        self.learned = learned

    def attended(self, p: float) -> Tensor:
        options = self.options | ({"attn_mask": self.mask} if self.learned else {})
        return F.scaled_dot_product_attention(self.q, self.k, self.v, dropout_p=p, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.attended(self.p)


class InParts(Attention):
    """The same as a formula: products, a softmax, and dropout of the weights."""

    def attended(self, p: float) -> Tensor:
        mask = self.options.get("attn_mask")
        if self.options.get("is_causal"):
            mask = torch.ones(5, 6, dtype=torch.bool).tril()
        n = self.q.shape[1] // self.k.shape[1]
        k, v = (t.repeat_interleave(n, 1) for t in (self.k, self.v))
        scores = self.q @ k.mT * self.options.get("scale", self.q.shape[-1] ** -0.5)
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -torch.inf)
        elif mask is not None:
            scores = scores + mask
        return F.dropout(scores.softmax(-1).nan_to_num(0.0), p) @ v


X = torch.randn(3, 4, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def captured_attention(model: Attention) -> Program:
    return capture(model, (X,), loss_fn=lambda outputs, batch: outputs.sum())


def loss_and_gradients(program: Program, model: Attention) -> list[Tensor]:
    loss, _ = reference_step(program, dict(model.named_parameters()), {"0": X}, seed=5)
    assert loss is not None
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@one_in(3)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("p", [NEVER, P])
def test_attention_is_its_parts(p: float, name: str) -> None:
    """Values and gradients are those of the formula; the same seed drops the same weights."""
    model = Attention(p, name)
    program, parts = captured_attention(model), captured_attention(InParts(p, name))
    targets = [[n.target for n in one.operators] for one in (program, parts)]
    assert ATTENTION_DROPOUT in targets[0] and DROPOUT in targets[1]
    found = loss_and_gradients(program, model)
    torch.testing.assert_close(found, loss_and_gradients(parts, model), rtol=1e-12, atol=1e-12)
    if p == NEVER:
        loss = (model.attended(0) * X).sum()
        wanted = [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_the_audit_says_what_became_of_attention() -> None:
    (note,) = captured_attention(Attention(P, "bool")).audit.replaced
    assert (note.what, note.why) == ("attention with dropout", "fused, with dropout by position")
    assert note.where is not None and Path(__file__).name in note.where
    assert captured_attention(Attention(0.0, "bool")).audit.replaced == ()


@pytest.mark.parametrize(("p", "learned"), [(P, True), (1.0, False)])
def test_what_is_not_fused_is_said(p: float, learned: bool) -> None:
    """A learned mask has a gradient, and dropout of everything draws nothing."""
    model = Attention(p, "added", learned)
    program = captured_attention(model)
    assert ATTENTION_DROPOUT not in [n.target for n in program.operators]
    (note,) = program.audit.replaced
    assert "kept for backward" in note.why
    assert ("its mask has a gradient" in note.why) == learned
    assert all(g.isfinite().all() for g in loss_and_gradients(program, model))


def test_a_resumed_run_draws_what_it_would_have(
    workers: Callable[[int], WorkerPool], tmp_path: Any
) -> None:
    """The module that resumes was made under another seed, which makes no difference."""
    for straight, resumed in workers(2).run(train_interrupted, 5, str(tmp_path / "checkpoint")):
        assert straight == resumed
