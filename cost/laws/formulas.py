"""What each collective costs: a table of symbolic formulas, each with its source.

The alpha-beta-gamma model: a message of n bytes takes alpha + n beta, and summing n bytes takes
n gamma. n is NCCL's size:

    all_reduce its buffer, all_gather its output, reduce_scatter its input,
    all_to_all the local send buffer, send_recv the message,
    broadcast, reduce, scatter and gather the root's whole buffer

`LEGEND` lists the symbols. A group of p ranks lies on N nodes, at least g ranks in each
(`LinkGroup` in `cost/hardware/topology.py`). alpha and beta belong to one port on the slowest link
that the group crosses, alpha_in and beta_in to one port inside a node. In one node they are equal.
A ring enters and leaves a node once for each member there. So g ports share the crossing bytes, and
one ring step takes max(beta_in, beta / g) per byte. A hierarchical algorithm first does inside
each node what it can. Then it sends the rest across nodes, every rank through its own port.

`collectives.py` compiles the table and takes the fastest algorithm that a group can run. Where no
switch sums, that minimum satisfies, for every size and group,

    all_reduce(n) = reduce_scatter(n) + all_gather(n)

because the same algorithms serve all three. The planner breaks ties by this equation: a
reduce_scatter and an all_gather must cost exactly what the all_reduce costs that they replace.
Algorithms of all_reduce without these two halves are therefore `printed_only`. A switch that sums
does both halves at once, in the two directions of a port. There an all_reduce costs less than its
two halves (`_ALONE`).
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

LEGEND = {
    "n": "bytes",
    "p": "ranks",
    "N": "nodes that hold them",
    "g": "ranks in each node",
    "L, L_N, L_g": "ceil(log2 p), ceil(log2 N), ceil(log2 g)",
    "alpha, beta": "s, s per byte of one port; between nodes, where there are several",
    "alpha_in, beta_in": "the same inside a node",
    "sigma": "s per byte of one port while the switch sums",
    "gamma": "s per byte of summing on the device",
}
SYMBOLS = sympy.symbols("n p N g L L_N L_g alpha beta alpha_in beta_in sigma gamma", positive=True)
n, p, N, g, L, L_N, L_g, alpha, beta, alpha_in, beta_in, sigma, gamma = SYMBOLS

# Where the members of a group must be for the formula to hold.
Placement = Literal["any", "one level", "two levels"]

_THAKUR = (
    "R. Thakur, R. Rabenseifner, W. Gropp: Optimization of Collective Communication "
    "Operations in MPICH, Int. J. High Performance Computing Applications 19(1), 2005"
)
_RING = (
    f"{_THAKUR}; over nodes, steps as in NCCL src/graph/tuning.cc (nInterSteps), and as many "
    "rings as members in a node, each through a port of its own"
)
_ANY_RANKS = (
    f"{_THAKUR}; as many rounds and bytes where p is no power of two: J. L. Träff: Optimal, "
    "Non-pipelined Reduce-scatter and Allreduce Algorithms, arXiv 2410.14234"
)
_RABENSEIFNER = (
    "R. Rabenseifner: Optimization of Collective Reduction Operations, ICCS 2004; also in "
)
_SANDERS = (
    "P. Sanders, J. Speck, J. L. Träff: Two-tree algorithms for full bandwidth broadcast, "
    "reduction and scan, Parallel Computing 35, 2009"
)
_BLUECONNECT = (
    "M. Cho, U. Finkler, D. Kung, H. Hunter: BlueConnect: Decomposing All-Reduce for Deep Learning "
    "on Heterogeneous Network Hierarchy, MLSys 2019; each level by halving or doubling"
)
_BRUCK = (
    "J. Bruck et al., IEEE Trans. Parallel and Distributed Systems 8(11), 1997; also in " + _THAKUR
)
_TWO_EXCHANGES = "X. Nie et al.: HetuMoE, arXiv 2203.14685, hierarchical all_to_all"
_SWITCH = (
    "NVLS of NCCL >= 2.17; a rank sends n and receives n/p, then sends n/p and receives n: "
    "NVIDIA/nccl issue 1083; (1 + 1/p) n of all_reduce is what issue 1455 measures on 5 to 8 "
    "H100s, algorithm bandwidths of 258, 265, 270 and 273 GB/s; 23 us, or 7 steps of a ring of "
    "3.4 us: src/graph/tuning.cc, hwLat"
)
_NO_HALVES = (
    "it is no reduce_scatter followed by an all_gather, and would break "
    "all_reduce(n) = reduce_scatter(n) + all_gather(n)"
)
_ALONE = (
    "alone, it fills one direction of a port with n bytes; an all_reduce fills both at once "
    "(NVIDIA/nccl issue 1083)"
)


@dataclass(frozen=True)
class Formula:
    """One algorithm: its time in the symbols above, its source, and when it is valid.

    placement      "one level": all members in one node, or one member in each node;
                   "two levels": equally many members, more than one, in each of several nodes
    in_switch      needs a switch that sums
    printed_only   why `collectives.py` leaves the algorithm out; empty if it does not
    note           what else a reader of the number should know
    """

    expression: sympy.Expr
    source: str
    placement: Placement = "any"
    in_switch: bool = False
    printed_only: str = ""
    note: str = ""


_SHARE = (p - 1) / p  # the part of a buffer that is not already in place
_SHARE_IN, _SHARE_ACROSS = (g - 1) / g, (N - 1) / (g * N)  # together _SHARE, as p = g N
_RING_BETA = sympy.Max(beta_in, beta / g)
_RING_HOPS = (p - N) * alpha_in + (N - 1) * alpha
_SUMS = _SHARE * n * gamma

_ring = _RING_HOPS + _SHARE * n * _RING_BETA
_rounds = L * alpha + _SHARE * n * beta
_across = L_N * alpha + _SHARE_ACROSS * n * beta
_two_levels = L_g * alpha_in + _SHARE_IN * n * beta_in + _across
# k blocks on each of two trees of height L: (2L + 2k)(alpha + n beta / 2k), at the best k.
_TWO_TREE = (sympy.sqrt(2 * L * alpha) + sympy.sqrt(n * beta)) ** 2


def _switch_sum(members: sympy.Expr) -> sympy.Expr:
    """The all_reduce of one node's members, summed in the switch."""
    return 7 * alpha_in + (1 + 1 / members) * n * sigma


