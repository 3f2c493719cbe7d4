"""Random numbers that depend on an element's global index, not on the rank that draws them.

The 64 random bits of an element are a hash of the step's seed, of the number of the random operator
in the program (`occurrence`), and of the element's index (i_0, ..., i_n) in the *global* tensor:

    bits = mix(key + Σ_k γ_k i_k)          key and odd γ_k from seed and occurrence

So ranks that hold the same element draw the same bits, and ranks of different shards draw
independent ones. A step is the same on every mesh, with any stages and microbatches. Operators get
the indices as `positions`, one int64 vector per dim: those of the elements that the rank holds. A
vector of length 1 draws once for the whole dim.

In one dim this is SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number
generators", OOPSLA 2014). `mix` is its finalizer: a bijection in which every input bit changes half
of the output bits. `_mixed` leaves its last step out: that step changes only the 33 lowest bits,
and elements use the leading ones.

Backward keeps only seed and positions: the gradient of dropout is dropout of the gradient, with
the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_WORD = 64
_ALL = (1 << _WORD) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: consecutive numbers get keys far apart
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31

# Elements per block. On the CPU a block is 8 bytes per element, twice, and stays in a core's cache.
# A GPU runs one kernel per operation and needs blocks that fill it.
_BLOCK_ON_CPU = 1 << 15
_BLOCK_ON_GPU = 1 << 22


@dataclass
class Stream:
    """The seeds of a run's steps: `base` is the user's seed, `n_steps` counts finished steps."""

    base: int
    n_steps: int = 0

    @property
    def seed(self) -> int:
        """The seed of the next step."""
        return step_seed(self.base, self.n_steps)


def step_seed(base: int, step: int) -> int:
    """The int64 seed of one step; neighbouring steps and bases get unrelated seeds."""
    return _signed(_mix(_mix(base + _GOLDEN) + step * _GOLDEN))


def seed_tensor(seed: int) -> Tensor:
    """The seed as the operators take it. It is on the CPU, where reading it needs no sync."""
    return torch.tensor(seed, dtype=torch.int64)


@torch.library.custom_op("autopar::dropout", mutates_args=())
def dropout(x: Tensor, seed: Tensor, positions: list[Tensor], p: float, occurrence: int) -> Tensor:
    """x / (1 - p) with probability 1 - p, else 0."""
    kept = kept_elements(*element_keys(seed, positions, occurrence, x.device), p)
    return (x * kept.view([len(vector) for vector in positions])).mul_(1 / (1 - p))


@dropout.register_fake
def _(x: Tensor, seed: Tensor, positions: list[Tensor], p: float, occurrence: int) -> Tensor:
    return x * x.new_empty([len(vector) for vector in positions], dtype=torch.bool)


def _keep_positions(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, seed, positions, ctx.p, ctx.occurrence = inputs
    ctx.save_for_backward(seed, *positions)


def _dropout_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    seed, *positions = ctx.saved_tensors
    result = dropout(gradient, seed, positions, ctx.p, ctx.occurrence)
    return result, None, [None] * len(positions), None, None


dropout.register_autograd(_dropout_backward, setup_context=_keep_positions)


@torch.library.custom_op("autopar::uniform", mutates_args=())
def uniform(seed: Tensor, positions: list[Tensor], occurrence: int, dtype: torch.dtype) -> Tensor:
    """Uniform multiples of `dtype`'s precision in [0, 1); one dim per vector of `positions`."""
    n_bits = min(round(1 - math.log2(torch.finfo(dtype).eps)), _WORD - 1)
    out = positions[0].new_empty([len(vector) for vector in positions], dtype=dtype)
    flat = out.view(-1)
    for block, bits in _blocks(seed, positions, occurrence, out.device):
        whole = bits.bitwise_right_shift_(_WORD - n_bits).bitwise_and_((1 << n_bits) - 1)
        torch.mul(whole, 2.0**-n_bits, out=flat[block])
    return out


@uniform.register_fake
def _(seed: Tensor, positions: list[Tensor], occurrence: int, dtype: torch.dtype) -> Tensor:
    return positions[0].new_empty([len(vector) for vector in positions], dtype=dtype)


DROPOUT = torch.ops.autopar.dropout.default
UNIFORM = torch.ops.autopar.uniform.default


def _blocks(
    seed: Tensor, positions: Sequence[Tensor], occurrence: int, device: torch.device
) -> Iterator[tuple[slice, Tensor]]:
    """Ranges of the flattened result with their bits; each range is some rows of the last dim."""
    return _blocks_of(*element_keys(seed, positions, occurrence, device))


def element_keys(
    seed: Tensor, positions: Sequence[Tensor], occurrence: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(rows, columns): element (i, j) has the bits `mix(rows[i] + columns[j])`.

    `columns` is for the last dim, `rows` for all others, flattened. So a part of the elements can
    be drawn from a part of both (`kept_elements`).
    """
    key = _mix(int(seed) + (occurrence + 1) * _GOLDEN)
    rows = torch.full((1,), _signed(key), device=device)
    columns = torch.zeros(1, dtype=torch.int64, device=device)
    for k, vector in enumerate(positions):
        rows = (rows[:, None] + columns).flatten()
        columns = vector * _signed(_mix(key + (k + 1) * _GOLDEN) | 1)
    return rows, columns


def kept_elements(rows: Tensor, columns: Tensor, p: float) -> Tensor:
    """Which elements a dropout keeps: flags [rows, columns]."""
    kept = torch.empty(len(rows), len(columns), dtype=torch.bool, device=rows.device)
    flat, limit = kept.view(-1), _limit(1 - p)
    for block, bits in _blocks_of(rows, columns):
        torch.lt(bits, limit, out=flat[block])
    return kept


def _blocks_of(rows: Tensor, columns: Tensor) -> Iterator[tuple[slice, Tensor]]:
    size = _BLOCK_ON_CPU if rows.device.type == "cpu" else _BLOCK_ON_GPU
    width = len(columns)
    n_rows = max(size // max(width, 1), 1)
    for first in range(0, len(rows), n_rows):
        some = rows[first : first + n_rows, None] + columns
        yield slice(first * width, first * width + some.numel()), _mixed(some.view(-1))


def _mixed(x: Tensor) -> Tensor:
    """The leading bits of `_mix`, in place. int64 arithmetic wraps around."""
    scratch = torch.empty_like(x)
    for shift, multiplier in _ROUNDS:
        torch.bitwise_right_shift(x, shift, out=scratch)
        x ^= scratch.bitwise_and_(_ALL >> shift)  # clears the copies of the sign bit
        x *= _signed(multiplier)
    return x


def _mix(x: int) -> int:
    """SplitMix64's finalizer, for unsigned numbers."""
    x &= _ALL
    for shift, multiplier in _ROUNDS:
        x = (x ^ (x >> shift)) * multiplier & _ALL
    return x ^ (x >> _LAST_SHIFT)


def _signed(x: int) -> int:
    """The int64 with the bits of an unsigned number."""
    return x - (1 << _WORD) if x >> (_WORD - 1) else x


def _limit(probability: float) -> int:
    """The int64 number that random bits, as int64, are below with this probability."""
    half = 1 << (_WORD - 1)
    return min(round(probability * (1 << _WORD)), _ALL) - half
