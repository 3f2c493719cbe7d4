"""The program's operators as layers: where pipeline stages may begin.

A boundary between two operators is *thin* if few bytes cross it. The limit depends on the model:

    repeated blocks   the fewest bytes that cross a boundary inside a block (the residual stream);
                      with several stacks of blocks, the largest of their limits
    no blocks         the largest cut of the best clustering into `N_WANTED` layers
                      (`passes/solvers/stages/clustering.py`)

Thin boundaries with no FLOPs between them are alternatives. The one where the module tree changes
most is taken, because a person would cut there. If more than `MOST_LAYERS` layers are left, only
boundaries between larger modules stay. If that is not enough, neighbouring layers are joined
evenly. Values that depend on inputs alone (masks) cross from the operator that makes them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.arrays import Array
from autopar.passes.analysis import Analysis, Run
from autopar.passes.solvers.problem import Infeasible
from autopar.passes.solvers.stages import cluster_operators, least_flops
from autopar.program.graph import Program
from autopar.rules import rule_for

N_WANTED = 32
# The stage search takes 0.1 s for 48 layers, and 2 s for 96. With this limit, half blocks can be
# layers in models of up to 24 blocks, and blocks are joined in models of more than 48.
MOST_LAYERS = 48
# Boundaries whose bytes differ by less than this (relative) are equally thin.
_SAME_BYTES_REL = 1e-3
# A layer's FLOPs may exceed the mean by this (relative): the first delta that is feasible is used.
_DELTAS = (0.5, *(2.0**k for k in range(12)), math.inf)


@dataclass(frozen=True)
class Layers:
    """Consecutive operators, grouped into layers.

    Layers 0 to l hold the first `ends[l]` operators. `flops[l]` are the forward FLOPs of layer l
    for the global batch.
    """

    ends: tuple[int, ...]
    flops: tuple[float, ...]

    @staticmethod
    def of(analysis: Analysis, ends: Sequence[int]) -> Layers:
        flops = operator_flops(analysis)
        each = (math.fsum(flops[a:b]) for a, b in itertools.pairwise((0, *ends)))
        return Layers(tuple(ends), tuple(each))

    @property
    def n_layers(self) -> int:
        return len(self.ends)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The operators of each layer: the first, and the one after the last."""
        return list(zip((0, *self.ends[:-1]), self.ends, strict=True))

    def ends_of(self, last_layers: Sequence[int]) -> tuple[int, ...]:
        """After how many operators the stages end, given the last layer of each."""
        return tuple(self.ends[last] for last in last_layers)


def find_layers(
    analysis: Analysis, runs: Sequence[Run], n_least: int = 2, n_most: int = MOST_LAYERS
) -> Layers:
    """The layers of a program whose repeated blocks are `runs` (`folding.find_runs`).

    There are at least `n_least`, if enough operators run before the loss, and at most `n_most`, or
    `n_least` if that is more.
    """
    flops = operator_flops(analysis)
    bytes_after, depths = _cut_bytes(analysis, _crossing_bytes(analysis)), _depths(analysis.program)
    thin = _thin_cuts(bytes_after, _block_limit(bytes_after, runs))
    if not runs or len(_distinct(depths, thin, flops, bytes_after)) + 1 < n_least:
        thin = _thin_cuts(bytes_after, _clustered_limit(flops, bytes_after, max(n_least, N_WANTED)))
    chosen = _distinct(depths, thin, flops, bytes_after)
    if len(chosen) + 1 < n_least:
        chosen = [b for b, size in enumerate(bytes_after) if math.isfinite(size)]
    chosen = _fewer_cuts(depths, chosen, flops, n_least, n_most)
    return Layers.of(analysis, [*(b + 1 for b in chosen), len(flops)])


def operator_flops(analysis: Analysis) -> list[float]:
    """Forward FLOPs per operator, for the global batch."""
    alike = analysis.placed_by_kind(1)
    flops = {k: rule_for(str(p.operator.call.op)).flops_of(p.sizes) for k, p in alike.items()}
    return [flops[analysis.kinds[operator.name]] for operator in analysis.operators]


def _crossing_bytes(analysis: Analysis) -> list[float]:
    """Bytes that cross between operators i and i + 1, for the global batch; [operators - 1]."""
    operators, types = analysis.operators, analysis.types.tensors
    made: dict[str, int] = {}
    last_read: dict[str, int] = {}
    for i, operator in enumerate(operators):
        made |= dict.fromkeys(operator.outputs, i)
        last_read |= dict.fromkeys(operator.inputs, i)
    change = [0.0] * (len(operators) + 1)
    for value, first in made.items():
        if value in last_read:
            change[first] += types[value].size_bytes
            change[last_read[value]] -= types[value].size_bytes
    return list(itertools.accumulate(change))[: len(operators) - 1]


