"""Cheapest paths in a graph of moves, for many weights of its moves: loops over plain numbers.

A path from one vertex to every other is kept as its *last moves*: the move that ends the path to
each vertex, -1 at the source, -2 where there is no path. Paths are read backwards.

Moves are numbered in the order of the vertices they leave: those from v are first[v] up to
first[v + 1].
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.passes.solvers.problem import compiled

Array = NDArray[np.float64]
Ties = NDArray[np.float32]  # they decide among equals, so half of the memory is enough
Indices = NDArray[np.int64]
LastMoves = NDArray[np.signedinteger[Any]]


@compiled
def find_paths(first: Indices, target: Indices, weights: Array, sources: Indices) -> LastMoves:
    """[cases, sources, vertices]: the last moves of the paths that weigh least.

    `weights` are [cases, moves], none below 0, infinite where a move may not be used; `target`
    [moves] are the vertices they lead to.
    """
    last = np.full((len(weights), len(sources), len(first) - 1), -2, dtype=np.int32)
    for case in range(len(weights)):
        for row in range(len(sources)):
            _find(first, target, weights[case], sources[row], last[case, row])
    return last


@compiled
def _find(first: Indices, target: Indices, weight: Array, source: int, last: LastMoves) -> None:
    """Bellman and Ford's rounds, each over the moves out of what the last one brought nearer."""
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
            # Above what rounding may be: so no path comes back to where it was.
            is_nearer[at] = nearest[at] < distance[at] * (1 - 1e-15)
            if is_nearer[at]:
                distance[at], last[at] = nearest[at], into[at]


@compiled
def sum_along(
    before: Indices, last: LastMoves, rows: Indices, targets: Indices, values: Array
) -> Array:
    """[cases, k, rows, targets]: sums over the moves of the paths to some vertices, last move
    first; 0 where there is no path.

    `before` [moves] are the vertices that moves leave, `last` is [cases, sources, vertices], of
    which some `rows` are asked for; `values` of moves are [cases, k, moves].
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
def path_seconds(
    before: Indices, last: LastMoves, rows: Indices, targets: Indices,
    forward: Indices, backward: Indices, seconds: Array, ties: Array,
) -> tuple[Array, Ties]:  # fmt: skip
    """[cases, rows, targets]: seconds of the same paths, infinite where there is none, and ties, to
    whole thousandths.

    `seconds` are [cases, primitives], of which a move runs one `forward` and one `backward`; `ties`
    [moves].
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
    legal: NDArray[np.bool_], seconds: Array, ties: Array,
) -> Array:  # fmt: skip
    """[cases, moves]: seconds, and so little of the tie that it decides among equals alone;
    infinite where a move's end is not `legal` [cases, vertices]. The rest as in `path_seconds`."""
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
