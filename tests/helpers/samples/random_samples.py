"""Calls of the operators that draw random numbers, and of attention to ranges, for the oracle."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.operators import seed_tensor
from tests.helpers.samples.rule_samples import Sample, bools, call, fixed, x


def positions(*shape: int) -> list[Tensor]:
    return [torch.arange(n) for n in shape]


SEED = seed_tensor(3)


def attention(
    q: tuple[int, ...], k: tuple[int, ...], mask: Tensor | None = None, *,
    is_causal: bool = False, grouped: bool = False,
) -> Sample:  # fmt: skip
    """Values are one wider than keys."""
    lead = q[:-2] if grouped else torch.broadcast_shapes(q[:-2], k[:-2])
    return call(
        x(*q), x(*k), x(*k[:-1], k[-1] + 1), mask, SEED, positions(*lead, q[-2], k[-2]), 0.4, 1,
        is_causal, q[-2], 0.3, grouped,
    )  # fmt: skip


DIAGONAL = torch.eye(4, dtype=torch.bool)
ATTENTIONS = [
    attention((4, 4, 4, 2), (4, 4, 8, 2)),
    attention((2, 4, 4, 2), (2, 4, 4, 2), is_causal=True),
    attention((4, 8, 2), (4, 4, 2), is_causal=True),
    attention((4, 2), (8, 2), is_causal=True),
    attention((2, 4, 4, 2), (2, 4, 4, 2), bools(4, 4) | DIAGONAL),
    attention((2, 4, 4, 2), (2, 4, 4, 2), bools(2, 1, 4, 4) | DIAGONAL),
    attention((2, 4, 4, 2), (2, 4, 4, 2), fixed(2, 1, 1, 4)),
    attention((4, 2), (8, 2), fixed(4, 8)),
    attention((1, 4, 4, 2), (4, 4, 4, 2), bools(4, 1, 1, 4) | DIAGONAL),
    attention((2, 4, 4, 2), (2, 1, 4, 2)),
    attention((2, 2, 2, 4, 2), (2, 2, 2, 4, 2), fixed(2, 2, 4, 4)),
    # Grouped queries: 8 heads over 4, over 2 and over 1.
    attention((2, 8, 4, 2), (2, 4, 4, 2), is_causal=True, grouped=True),
    attention((2, 8, 2, 2), (2, 2, 4, 2), fixed(2, 8, 2, 4), grouped=True),
    attention((2, 8, 2, 2), (2, 2, 4, 2), fixed(2, 1, 2, 4), grouped=True),
    attention((2, 4, 4, 2), (2, 1, 4, 2), grouped=True),
    attention((2, 4, 4, 2), (2, 4, 4, 2), grouped=True),
    attention((8, 4, 2), (4, 4, 2), grouped=True),
]


def ranges(q: tuple[int, ...], k: tuple[int, ...], *shape: int, grouped: bool = False) -> Sample:
    """Windows of three keys about each row; ranges of `shape`, and each row sees a key."""
    n_rows = torch.arange(shape[-1]).reshape(*[1] * (len(shape) - 1), -1, 1)
    first = (n_rows - 1).expand(*shape, 1).clamp(0, k[-2] - 1)
    return call(x(*q), x(*k), x(*k), first, first + 3, 0.5, 0.3, grouped)


RANGES = [
    ranges((2, 4, 8, 2), (2, 4, 8, 2), 8),
    ranges((2, 4, 4, 2), (2, 4, 8, 2), 2, 1, 4),
    ranges((2, 8, 4, 2), (2, 4, 4, 2), 4, grouped=True),
    ranges((2, 8, 4, 2), (2, 2, 4, 2), 2, 8, 4, grouped=True),
    ranges((2, 4, 4, 2), (2, 1, 4, 2), 2, 1, 4, grouped=True),
    ranges((4, 2), (8, 2), 4),
    ranges((4, 4, 2), (4, 4, 2), 1),
]

RANDOM_SAMPLES: dict[str, list[Sample]] = {
    "autopar.dropout.default": [
        call(x(4, 8), SEED, positions(4, 8), 0.4, 0),
        call(x(4, 1, 8), SEED, positions(4, 1, 8), 0.4, 1),
        call(x(4, 8, 4), SEED, positions(4, 8, 1), 0.4, 2),  # whole channels
        call(fixed(4, 8), SEED, positions(4, 8), 0.4, 3),
        call(x(), SEED, [], 0.4, 4),
    ],
    "autopar.attention_dropout.default": ATTENTIONS,
    "autopar.attention_ranges.default": RANGES,
    "autopar.count_below.default": [
        call(torch.arange(8)[None], torch.arange(4)[:, None] * 2, True),
        call(fixed(2, 1, 1, 8).abs().cumsum(-1), fixed(2, 1, 4, 1), False),
        call(fixed(1, 8).abs().cumsum(-1), fixed(2, 4, 4, 1), True),
    ],
    "autopar.uniform.default": [
        call(SEED, positions(4, 8), 0, torch.float64),
        call(SEED, positions(8, 1), 1, torch.float32),
    ],
}
