"""Shortest paths in a graph of moves, for many sets of weights: compiled loops over arrays.

The paths from one source are kept as *last moves*: per vertex, the move that ends the path to it.
It is -1 at the source and -2 if there is no path. Paths are read backwards.

Moves are numbered in the order of the vertices they leave: first[v] up to first[v + 1] leave v.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.arrays import Array, BoolArray, Indices
from autopar.passes.solvers.problem import compiled

Ties = NDArray[np.float32]  # they only break ties, so half the memory is enough
LastMoves = NDArray[np.signedinteger[Any]]


@compiled
def find_paths(first: Indices, target: Indices, weights: Array, sources: Indices) -> LastMoves:
    """[cases, sources, vertices]: the last moves of the shortest paths.

    `weights` [cases, moves] are not negative, and infinite for a move that may not be used;
    `target` [moves] has the vertices that moves lead to.
    """
    last = np.full((len(weights), len(sources), len(first) - 1), -2, dtype=np.int32)
    for case in range(len(weights)):
        for row in range(len(sources)):
            _find(first, target, weights[case], sources[row], last[case, row])
    return last


@compiled
def _find(first: Indices, target: Indices, weight: Array, source: int, last: LastMoves) -> None:
    """Bellman-Ford; each round follows the moves out of the vertices that the last one improved."""
    distance = np.full(len(last), np.inf)
    distance[source], last[source] = 0.0, -1
    nearest, into = distance.copy(), last.copy()
    is_nearer = distance == 0.0
    while is_nearer.any():
        for at in range(len(last)):
            if is_nearer[at]:
                for move in range(first[at], first[at + 1]):
                    if distance[at] + weight[move] < nearest[target[move]]:
                        nearest[target[move]] = distance[at] + weight[move]
                        into[target[move]] = move
        for at in range(len(last)):
            # An improvement must exceed the rounding error, so no path contains a cycle.
            is_nearer[at] = nearest[at] < distance[at] * (1 - 1e-15)
            if is_nearer[at]:
                distance[at], last[at] = nearest[at], into[at]


@compiled
def sum_along(
    before: Indices, last: LastMoves, rows: Indices, targets: Indices, values: Array
) -> Array:
    """[cases, k, rows, targets]: sums over the moves of the paths, last move first; 0 if none.

    `before` [moves] has the vertices that moves leave; `last` is [cases, sources, vertices]; `rows`
    are places among the sources; `values` are [cases, k, moves].
    """
    sums = np.zeros((len(last), values.shape[1], len(rows), len(targets)))
    for case in range(len(last)):
        for i in range(len(rows)):
            for j in range(len(targets)):
                move = last[case, rows[i], targets[j]]
                while move >= 0:
                    for k in range(values.shape[1]):
                        sums[case, k, i, j] += values[case, k, move]
                    move = last[case, rows[i], before[move]]
    return sums


@compiled
def last_along(
    before: Indices, last: LastMoves, rows: Indices, targets: Indices, values: Array
) -> Array:
    """[cases, rows, targets]: the value of the last move of each path that has any; 0 if none.

    `values` are [cases, moves]; the rest as in `sum_along`.
    """
    found = np.zeros((len(last), len(rows), len(targets)))
    for case in range(len(last)):
        for i in range(len(rows)):
            for j in range(len(targets)):
                move = last[case, rows[i], targets[j]]
                while move >= 0 and found[case, i, j] == 0:
                    found[case, i, j] = values[case, move]
                    move = last[case, rows[i], before[move]]
    return found


@compiled
def path_seconds(
    before: Indices, last: LastMoves, rows: Indices, targets: Indices,
    forward: Indices, backward: Indices, seconds: Array, ties: Array,
) -> tuple[Array, Ties]:  # fmt: skip
    """(seconds, ties) of the same paths: [cases, rows, targets].

    Seconds are infinite if there is no path; ties are rounded to thousandths. `seconds` is [cases,
    primitives]; move e runs primitives forward[e] and backward[e]; `ties` is [moves].
    """
    time_s = np.zeros((len(last), len(rows), len(targets)))
    tie = np.zeros(time_s.shape, dtype=np.float32)
    for case in range(len(last)):
        for i in range(len(rows)):
            for j in range(len(targets)):
                sum_of_ties = 0.0
                move = last[case, rows[i], targets[j]]
                if move == -2:
                    time_s[case, i, j] = np.inf
                while move >= 0:
                    time_s[case, i, j] += (
                        seconds[case, forward[move]] + seconds[case, backward[move]]
                    )
                    sum_of_ties += ties[move]
                    move = last[case, rows[i], before[move]]
                tie[case, i, j] = np.rint(sum_of_ties * 1e3) / 1e3
    return time_s, tie


@compiled
def move_weights(
    before: Indices, target: Indices, forward: Indices, backward: Indices,
    legal: BoolArray, seconds: Array, ties: Array,
) -> Array:  # fmt: skip
    """[cases, moves]: seconds, plus a share of the tie so small that it decides only among equals.

    Infinite if either end of a move is not `legal` [cases, vertices]. The rest as `path_seconds`.
    """
    weights = np.empty((len(seconds), len(before)))
    for case in range(len(seconds)):
        least = np.inf
        for move in range(len(before)):
            move_s = seconds[case, forward[move]] + seconds[case, backward[move]]
            if not (legal[case, before[move]] and legal[case, target[move]]):
                move_s = np.inf
            if 0.0 < move_s < least:
                least = move_s
            weights[case, move] = move_s
        unit = least * 1e-10 if least < np.inf else 1e-30
        for move in range(len(before)):
            weights[case, move] += unit * ties[move]
    return weights
