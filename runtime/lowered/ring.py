"""Attention over queries, keys and values that are all sharded alike on a group.

Rank r of p holds rows [r·s, (r+1)·s) of the query and keys [r·u, (r+1)·u), with their values. The
keys and values go round a ring: in step i, rank r has those of rank r − i, computes with them, and
meanwhile receives those of rank r − i − 1. Each step gives the attention to its keys alone, oⱼ, and
the logarithm of its sum, Lⱼ = log Σ exp(q·k). Together they are

    L = log Σⱼ exp(Lⱼ),    o = Σⱼ exp(Lⱼ − L)·oⱼ

(online softmax; H. Liu, M. Zaharia, P. Abbeel: "Ring Attention with Blockwise Transformers for
Near-Infinite Context", arXiv:2310.01889). Backward goes round once more. Flash attention's backward
takes o and L as data, so with those of all keys it gives the part of one step exactly. Gradients of
keys and values go round with them, each a step behind: every rank but their own adds its part, and
p − 1 messages bring them home. A rank computes half of its own part at first, and half beside the
last of these messages.

If causal, rows and keys of a rank are equally many. A rank sees all keys of the ranks before it,
its own up to the row, and none of the ranks after it: it skips those. So the last rank computes
most. In head-tail order (`autopar/placement/head_tail.py`) all compute as much: all rows see the
head of a rank before, and rows of the tail see all keys of a rank after.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.operators import seed_tensor
from autopar.precision import working_dtype
from autopar.runtime.groups import Group, Pending, phase
from autopar.runtime.lowered.lowered import Kept, Lowered

aten = torch.ops.aten


def _attention(
    query: Tensor, key: Tensor, value: Tensor, g: Group,
    is_causal: bool, scale: float | None, grouped: bool, folded: bool = False,
) -> tuple[Tensor, Kept]:  # fmt: skip
    """This rank's rows: b h c e, b n t e, b n t f -> b h c f. Dims before `h` may be more or fewer.

    `grouped` is `enable_gqa` of torch's operator: `h` is a multiple of `n`. `folded` says that rows
    and keys are in head-tail order.
    """
    kernel = _Kernel(1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    seen = _Seen(g.rank, is_causal, folded)
    q, k, v = map(_four_dims, (query, key, value))
    total, total_lse = q.new_empty(0), q.new_empty(0)
    for source, block in _round(g, _Block.of(k, v, k.dtype)):
        for rows, keys, causal in seen.parts(source, q.shape[-2], k.shape[-2]):
            part = block.part(keys)
            out, lse = kernel.forward(q[..., rows, :], part.key, part.value, causal)
            if source == g.rank:
                total, total_lse = out.to(working_dtype(out.dtype)), lse
            else:
                _add_part(total[..., rows, :], total_lse[..., rows], out, lse)
    out = total.to(q.dtype)
    kept = out, total_lse, g, seen, kernel
    return out.view(*query.shape[:-1], value.shape[-1]), kept


def _add_part(total: Tensor, total_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Add attention to other keys, in place."""
    both = torch.logaddexp(total_lse, lse)
    total.mul_((total_lse - both).exp_().unsqueeze(-1))
    total.addcmul_((lse - both).exp_().unsqueeze(-1), out.to(total.dtype))
    total_lse.copy_(both)


