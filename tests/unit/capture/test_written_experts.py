"""Experts as users write them become one operator; what only looks like them stays refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.errors import CaptureError
from tests.helpers.capture_harness import Module, check, targets
from tests.helpers.models.expert_models import (
    MIXTURES,
    N_TOKENS,
    WIDTH,
    Batched,
    Biased,
    Counted,
    Deep,
    Grouped,
    Halves,
    Loop,
    LoopOfStacks,
    Mixture,
)
from tests.helpers.nightly import nightly, one_in

# F.grouped_mm has no float64: a model of the same parameters computes the same without it.
EAGER: dict[type[Mixture], type[Mixture]] = {
    Grouped: Batched, Counted: Batched, Halves: LoopOfStacks,
}  # fmt: skip


SLOW = (Loop, LoopOfStacks)  # to trace


def mixtures_in(program: Any) -> Counter[str]:
    return Counter(t for t in map(str, targets(program)) if t.startswith("autopar.expert"))


def is_sorted_in(program: Any) -> bool:
    return any(".sort." in str(t) for t in targets(program))


@pytest.mark.parametrize(
    "mixture",
    [pytest.param(m, marks=nightly) if issubclass(m, SLOW) else m for m in MIXTURES],
)
def test_a_mixture_is_one_operator(mixture: type[Mixture]) -> None:
    """Of two matrices for each expert, or three; nothing is sorted by all rows."""
    torch.manual_seed(0)
    x = torch.randn(N_TOKENS, WIDTH, dtype=torch.float64)
    eager = EAGER[mixture]() if mixture in EAGER else None
    program = check(mixture(), (x,), loss_fn=lambda loss, _: loss, eager=eager)
    has_three = not issubclass(mixture, (Halves, Biased))
    name = "expert_gated_mlp" if has_three else "expert_mlp"
    assert mixtures_in(program) == {f"autopar.{name}.default": 1}
    assert not is_sorted_in(program)
    assert (torch.ops.aten.stack.default in targets(program)) == issubclass(mixture, Loop)


@nightly
def test_equal_layers_of_loops_are_each_one_operator() -> None:
    program = capture(Deep(Loop, 4), (torch.randn(N_TOKENS, WIDTH),))
    assert mixtures_in(program) == {"autopar.expert_gated_mlp.default": 4}


Mix = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


def looped(
    x: Tensor, ids: Tensor, rows: Callable[[int, Tensor, Tensor], Tensor], n: int = 2
) -> Tensor:
    """Rows of each expert, added up: of its number, and of where a token and a choice are."""
    out = torch.zeros_like(x)
    for e in range(n):
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, rows(e, token, slot))
    return out


def in_place(m: Any, x: Tensor, gates: Tensor, ids: Tensor) -> Tensor:
    """Each expert reads what those before it wrote."""
    out = x.clone()
    for e in range(2):
        token, _ = torch.where(ids == e)
        out.index_add_(0, token, m.experts[e](out[token]))
    return out


def added_once(m: Any, x: Tensor, gates: Tensor, ids: Tensor) -> Tensor:
    """A token may have an expert twice, and `+=` then adds one of them."""
    out, ids = torch.zeros_like(x), ids + 0
    for e in range(2):
        token, _ = torch.where(ids == e)
        out[token] += m.experts[e](x[token])
    return out


def of_two_orders(m: Any, x: Tensor, gates: Tensor, ids: Tensor) -> Tensor:
    """Rows are listed by slots, their gates by tokens."""
    out, chosen = torch.zeros_like(x), F.one_hot(ids, 2).permute(2, 1, 0)
    for e in range(2):
        _, token = torch.where(chosen[e])
        out.index_add_(0, token, m.experts[e](x[token]) * gates[ids == e][:, None])
    return out


OTHER_LOOPS: dict[str, Mix] = {
    "some experts": lambda m, x, g, i: looped(x, i, lambda e, t, s: m.experts[e](x[t]), 1),
    "rows together": lambda m, x, g, i: looped(
        x, i, lambda e, t, s: m.experts[e](x[t] - x[t].sum(0))
    ),
    "other functions": lambda m, x, g, i: looped(
        x, i, lambda e, t, s: m.experts[e](x[t]) if e else x[t]
    ),
    "other numbers": lambda m, x, g, i: looped(x, i, lambda e, t, s: m.experts[e](x[t]) * e),
    "indices as numbers": lambda m, x, g, i: looped(
        x, i, lambda e, t, s: m.experts[e](x[t]) * t.to(x.dtype)[:, None]
    ),
    "dropout": lambda m, x, g, i: looped(
        x, i, lambda e, t, s: F.dropout(m.experts[e](x[t]), 0.5)
    ),
    "a branch": lambda m, x, g, i: looped(
        x, i, lambda e, t, s: m.experts[e](x[t]) if t.numel() else x[t]
    ),
    "in place": in_place,
    "added once": added_once,
    "two orders": of_two_orders,
}  # fmt: skip


@one_in(4)
@pytest.mark.parametrize("mix", OTHER_LOOPS.values(), ids=OTHER_LOOPS)
def test_another_loop_is_refused_with_a_way_out(mix: Mix) -> None:
    model = type("Other", (Loop,), {"mix": mix, "n_experts": 2})()
    with pytest.raises(CaptureError, match="loop over all experts") as found:
        capture(model, (torch.randn(N_TOKENS, WIDTH),))
    assert "docs/models.md" in str(found.value)


Then = Callable[[Tensor, Tensor], Tensor]


def by_groups(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """The definition of `F.grouped_mm`."""
    numbers = torch.searchsorted(ends, torch.arange(len(rows), dtype=ends.dtype), right=True)
    return torch.bmm(rows.unsqueeze(1), matrices[numbers]).squeeze(1)


def module_of(
    product: Callable[..., Tensor], ends_of: Callable[[Tensor], Tensor], then: Then
) -> Module:
    """A module with a grouped matmul of sorted rows; `then` gets its result and the order."""

    def forward(m: Any, rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        order = ids.argsort(stable=True)
        y = then(product(m.linear(rows)[order], m.experts, ends_of(ids)), order)
        return y.pow(2).sum(), y

    module = Module(forward)
    module.experts = nn.Parameter(torch.randn(4, 4, 4))
    return module


def grouped_mm(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(rows, matrices, offs=ends)


def counted(ids: Tensor) -> Tensor:
    return (ids[:, None] == torch.arange(4)).sum(0).cumsum(0).int()


_IDS = torch.tensor([3, 0, 0, 1, 3, 3, 3, 0])
_EIGHT = torch.arange(8.0, dtype=torch.float64)[:, None]
SORTED: dict[str, tuple[Callable[[Tensor], Tensor], Then, bool]] = {
    "put back": (counted, lambda y, order: y[order.argsort()] * _EIGHT, False),
    "copied": (counted, lambda y, order: torch.zeros_like(y).index_copy(0, order, y), False),
    "added": (counted, lambda y, order: _EIGHT.expand(8, 4).index_add(0, order, y), False),
    "returned as it is": (counted, lambda y, order: y, True),
    "a row's place is read": (counted, lambda y, order: (y * _EIGHT)[order.argsort()], True),
    "rows before a row are read": (counted, lambda y, order: y.cumsum(0)[order.argsort()], True),
    "groups of other numbers": (
        lambda ids: torch.tensor([2, 4, 4, 8]), lambda y, order: y[order.argsort()], True,
    ),
    "groups of other ids": (
        lambda ids: counted(3 - ids), lambda y, order: y[order.argsort()], True,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("ends_of", "then", "is_sorted"), SORTED.values(), ids=SORTED)
def test_a_sort_stays_where_its_order_matters(
    ends_of: Callable[[Tensor], Tensor], then: Then, is_sorted: bool
) -> None:
    models = (module_of(product, ends_of, then) for product in (grouped_mm, by_groups))
    batch = torch.randn(8, 4, dtype=torch.float64), _IDS
    program = check(next(models), batch, loss_fn=lambda out, _: out[0], eager=next(models))
    assert mixtures_in(program) == {"autopar.expert_linear.default": 1}
    assert is_sorted_in(program) == is_sorted


def test_a_loop_of_two_experts_is_one_operator() -> None:
    mix: Mix = lambda m, x, g, i: looped(  # noqa: E731
        x, i, lambda e, t, s: m.experts[e](x[t]) * g[t, s, None]
    )
    model = type("Two", (Loop,), {"mix": mix, "n_experts": 2})()
    x = torch.randn(N_TOKENS, WIDTH, dtype=torch.float64)
    program = check(model, (x,), loss_fn=lambda loss, _: loss)
    assert mixtures_in(program) == {"autopar.expert_gated_mlp.default": 1}


def test_other_forms_of_grouped_matmuls_are_refused() -> None:
    """Of two lists of rows: it is the gradient of a stack of matrices."""

    def forward(m: Any, rows: Tensor, ids: Tensor) -> Tensor:
        return F.grouped_mm(m.linear(rows).T, rows, offs=counted(ids)).pow(2).sum()

    with pytest.raises(CaptureError, match=r"experts: torch.bmm\(weight\[ids\]"):
        capture(Module(forward), (torch.randn(8, 4), _IDS))