def balance(weights: Sequence[float], n_parts: int) -> tuple[int, ...]:
    """The last index of each of `n_parts` consecutive parts, the heaviest as light as possible.

    Of the splits that attain this, the most even one. Raises `ProblemError` for more parts than
    weights.
    """
    n = len(weights)
    no_cuts = [0.0] * (n - 1)
    limit = least_flops(weights, n_parts) if 0 < n_parts <= n else 0.0
    mean = math.fsum(weights) / max(n_parts, 1)
    delta = max(limit / mean - 1, 0.0) if mean else 0.0
    found = cluster_operators(weights, no_cuts, n_parts, delta * (1 + 1e-9) + 1e-9)
    assert not isinstance(found, Infeasible), found
    return tuple(end - 1 for end in found.ends)


def _cut_bytes(analysis: Analysis, bytes_after: Sequence[float]) -> list[float]:
    """`bytes_after`, infinite where the program must not be cut.

    The last stage makes the loss, so nothing is cut after it. One stage must both read and change
    a buffer, so nothing is cut between its uses.
    """
    program = analysis.program
    place = {v: i for i, o in enumerate(analysis.operators) for v in (o.name, *o.outputs)}
    made = place.get(program.loss, math.inf) if program.loss is not None else math.inf
    closed = {b for b in range(len(bytes_after)) if b >= made}
    for placeholder, buffer in program.buffers.items():
        if buffer.update in place:
            users = (user.name for user in program.node(placeholder).users)
            places = [place[buffer.update], *(place[u] for u in users if u in place)]
            closed.update(range(min(places), max(places)))
    return [math.inf if b in closed else size for b, size in enumerate(bytes_after)]


def _block_limit(bytes_after: Sequence[float], runs: Sequence[Run]) -> float:
    return max((min(bytes_after[run.start : run.end]) for run in runs), default=0.0)


def _clustered_limit(flops: Sequence[float], bytes_after: Sequence[float], n: int) -> float:
    """The largest cut of the best clustering into `n` layers, or into as many as are possible."""
    n_possible = sum(map(math.isfinite, bytes_after)) + 1
    # A forbidden cut costs more than all allowed cuts together.
    dearest = math.fsum(filter(math.isfinite, bytes_after)) + 1.0
    cuts = [min(size, dearest) for size in bytes_after]
    for delta in _DELTAS[:-1]:
        found = cluster_operators(flops, cuts, min(n, n_possible), delta)
        if not isinstance(found, Infeasible):
            return min(found.largest_cut_bytes, dearest - 1.0)
    return dearest - 1.0


def _thin_cuts(bytes_after: Sequence[float], limit_bytes: float) -> list[int]:
    limit = limit_bytes * (1 + _SAME_BYTES_REL)
    return [b for b, size in enumerate(bytes_after) if size <= limit]


def _distinct(
    depths: Sequence[int], thin: Sequence[int], flops: Sequence[float], bytes_after: Sequence[float]
) -> list[int]:
    """Of the boundaries with no FLOPs between them, the one between the largest modules."""
    done = list(itertools.accumulate(flops))
    groups = itertools.groupby(thin, key=lambda b: done[b])
    return [
        min(group, key=lambda b: (depths[b], bytes_after[b], b))
        for before, group in groups
        if 0 < before < done[-1]
    ]


def _depths(program: Program) -> list[int]:
    """Per boundary, how many enclosing modules the operators on both sides share."""
    paths = [program.keys[node.name].rpartition("/")[0].split(".") for node in program.operators]
    return [
        next((d for d, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        for a, b in itertools.pairwise(paths)
    ]


def _fewer_cuts(
    depths: Sequence[int], chosen: list[int], flops: Sequence[float], n_least: int, n_most: int
) -> list[int]:
    """At most `n_most - 1` of the boundaries, but at least `n_least - 1` if there are so many."""
    n_most = max(n_most, n_least)
    if len(chosen) < n_most:
        return chosen
    for depth in sorted({depths[b] for b in chosen}, reverse=True):
        outer = [b for b in chosen if depths[b] <= depth]
        if len(outer) + 1 < max(n_least, n_most // 4):
            break
        if len(outer) < n_most:
            return outer
        chosen = outer
    bounds = (0, *(b + 1 for b in chosen), len(flops))
    weights = [math.fsum(flops[a:b]) for a, b in itertools.pairwise(bounds)]
    # Each part joins two layers, or three, and so on: parts are as even as the layers are.
    n_parts = math.ceil(len(weights) / math.ceil(len(weights) / n_most))
    return [chosen[last] for last in balance(weights, max(n_parts, n_least))[:-1]]


def sums_of_ranges(of_layers: Array) -> Array:
    """[first layer, last layer]: sums of what is known of every layer; 0 if first > last."""
    n = len(of_layers)
    sums: Array = np.cumsum(np.triu(np.tile(of_layers, (n, 1))), axis=1)
    return sums
