"""Documents that are packed into rows of tokens: which pairs of queries and keys they show.

    lengths    (tokens, share): so many of all documents have so many tokens, as in a histogram of
               a dataset; shares are of documents, not of tokens

A row of s tokens is filled with documents, one drawn after the other; the last is cut. Of the pairs
that a row would see as one document, documents of n_1, n_2, ... tokens show

    shown = sum n_i^2 / s^2

`mean_shown` is its mean over rows: with f(r) of r tokens that are left,

    f(r) = sum over lengths of share (n^2 + f(r - n)),  n = min(tokens, r),  mean = f(s) / s^2

`row_loads` are the rows of one step, over that mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from autopar.arrays import Array
from autopar.errors import OptionError
from autopar.option_values import is_int

Lengths: TypeAlias = tuple[tuple[int, float], ...]

_HINT = "lengths=[(1024, 0.5), (8192, 0.5)]: half of all documents have 1,024 tokens"
_ROUNDING = 0.02  # shares may be given in percent


def parse_lengths(value: Any) -> Lengths:
    """Pairs, or a text such as `1024:0.5,8192:0.5`; () for None. Shares add up to 1 afterwards.

    Raises `OptionError` for what is no distribution.
    """
    if value is None:
        return ()
    if isinstance(value, str):
        value = [_read_pair(word) for word in value.split(",")]
    pairs = list(value) if isinstance(value, Iterable) else [value]
    found: dict[int, float] = {}
    for pair in pairs:
        tokens, share = _check_pair(pair)
        if tokens in found:
            raise OptionError(f"lengths= has {tokens} tokens twice", hint=_HINT)
        found[tokens] = share
    total = math.fsum(found.values())
    if found and abs(total - 1) > _ROUNDING:
        raise OptionError(
            f"the shares of lengths= add up to {total:.4g}, not to 1",
            hint="a share is of all documents; divide counts by their sum",
        )
    return tuple((tokens, share / total) for tokens, share in sorted(found.items()))


def _read_pair(word: str) -> tuple[Any, ...]:
    tokens, _, share = word.partition(":")
    try:
        return int(tokens), float(share)
    except ValueError:
        raise OptionError(
            f"{word!r} is not TOKENS:SHARE", hint="lengths 1024:0.5,8192:0.5"
        ) from None


def _check_pair(pair: Any) -> tuple[int, float]:
    items = tuple(pair) if isinstance(pair, Iterable) else ()
    if len(items) != 2:
        raise OptionError(f"lengths= has pairs of tokens and share, not {pair!r}", hint=_HINT)
    tokens, share = items
    if not is_int(tokens) or tokens < 1:
        raise OptionError(f"a document has 1 token or more, not {tokens!r}", hint=_HINT)
    is_number = is_int(share) or isinstance(share, float)
    if not is_number or not 0 < share <= 1:
        raise OptionError(
            f"{share!r} of all documents with {tokens} tokens: a share is above 0, and 1 at most",
            hint=_HINT,
        )
    return tokens, float(share)


@lru_cache(maxsize=256)
def mean_shown(lengths: Lengths, n_tokens: int) -> float:
    """`shown` of a row of so many tokens, on average."""
    shortest = min(lengths[0][0], n_tokens)
    left = np.zeros(n_tokens + 1)
    for start in range(0, n_tokens, shortest):  # none of these reads another of them
        r = np.arange(start + 1, min(start + shortest, n_tokens) + 1)
        for tokens, share in lengths:
            n = np.minimum(tokens, r)
            left[r] += share * (n.astype(float) ** 2 + left[r - n])
    return float(left[n_tokens]) / n_tokens**2


@lru_cache(maxsize=256)
def row_loads(lengths: Lengths, n_tokens: int, n_rows: int) -> Array:
    """`shown` of each row of a step over the mean. Rows are drawn, the same ones each time, and
    scaled so that their mean is 1."""
    draw = np.random.default_rng(0)
    tokens, shares = np.array([n for n, _ in lengths]), np.array([share for _, share in lengths])
    left, shown = np.full(n_rows, n_tokens), np.zeros(n_rows)
    while left.any():
        n = np.minimum(draw.choice(tokens, n_rows, p=shares), left)
        shown += n.astype(float) ** 2
        left -= n
    loads: Array = shown / shown.mean()
    return loads