def _attention_backward(
    kept: Kept, inputs: Sequence[Tensor], gradients: Sequence[Tensor], wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    out, lse, g, seen, kernel = kept
    q, k, v = map(_four_dims, inputs)
    grad = _four_dims(gradients[0])
    wide = working_dtype(q.dtype)
    of_query = torch.zeros_like(q, dtype=wide)
    own = _Block.of(torch.zeros_like(k), torch.zeros_like(v), wide)
    coming: Pending[Tensor] | None = None
    first, last = seen.own_halves(q.shape[-2], k.shape[-2])

    def gradients_of(block: _Block, parts: Iterable[_SeenPart]) -> Iterator[tuple[slice, _Part]]:
        for rows, keys, causal in parts:
            part, sums = block.part(keys), lse[..., rows]
            mine, whole = (x[..., rows, :] for x in (grad, q)), out[..., rows, :]
            of_rows, *of_keys = kernel.backward(*mine, *part, whole, sums, causal)
            of_query[..., rows, :] += of_rows
            yield keys, _Part(*of_keys)

    with phase("backward", g.context):
        for source, block in _round(g, _Block.of(k, v, k.dtype)):
            if source == g.rank:  # some of it waits until the last gradients are on their way
                own.add(gradients_of(block, first))
                continue
            found = [*gradients_of(block, seen.parts(source, q.shape[-2], k.shape[-2]))]
            flat = torch.zeros_like(own.flat) if coming is None else coming.wait()
            others = replace(own, flat=flat)
            others.add(found)
            coming = g.shift(others.flat)
        own.add(gradients_of(_Block.of(k, v, k.dtype), last))
        if coming is not None:
            own.flat.add_(coming.wait())
    return tuple(
        part.to(x.dtype).view(x.shape) if is_wanted else None
        for part, x, is_wanted in zip((of_query, own.key, own.value), inputs, wanted, strict=True)
    )


def _four_dims(x: Tensor) -> Tensor:
    """As batch, heads, rows, features; without heads, one."""
    x = x.unsqueeze(0) if x.dim() == 2 else x
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


class _SeenPart(NamedTuple):
    """Rows of a rank, and keys of a rank that they all see, or only up to the row if causal."""

    rows: slice
    keys: slice
    is_causal: bool


@dataclass(frozen=True)
class _Seen:
    """Which rows of a rank see which keys of another."""

    rank: int
    is_causal: bool
    folded: bool

    def parts(self, source: int, n_rows: int, n_keys: int) -> Iterator[_SeenPart]:
        """Of the keys of rank `source`; nothing if no row sees one."""
        rows, keys = slice(None), slice(None)
        if self.is_causal and source != self.rank:
            if not self.folded and source > self.rank:
                return
            if self.folded and source < self.rank:
                keys = slice(0, n_keys // 2)
            elif self.folded:
                rows = slice(n_rows // 2, None)
        yield _SeenPart(rows, keys, self.is_causal and source == self.rank)

    def own_halves(self, n_rows: int, n_keys: int) -> tuple[list[_SeenPart], list[_SeenPart]]:
        """The same of its own keys, in two halves of the work."""
        rows, keys = ((slice(0, n // 2), slice(n // 2, None)) for n in (n_rows, n_keys))
        if not self.is_causal:
            first, last = ([_SeenPart(slice(None), of, False)] for of in keys)
            return first, last
        last = [_SeenPart(*pair, True) for pair in zip(rows, keys, strict=True)]
        return [_SeenPart(rows[1], keys[0], False)], last


def _round(g: Group, block: _Block) -> Iterator[tuple[int, _Block]]:
    """Each rank with its keys and values, this rank first. The next come while these are used."""
    for i in range(g.size):
        coming = g.shift(block.flat) if i + 1 < g.size else None
        yield (g.rank - i) % g.size, block
        if coming is not None:
            block = replace(block, flat=coming.wait())


class _Part(NamedTuple):
    """Some of the keys, with their values."""

    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class _Block:
    """Keys and values of a rank, or their gradients, in one message: `flat`."""

    flat: Tensor
    key_shape: torch.Size
    value_shape: torch.Size

    @staticmethod
    def of(key: Tensor, value: Tensor, dtype: torch.dtype) -> _Block:
        flat = torch.cat((key.reshape(-1), value.reshape(-1))).to(dtype)
        return _Block(flat, key.shape, value.shape)

    def add(self, parts: Iterable[tuple[slice, _Part]]) -> None:
        """Add to some of the keys, and to their values, in place."""
        for keys, added in parts:
            own = self.part(keys)
            own.key.add_(added.key)
            own.value.add_(added.value)

    def part(self, keys: slice) -> _Part:
        """Views of some of them."""
        return _Part(self.key[..., keys, :], self.value[..., keys, :])

    @property
    def key(self) -> Tensor:
        return self.flat[: self.key_shape.numel()].view(self.key_shape)

    @property
    def value(self) -> Tensor:
        return self.flat[self.key_shape.numel() :].view(self.value_shape)


@dataclass(frozen=True)
class _Kernel:
    """Attention to the keys of one step, with the logarithm of its sums.

    Flash kernels take equally many features in queries, keys and values, so the shorter ones get
    zeros, which change no score and no other result.
    """

    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """The results, and the logarithms of the sums: b h c f, b h c."""
        n = max(q.shape[-1], v.shape[-1])
        padded = (_pad(x, n) for x in (q, k, v))
        out, lse = _kernels_of(q)[0](*padded, causal, self.scale)
        return out[..., : v.shape[-1]], lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The parts of the gradients, with the results and sums of all keys."""
        n, widths = max(q.shape[-1], v.shape[-1]), [x.shape[-1] for x in (q, k, v)]
        padded = (_pad(x, n) for x in (grad, q, k, v, out))
        found = _kernels_of(q)[1](*padded, lse, causal, self.scale)
        of_q, of_k, of_v = (x[..., :width] for x, width in zip(found, widths, strict=True))
        return of_q, of_k, of_v


def _pad(x: Tensor, n: int) -> Tensor:
    return F.pad(x, (0, n - x.shape[-1])) if x.shape[-1] < n else x


Attend = Callable[..., tuple[Tensor, Tensor]]
AttendBackward = Callable[..., tuple[Tensor, Tensor, Tensor]]


def _kernels_of(x: Tensor) -> tuple[Attend, AttendBackward]:
    """The kernels for tensors such as `x`, forward and backward."""
    if x.device.type == "cpu":
        return _cpu_flash, _cpu_flash_backward
    if x.device.type == "cuda" and x.dtype in (torch.float16, torch.bfloat16):
        return _cuda_flash, _cuda_flash_backward
    return _block_attention, _block_attention_backward


def _cpu_flash(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def _cpu_flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    found: tuple[Tensor, Tensor, Tensor] = (
        aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    )
    return found


def _cuda_flash(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    k, v = _repeat_heads(k, q), _repeat_heads(v, q)
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def _cuda_flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    no_seed = torch.empty((), dtype=torch.int64, device=q.device)
    keys, values = _repeat_heads(k, q), _repeat_heads(v, q)
    of_q, of_k, of_v = aten._scaled_dot_product_flash_attention_backward(
        grad, q, keys, values, out, lse, None, None, q.shape[-2], k.shape[-2],
        0.0, causal, no_seed, no_seed, scale=scale,
    )  # fmt: skip
    return of_q, _sum_groups(of_k, k), _sum_groups(of_v, v)


def _block_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention with dropout, of which none drops (`operators/attention.py`)."""
    grouped = q.unflatten(1, (k.shape[1], -1))
    forward = torch.ops.autopar.attention_dropout_forward
    out, lse = forward(grouped, k, v, *_undropped(q, k, causal, scale))
    return out.flatten(1, 2), lse.flatten(1, 2)


def _block_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    of_rows = (x.unflatten(1, (k.shape[1], -1)) for x in (grad, out, lse, q))
    backward = torch.ops.autopar.attention_dropout_backward
    of_q, of_k, of_v = backward(*of_rows, k, v, *_undropped(q, k, causal, scale))
    return of_q.flatten(1, 2), of_k, of_v


def _undropped(q: Tensor, k: Tensor, causal: bool, scale: float) -> tuple[Any, ...]:
    """The other arguments of these operators: no mask, a seed, positions, no dropout."""
    n_rows = q.shape[-2]
    sizes = (*q.shape[:2], n_rows, k.shape[-2])
    positions = [torch.arange(n, device=q.device) for n in sizes]
    return None, seed_tensor(0).to(q.device), positions, 0.0, 0, causal, n_rows, scale


def _repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values with as many heads as the query; a group of its heads shares one."""
    n = q.shape[1] // x.shape[1]
    return x if n == 1 else x.repeat_interleave(n, dim=1)


def _sum_groups(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of what heads of the query share."""
    return grad.unflatten(1, (x.shape[1], -1)).sum(2)


def _like(
    query: Tensor, key: Tensor, value: Tensor, g: Group,
    is_causal: bool, scale: float | None, grouped: bool, folded: bool = False,
) -> Tensor:  # fmt: skip
    """Attention by the same kernel to the keys of one rank."""
    out: Tensor = F.scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, scale=scale, enable_gqa=grouped
    )
    return out


ring_attention = Lowered(_attention, _attention_backward, keeps=(0, 1, 2), like=_like)
