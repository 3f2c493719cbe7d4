"""Attention with dropout as one operator, beside the same computation by separate operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from autopar.measured import LiveBytes
from autopar.operators import (
    ATTENTION_DROPOUT,
    DROPOUT,
    attention,
    random,
    scores,
    seed_tensor,
    workspace_bytes,
)
from autopar.precision import working_dtype
from tests.helpers.attention_inputs import attention_inputs

SEED = seed_tensor(3)
P, SCALE, OCCURRENCE = 0.3, 0.4, 2
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """Shapes of query and key; `mask` makes the mask."""

    query: Shape
    key: Shape
    mask: Callable[[], Tensor] | None = None
    is_causal: bool = False
    grouped: bool = False

    def tensors(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
        return attention_inputs(self.query, self.key, dtype)

    def positions(self) -> list[Tensor]:
        keys = self.query[:-2] if self.grouped else self.key[:-2]
        lead = torch.broadcast_shapes(self.query[:-2], keys)
        return [torch.arange(n) for n in (*lead, self.query[-2], self.key[-2])]

    def options(self) -> tuple[Any, ...]:
        mask = None
        if self.mask is not None:
            torch.manual_seed(1)
            mask = self.mask()
        rest = (self.is_causal, self.query[-2], SCALE, self.grouped)
        return (mask, SEED, self.positions(), P, OCCURRENCE, *rest)


def bools(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.rand(shape) < 0.5


def numbers(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape, dtype=torch.float64)


CALLS = {
    "plain": Call((3, 4, 5, 8), (3, 4, 6, 8)),
    "causal": Call((3, 4, 6, 8), (3, 4, 6, 8), is_causal=True),
    "causal, more keys": Call((3, 4, 5, 8), (3, 4, 7, 8), is_causal=True),
    "causal, fewer keys": Call((3, 4, 7, 8), (3, 4, 5, 8), is_causal=True),
    "flags, rows that see nothing": Call((3, 4, 5, 8), (3, 4, 3, 8), bools(3, 1, 5, 3)),
    "a mask per head": Call((3, 4, 5, 8), (3, 4, 6, 8), numbers(4, 5, 6)),
    "a mask of keys": Call((3, 4, 5, 8), (3, 4, 6, 8), numbers(6)),
    "no heads": Call((5, 8), (6, 8), numbers(5, 6)),
    "no batch": Call((4, 5, 8), (4, 6, 8), numbers(4, 1, 6)),
    "two batch dims": Call((2, 3, 4, 5, 8), (2, 3, 4, 6, 8), numbers(3, 1, 5, 6)),
    "broadcast": Call((1, 4, 5, 8), (3, 1, 6, 8)),
    "grouped": Call((3, 4, 5, 8), (3, 2, 6, 8), grouped=True),
    "grouped, causal": Call((3, 4, 6, 8), (3, 2, 6, 8), is_causal=True, grouped=True),
    "grouped, a mask per head": Call((3, 4, 5, 8), (3, 2, 6, 8), numbers(3, 4, 5, 6), grouped=True),
    "one key head": Call((2, 3, 4, 5, 8), (2, 3, 1, 6, 8), bools(1, 5, 6), grouped=True),
}  # fmt: skip
# Scores per block and rows per block; the first is one block.
BLOCKS = [(1 << 20, 256), (200, 3), (30, 2), (1, 1)]


def by_parts(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor, positions: list[Tensor],
    p: float, occurrence: int, is_causal: bool, n_queries: int, scale: float, grouped: bool,
) -> Tensor:  # fmt: skip
    """As `capture/rewrites/attention.py` writes it, but keys and values of groups are repeated."""
    if grouped:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = ((q * scale) @ k.mT).to(working_dtype(q.dtype))
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        is_flags = mask.dtype == torch.bool
        scores = torch.where(mask, scores, -math.inf) if is_flags else scores + mask
    weights = torch._safe_softmax(scores, -1).to(q.dtype)
    dropped: Tensor = DROPOUT(weights, seed, positions, p, occurrence)
    return dropped @ v


def set_blocks(monkeypatch: pytest.MonkeyPatch, size: int, rows: int) -> None:
    monkeypatch.setattr(scores, "_BLOCK_ON_CPU", size)
    monkeypatch.setattr(scores, "_ROWS", rows)


def with_gradients(function: Any, tensors: tuple[Tensor, ...], call: Call) -> list[Tensor]:
    out = function(*tensors, *call.options())
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=out.dtype)
    return [out.detach(), *torch.autograd.grad(out, tensors, upstream)]


@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the parts, so that bits are those of dropout."""
    call = CALLS[name]
    tensors = call.tensors()
    wanted = with_gradients(by_parts, tensors, call)
    for blocks in BLOCKS:
        set_blocks(monkeypatch, *blocks)
        found = with_gradients(ATTENTION_DROPOUT, tensors, call)
        for mine, right in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_dtypes_round_no_worse(dtype: torch.dtype) -> None:
    """Errors against float64 are at most twice those of the parts."""
    call = Call((2, 4, 64, 16), (2, 2, 64, 16), is_causal=True, grouped=True)
    tensors = call.tensors(dtype)
    exact = tuple(t.detach().double().requires_grad_() for t in tensors)
    found, parts, wanted = (
        with_gradients(function, own, call)
        for function, own in ((ATTENTION_DROPOUT, tensors), (by_parts, tensors), (by_parts, exact))
    )
    for mine, theirs, right in zip(found, parts, wanted, strict=True):
        assert mine.dtype == dtype
        assert (mine - right).abs().max() <= 2 * (theirs - right).abs().max()


