"""What each collective costs: symbolic formulas, one table, each with its source.

The alpha-beta-gamma model: a message of n bytes takes alpha + n beta, summing n bytes takes
n gamma. Symbols: `p` ranks, `L` = ceil(log2 p), `n` bytes, `alpha` seconds, `beta` and
`gamma` seconds per byte. n is NCCL's size: all_reduce its buffer, all_gather its output,
reduce_scatter its input, all_to_all the local send buffer; broadcast, reduce, scatter and
gather the root's whole buffer; send_recv the message.

`collectives.py` compiles the table and takes the least time over the algorithms that are
valid for p. The minimum keeps, for every link, size and p,

    all_reduce(n) = reduce_scatter(n) + all_gather(n)

because all three are offered by the same two algorithms (ring, recursive halving/doubling).
The planner breaks ties by it: a reduce_scatter and an all_gather must never look dearer or
cheaper than the all_reduce that they replace. All-reduce algorithms without such halves are
therefore `printed_only`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import sympy

from autopar.errors import OptionError

CollectiveKind = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "scatter",
    "gather",
    "send_recv",
]
KINDS: tuple[str, ...] = get_args(CollectiveKind)

p, L, n, alpha, beta, gamma = SYMBOLS = sympy.symbols("p L n alpha beta gamma", positive=True)

_THAKUR = (
    "R. Thakur, R. Rabenseifner, W. Gropp: Optimization of Collective Communication "
    "Operations in MPICH, Int. J. High Performance Computing Applications 19(1), 2005"
)
_RABENSEIFNER = (
    "R. Rabenseifner: Optimization of Collective Reduction Operations, ICCS 2004; also in "
    + _THAKUR
)
_SANDERS = (
    "P. Sanders, J. Speck, J. L. Träff: Two-tree algorithms for full bandwidth broadcast, "
    "reduction and scan, Parallel Computing 35, 2009"
)
_NO_HALVES = (
    "not in the minimum: it is no reduce_scatter followed by an all_gather, and would break "
    "all_reduce(n) = reduce_scatter(n) + all_gather(n)"
)


@dataclass(frozen=True)
class Formula:
    """One algorithm: its time in the symbols above, where it comes from, when it is valid.

    `printed_only` is empty, or says why `collectives.py` leaves the algorithm out.
    """

    expression: sympy.Expr
    source: str
    power_of_two: bool = False
    printed_only: str = ""


_SHARE = (p - 1) / p  # the part of a buffer that is not already in place
# k blocks on each of two trees of height L: (2L + 2k)(alpha + n beta / 2k), at the best k.
_TWO_TREE = (sympy.sqrt(2 * L * alpha) + sympy.sqrt(n * beta)) ** 2

FORMULAS: dict[tuple[str, str], Formula] = {
    ("all_reduce", "ring"): Formula(
        2 * (p - 1) * alpha + 2 * _SHARE * n * beta + _SHARE * n * gamma, _THAKUR
    ),
    ("all_reduce", "halving_doubling"): Formula(
        2 * L * alpha + 2 * _SHARE * n * beta + _SHARE * n * gamma,
        _RABENSEIFNER,
        power_of_two=True,
    ),
    ("all_reduce", "recursive_doubling"): Formula(
        L * (alpha + n * beta + n * gamma), _THAKUR, power_of_two=True, printed_only=_NO_HALVES
    ),
    ("all_reduce", "double_tree"): Formula(
        2 * _TWO_TREE + n * gamma, _SANDERS, printed_only=_NO_HALVES
    ),
    ("all_gather", "ring"): Formula((p - 1) * alpha + _SHARE * n * beta, _THAKUR),
    ("all_gather", "recursive_doubling"): Formula(
        L * alpha + _SHARE * n * beta, _THAKUR, power_of_two=True
    ),
    ("reduce_scatter", "ring"): Formula(
        (p - 1) * alpha + _SHARE * n * beta + _SHARE * n * gamma, _THAKUR
    ),
    ("reduce_scatter", "recursive_halving"): Formula(
        L * alpha + _SHARE * n * beta + _SHARE * n * gamma, _THAKUR, power_of_two=True
    ),
    ("all_to_all", "pairwise"): Formula((p - 1) * alpha + _SHARE * n * beta, _THAKUR),
    ("all_to_all", "bruck"): Formula(
        L * alpha + L * n / 2 * beta,
        "J. Bruck et al., IEEE Trans. Parallel and Distributed Systems 8(11), 1997; also in "
        + _THAKUR,
        power_of_two=True,
    ),
    ("broadcast", "binomial_tree"): Formula(L * (alpha + n * beta), _THAKUR),
    ("broadcast", "scatter_all_gather"): Formula(
        (L + p - 1) * alpha + 2 * _SHARE * n * beta, _THAKUR
    ),
    ("broadcast", "double_tree"): Formula(_TWO_TREE, _SANDERS),
    ("reduce", "binomial_tree"): Formula(L * (alpha + n * beta + n * gamma), _THAKUR),
    ("reduce", "reduce_scatter_gather"): Formula(
        (L + p - 1) * alpha + 2 * _SHARE * n * beta + _SHARE * n * gamma, _RABENSEIFNER
    ),
    ("reduce", "double_tree"): Formula(_TWO_TREE + n * gamma, _SANDERS),
    ("scatter", "binomial_tree"): Formula(L * alpha + _SHARE * n * beta, _THAKUR),
    ("gather", "binomial_tree"): Formula(L * alpha + _SHARE * n * beta, _THAKUR),
    ("send_recv", "direct"): Formula(
        alpha + n * beta,
        "R. W. Hockney: The communication challenge for MPP, Parallel Computing 20(3), 1994",
    ),
}


def formula(kind: str, algorithm: str) -> sympy.Expr:
    """The time of `algorithm` for `kind`, in `p`, `L`, `n`, `alpha`, `beta`, `gamma`.

    Raises:
        OptionError: there is no such collective, or it has no such algorithm.
    """
    require_kind(kind)
    if (kind, algorithm) not in FORMULAS:
        raise OptionError(
            f"{kind} has no algorithm {algorithm!r}", hint=f"it has {', '.join(algorithms(kind))}"
        )
    return FORMULAS[kind, algorithm].expression


def algorithms(kind: str, n_ranks: int | None = None) -> tuple[str, ...]:
    """The algorithms of `kind`; with `n_ranks`, those that the minimum over it ranges over."""
    names = []
    for (of_kind, name), entry in FORMULAS.items():
        wrong_size = n_ranks is not None and entry.power_of_two and n_ranks & (n_ranks - 1)
        left_out = n_ranks is not None and entry.printed_only
        if of_kind == kind and not wrong_size and not left_out:
            names.append(name)
    return tuple(names)


def require_kind(kind: str) -> None:
    """Raise `OptionError` unless `kind` is a collective with formulas."""
    if kind not in KINDS:
        raise OptionError(f"unknown collective {kind!r}", hint=f"it is one of {', '.join(KINDS)}")