_half_in_switch = 7 * alpha_in + n * sigma


FORMULAS: dict[tuple[str, str], Formula] = {
    ("all_reduce", "ring"): Formula(2 * _ring + _SUMS, _RING),
    ("all_reduce", "halving_doubling"): Formula(
        2 * _rounds + _SUMS, f"{_RABENSEIFNER}{_ANY_RANKS}", "one level"
    ),
    ("all_reduce", "hierarchical"): Formula(2 * _two_levels + _SUMS, _BLUECONNECT, "two levels"),
    ("all_reduce", "in_switch"): Formula(_switch_sum(p), _SWITCH, "one level", True),
    ("all_reduce", "hierarchical_in_switch"): Formula(
        _switch_sum(g) + 2 * _across + _SHARE_ACROSS * n * gamma,
        f"{_SWITCH}; then across as in {_BLUECONNECT}",
        "two levels",
        True,
    ),
    ("all_reduce", "recursive_doubling"): Formula(
        L * (alpha + n * beta + n * gamma), _THAKUR, "one level", printed_only=_NO_HALVES
    ),
    ("all_reduce", "double_tree"): Formula(
        2 * _TWO_TREE + n * gamma, _SANDERS, printed_only=_NO_HALVES
    ),
    ("all_gather", "ring"): Formula(_ring, _RING),
    ("all_gather", "recursive_doubling"): Formula(_rounds, _ANY_RANKS, "one level"),
    ("all_gather", "hierarchical"): Formula(_two_levels, _BLUECONNECT, "two levels"),
    ("all_gather", "in_switch"): Formula(_half_in_switch, _SWITCH, "one level", True, note=_ALONE),
    ("all_gather", "hierarchical_in_switch"): Formula(
        _half_in_switch + _across, f"{_SWITCH}; {_BLUECONNECT}", "two levels", True, note=_ALONE
    ),
    ("reduce_scatter", "ring"): Formula(_ring + _SUMS, _RING),
    ("reduce_scatter", "recursive_halving"): Formula(_rounds + _SUMS, _ANY_RANKS, "one level"),
    ("reduce_scatter", "hierarchical"): Formula(_two_levels + _SUMS, _BLUECONNECT, "two levels"),
    ("reduce_scatter", "in_switch"): Formula(
        _half_in_switch, _SWITCH, "one level", True, note=_ALONE
    ),
    ("reduce_scatter", "hierarchical_in_switch"): Formula(
        _half_in_switch + _across + _SHARE_ACROSS * n * gamma,
        f"{_SWITCH}; {_BLUECONNECT}",
        "two levels",
        True,
        note=_ALONE,
    ),
    ("all_to_all", "pairwise"): Formula(
        (g - 1) * (alpha_in + n / p * beta_in) + (p - g) * (alpha + n / p * beta),
        f"{_THAKUR}; each of the p - 1 messages over its own link",
    ),
    ("all_to_all", "bruck"): Formula(L * alpha + L * n / 2 * beta, _BRUCK, "one level"),
    ("all_to_all", "hierarchical"): Formula(
        (g - 1) * (alpha_in + n / g * beta_in) + (N - 1) * (alpha + n / N * beta),
        _TWO_EXCHANGES,
        "two levels",
    ),
    ("all_to_all", "hierarchical_bruck"): Formula(
        L_g * (alpha_in + n / 2 * beta_in) + L_N * (alpha + n / 2 * beta),
        f"{_TWO_EXCHANGES}; each exchange as in {_BRUCK}",
        "two levels",
    ),
    ("broadcast", "binomial_tree"): Formula(L * (alpha + n * beta), _THAKUR),
    ("broadcast", "scatter_all_gather"): Formula(
        (L + p - 1) * alpha + 2 * _SHARE * n * beta, _THAKUR
    ),
    ("broadcast", "double_tree"): Formula(_TWO_TREE, _SANDERS),
    ("reduce", "binomial_tree"): Formula(L * (alpha + n * beta + n * gamma), _THAKUR),
    ("reduce", "reduce_scatter_gather"): Formula(
        (L + p - 1) * alpha + 2 * _SHARE * n * beta + _SUMS, _RABENSEIFNER + _THAKUR
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
    """The time of `algorithm` for `kind`, in `SYMBOLS`.

    Raises:
        OptionError: there is no such collective, or it has no such algorithm.
    """
    require_kind(kind)
    if (kind, algorithm) not in FORMULAS:
        raise OptionError(
            f"{kind} has no algorithm {algorithm!r}", hint=f"it has {', '.join(algorithms(kind))}"
        )
    return FORMULAS[kind, algorithm].expression


def simplify_one_level(expression: sympy.Expr) -> sympy.Expr:
    """A formula for a group on one level (`Placement`), where only alpha and beta remain."""
    one_node = {N: 1, L_N: 0, g: p, L_g: L, alpha_in: alpha, beta_in: beta}
    return expression.subs(_RING_BETA, beta).subs(one_node)


def algorithms(kind: str) -> tuple[str, ...]:
    """All algorithms of `kind`, also those that are only printed."""
    return tuple(name for of_kind, name in FORMULAS if of_kind == kind)


def require_kind(kind: str) -> None:
    """Raise `OptionError` unless `kind` is a collective with formulas."""
    if kind not in KINDS:
        raise OptionError(f"unknown collective {kind!r}", hint=f"it is one of {', '.join(KINDS)}")
