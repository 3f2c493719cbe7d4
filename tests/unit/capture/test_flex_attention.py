"""`flex_attention` beside attention by matmuls: torch has no backward of it on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)
from torch.nn.attention.varlen import varlen_attn

import autopar
from autopar import MissingRuleError, NotSupportedError
from autopar.capture import capture
from autopar.operators import ATTENTION_RANGES
from tests.helpers.capture_harness import Module, check
from tests.helpers.nightly import nightly

SDPA = torch.ops.aten.scaled_dot_product_attention.default
N, WIDTH, HEADS, WINDOW = 64, 16, 4, 3
DOCUMENTS = torch.arange(N) // 3
Mod = Callable[..., Any]


def body(attend: Callable[..., Tensor], n_shared: int) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor, *rest: Tensor) -> Tensor:
        h = self.linear(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        shared = h[:, :n_shared]
        return attend(h, shared.sin(), shared.cos(), *rest).sin().sum()

    return forward


def by_flex(mask_mod: Mod | None, score_mod: Mod | None = None, **options: Any) -> Mod:
    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Any:
        mod = mask_mod
        if mask_mod is not None and rest:
            mod = lambda b, h, row, column: mask_mod(b, h, row, column, *rest)  # noqa: E731
        of_batch = len(q) if rest else None
        mask = None if mod is None else create_block_mask(mod, of_batch, None, N, N, device="cpu")
        return flex_attention(q, k, v, score_mod, mask, **options)

    return attend


def by_matmuls(mask_mod: Mod | None, score_mod: Mod | None = None) -> Mod:
    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (k, v))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        at = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
        if score_mod is not None:
            scores = score_mod(scores, *at)
        if mask_mod is not None:
            scores = torch.where(mask_mod(*at, *rest), scores, -torch.inf)
        return torch._safe_softmax(scores, -1) @ v

    return attend


def causal(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return row >= column


def window(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return (row >= column) & (row - column < WINDOW)


def documents(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Of a constant of the program."""
    return DOCUMENTS[row] == DOCUMENTS[column]


def given_documents(b: Tensor, h: Tensor, row: Tensor, column: Tensor, ids: Tensor) -> Tensor:
    return (ids[b, row] == ids[b, column]) & (row >= column)


def by_distance(score: Tensor, b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return score - (row - column).abs() * 0.5 / (h + 1)


CASES: dict[str, tuple[Mod | None, Mod | None, int, Any]] = {
    "no mask": (None, None, HEADS, SDPA),
    "causal": (causal, None, HEADS, SDPA),
    "grouped": (causal, None, 2, SDPA),
    "window": (window, None, HEADS, ATTENTION_RANGES),
    "window, grouped": (window, None, 2, ATTENTION_RANGES),
    "documents": (documents, None, HEADS, ATTENTION_RANGES),
    "documents of the batch": (given_documents, None, HEADS, SDPA),
    "scores": (causal, by_distance, HEADS, torch.ops.aten._safe_softmax.default),
    "scores, grouped": (None, by_distance, 2, torch.ops.aten._safe_softmax.default),
}


BY_DAY = ("causal", "window, grouped", "documents of the batch", "scores")


@pytest.mark.parametrize(
    "name", [n if n in BY_DAY else pytest.param(n, marks=nightly) for n in CASES]
)
def test_it_is_attention(name: str) -> None:
    mask_mod, score_mod, n_shared, operator = CASES[name]
    options = {"enable_gqa": True} if n_shared < HEADS else {}
    model = Module(body(by_flex(mask_mod, score_mod, **options), n_shared), WIDTH)
    eager = Module(body(by_matmuls(mask_mod, score_mod), n_shared), WIDTH)
    ids = (torch.randint(3, (2, N)).sort(1).values,) if name == "documents of the batch" else ()
    batch = (torch.randn(2, N, WIDTH, dtype=torch.float64), *ids)
    program = check(model, batch, eager=eager)
    (attention,) = (n for n in program.graph.nodes if n.target is operator)
    if mask_mod is causal and operator is SDPA:
        assert attention.args[3:6] == (None, 0.0, True)  # a flag, not a mask


def test_a_mask_that_is_made_before() -> None:
    """It belongs to the module, as in training scripts."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.mask: BlockMask = create_block_mask(causal, None, None, N, N, device="cpu")

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            return flex_attention(h, h.sin(), h.cos(), block_mask=self.mask).sin().sum()

    eager = Module(body(by_matmuls(causal), HEADS), WIDTH)
    check(Model(), (torch.randn(2, N, WIDTH, dtype=torch.float64),), eager=eager)


@pytest.mark.parametrize("asked", [{"return_lse": True}, {"return_aux": AuxRequest(lse=True)}])
def test_statistics_are_refused(asked: dict[str, Any]) -> None:
    model = Module(body(lambda *qkv: by_flex(causal, None, **asked)(*qkv)[0], HEADS), WIDTH)
    with pytest.raises(NotSupportedError, match="log-sum-exps"):
        capture(model, (torch.randn(2, N, WIDTH),))


def test_varlen_attention_is_refused_by_its_name() -> None:
    """torch has no kernel of it on a CPU; it is traced there all the same."""

    def forward(self: Any, x: Tensor, ends: Tensor) -> Tensor:
        h = self.linear(x).unflatten(-1, (HEADS, -1))
        out: Any = varlen_attn(h, h, h, ends, ends, N, N, window_size=(-1, 0))
        return cast(Tensor, out.sum())

    batch = torch.randn(N, WIDTH), torch.tensor([0, N // 2, N], dtype=torch.int32)
    with pytest.raises(MissingRuleError, match=r"varlen_attn(.|\n)*hint: keep rows(.|\n)*lengths="):
        autopar.plan(Module(forward, WIDTH), (1, 2), batch)