def test_rows_and_heads_of_a_shard() -> None:
    """A rank with some rows and heads computes those of the whole, causal ones too."""
    call = Call((3, 4, 6, 8), (3, 4, 6, 8), is_causal=True)
    q, k, v = call.tensors()
    mask, seed, positions, *rest = call.options()
    whole = ATTENTION_DROPOUT(q, k, v, mask, seed, positions, *rest)
    rows = torch.tensor([1, 3, 4])
    own = [positions[0], positions[1][2:], rows, positions[3]]
    part = ATTENTION_DROPOUT(q[:, 2:, rows], k[:, 2:], v[:, 2:], mask, seed, own, *rest)
    torch.testing.assert_close(part, whole[:, 2:, rows], rtol=0, atol=1e-14)


def test_no_rows() -> None:
    call = Call((0, 4, 6, 8), (0, 4, 6, 8))
    found = with_gradients(ATTENTION_DROPOUT, call.tensors(), call)
    assert [tuple(x.shape) for x in found] == [
        (0, 4, 6, 7), (0, 4, 6, 8), (0, 4, 6, 8), (0, 4, 6, 7)
    ]  # fmt: skip


def test_nothing_of_the_size_of_the_weights_is_kept() -> None:
    call = Call((2, 4, 64, 8), (2, 4, 64, 8), is_causal=True)
    kept: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        ATTENTION_DROPOUT(*call.tensors(), *call.options())
    assert kept and max(t.numel() for t in kept) == 2 * 4 * 64 * 8


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_workspace_is_what_a_gpu_needs(
    dtype: torch.dtype, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Live bytes inside the kernels, with the blocks of a GPU."""
    n = 1 << 16
    monkeypatch.setattr(random, "_BLOCK_ON_CPU", n)
    set_blocks(monkeypatch, n, 32)
    monkeypatch.setattr(scores, "_BLOCK_ON_GPU", n)
    call = Call((2, 8, 128, 16), (2, 4, 128, 16), is_causal=is_causal, grouped=True)
    q, k, v = (t.detach() for t in call.tensors(dtype))
    q = q.unflatten(1, (4, 2))
    mask, *rest = call.options()[:-1]
    forward, backward = attention.attention_dropout_forward, attention.attention_dropout_backward
    with LiveBytes((q, k, v)) as live:
        out, lse = forward._init_fn(q, k, v, mask, *rest)
        peaks = [live.peak_bytes - live.live_bytes]
        upstream = torch.randn_like(out)
        live.reset_peak()
        gradients = backward._init_fn(upstream, out, lse, q, k, v, mask, *rest)
        peaks.append(live.peak_bytes - live.live_bytes)
    assert len(gradients) == 3
    said = (
        workspace_bytes(forward._opoverload, (q, k, v)),
        workspace_bytes(backward._opoverload, (upstream, out, lse, q, k, v)),
    )
    assert said == pytest.approx(peaks, rel=0.15)
    assert workspace_bytes(DROPOUT, (q,)) == 0


SMALL = {
    "grouped, causal": Call((2, 4, 3, 3), (2, 2, 3, 3), is_causal=True, grouped=True),
    "a mask per head": Call((2, 2, 3, 3), (2, 2, 3, 3), numbers(2, 3, 3)),
}


@pytest.mark.parametrize("name", SMALL)
def test_it_is_an_operator_as_torch_wants_it(name: str) -> None:
    """Its schema, its fake kernels, and numerical derivatives."""
    call = SMALL[name]
    tensors, options = call.tensors(), call.options()
    assert torch.autograd.gradcheck(lambda *t: ATTENTION_DROPOUT(*t, *options), tensors)
    q, k, v = (t.detach() for t in tensors)
    q = q.unflatten(1, (k.shape[1], -1)).requires_grad_()
    mask, *rest = options[:-1]
    mask = None if mask is None else mask[None, :, None]
    kernel = torch.ops.autopar.attention_dropout_forward.default
    arguments = (q, k.requires_grad_(), v.requires_grad_(), mask, *rest)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(kernel, arguments, test_utils=checks)
