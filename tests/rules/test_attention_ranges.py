"""Attention of each row to a range of keys, beside torch's under a mask of the same keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.measured import LiveBytes
from autopar.operators import ATTENTION_RANGES, ranges, scores, workspace_bytes
from autopar.precision import working_dtype
from tests.helpers.attention_inputs import attention_inputs

SCALE = 0.4
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """Shapes of query, key and ranges; some rows see no key, some all."""

    query: Shape
    key: Shape
    ranges: Shape
    grouped: bool = False
    seen: float = 0.5

    def tensors(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
        return attention_inputs(self.query, self.key, dtype)

    def bounds(self) -> tuple[Tensor, Tensor]:
        generator, n = torch.Generator().manual_seed(1), self.key[-2]
        first = torch.randint(-1, n + 1, (*self.ranges, 1), generator=generator)
        return first, first + torch.randint(0, n, first.shape, generator=generator)

    def options(self) -> tuple[Any, ...]:
        return (*self.bounds(), self.seen, SCALE, self.grouped)

    def mask(self) -> Tensor:
        (first, after), columns = self.bounds(), torch.arange(self.key[-2])
        return (columns >= first) & (columns < after)


CALLS = {
    "rows": Call((3, 4, 5, 8), (3, 4, 6, 8), (5,)),
    "rows of a batch": Call((3, 4, 5, 8), (3, 4, 6, 8), (3, 1, 5)),
    "rows of heads": Call((3, 4, 5, 8), (3, 4, 6, 8), (4, 5)),
    "all rows alike": Call((3, 4, 5, 8), (3, 4, 6, 8), (3, 1, 1)),
    "no heads": Call((5, 8), (6, 8), (5,)),
    "no batch": Call((4, 5, 8), (4, 6, 8), (4, 5)),
    "two batch dims": Call((2, 3, 4, 5, 8), (2, 3, 4, 6, 8), (2, 1, 1, 5)),
    "grouped": Call((3, 4, 5, 8), (3, 2, 6, 8), (3, 1, 5), grouped=True),
    "grouped, rows of heads": Call((3, 4, 5, 8), (3, 2, 6, 8), (3, 4, 5), grouped=True),
    "one key head": Call((2, 3, 4, 5, 8), (2, 3, 1, 6, 8), (4, 5), grouped=True, seen=0.01),
}
# Scores per block and rows per block; the first is one block.
BLOCKS = [(1 << 20, 256), (200, 3), (30, 2), (1, 1)]


def under_a_mask(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    """In parts: rows that see nothing are 0."""
    if call.grouped:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    logits = ((q * SCALE) @ k.mT).to(working_dtype(q.dtype))
    weights = torch._safe_softmax(torch.where(call.mask(), logits, -torch.inf), -1)
    return weights.to(q.dtype) @ v


def set_blocks(monkeypatch: pytest.MonkeyPatch, size: int, rows: int) -> None:
    monkeypatch.setattr(scores, "_BLOCK_ON_CPU", size)
    monkeypatch.setattr(scores, "_ROWS", rows)


def with_gradients(out: Tensor, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, tensors, upstream)]


@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = CALLS[name]
    tensors = call.tensors()
    wanted = with_gradients(under_a_mask(*tensors, call), tensors)
    for blocks in BLOCKS:
        set_blocks(monkeypatch, *blocks)
        found = with_gradients(ATTENTION_RANGES(*tensors, *call.options()), tensors)
        for mine, right in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, right, rtol=0, atol=1e-12)


def test_torchs_own_attention() -> None:
    call = CALLS["rows of a batch"]
    tensors = call.tensors()
    seen = call.mask().any(-1, keepdim=True)
    theirs = F.scaled_dot_product_attention(*tensors, call.mask(), scale=SCALE)
    mine = ATTENTION_RANGES(*tensors, *call.options())
    torch.testing.assert_close(mine, theirs.where(seen, 0.0), rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_dtypes_round_no_worse(dtype: torch.dtype) -> None:
    """Errors against float64 have at most twice the norm of those of the parts."""
    call = Call((2, 4, 64, 16), (2, 2, 64, 16), (64,), grouped=True)
    tensors = call.tensors(dtype)
    q, k, v = (t.detach().double().requires_grad_() for t in tensors)
    found = with_gradients(ATTENTION_RANGES(*tensors, *call.options()), tensors)
    parts = with_gradients(under_a_mask(*tensors, call), tensors)
    wanted = with_gradients(under_a_mask(q, k, v, call), (q, k, v))
    for mine, theirs, right in zip(found, parts, wanted, strict=True):
        assert mine.dtype == dtype
        assert (mine - right).norm() <= 2 * (theirs - right).norm()


def test_keys_that_no_row_sees_are_not_read() -> None:
    """What would be NaN is left out."""
    q, k, v = (t.detach() for t in CALLS["rows"].tensors())
    k[..., 3:, :] = torch.nan
    first = torch.arange(5)[:, None].clamp(max=1)
    out = ATTENTION_RANGES(q, k, v, first, first + 2, 0.3, SCALE, False)
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_workspace_is_what_a_gpu_needs(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Live bytes inside the kernels; what has no scores' size (a block's queries) is left out."""
    n = 1 << 16
    set_blocks(monkeypatch, n, 32)
    monkeypatch.setattr(scores, "_BLOCK_ON_GPU", n)
    call = Call((2, 8, 512, 16), (2, 4, 512, 16), (512,), grouped=True)
    q, k, v = (t.detach() for t in call.tensors(dtype))
    q = q.unflatten(1, (4, 2))
    first = torch.arange(512).view(1, 1, 1, 512, 1) // 32 * 32
    rest = (first, first + 32, 1 / 16, SCALE)
    forward, backward = ranges.attention_ranges_forward, ranges.attention_ranges_backward
    with LiveBytes((q, k, v)) as live:
        out, lse = forward._init_fn(q, k, v, *rest)
        peaks = [live.peak_bytes - live.live_bytes]
        upstream = torch.randn_like(out)
        live.reset_peak()
        gradients = backward._init_fn(upstream, out, lse, q, k, v, *rest)
        peaks.append(live.peak_bytes - live.live_bytes)
    assert len(gradients) == 3
    said = (
        workspace_bytes(forward._opoverload, (q, k, v, *rest)),
        workspace_bytes(backward._opoverload, (upstream, out, lse, q, k, v, *rest)),
    )
    assert said == pytest.approx(peaks, rel=0.1)


@pytest.mark.parametrize("name", ["grouped, rows of heads", "no heads"])
def test_it_is_an_operator_as_torch_wants_it(name: str) -> None:
    """Its schema, its fake kernels, and numerical derivatives."""
    call = CALLS[name]
    tensors, options = call.tensors(), call.options()
    assert torch.autograd.gradcheck(lambda *t: ATTENTION_RANGES(*t, *options), tensors)
    q, k, v = (t.detach() for t in Call((3, 4, 5, 8), (3, 2, 6, 8), (5,)).tensors())
    q = q.unflatten(1, (2, 2)).requires_grad_()
    first = torch.arange(5).view(1, 1, 1, 5, 1)
    kernel = torch.ops.autopar.attention_ranges_forward.default
    arguments = (q, k.requires_grad_(), v.requires_grad_(), first, first + 2, 0.3, SCALE)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(kernel, arguments, test_utils=checks)
