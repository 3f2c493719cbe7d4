"""Cheapest paths in a graph of moves, for many weights of its moves: loops over plain numbers.

A path from one vertex to every other is kept as its *last moves*: the move that ends the path to
each vertex, -1 at the source, -2 where there is no path. Paths are read backwards.

Moves are numbered in the order of the vertices they leave: those from v are first[v] up to
first[v + 1].
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autopar.compiled import compiled

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
LastMoves = NDArray[np.int32]


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
    before: Indices, last: LastMoves, targets: Indices, values: Array, none: float
) -> Array:
    """[cases, k, sources, targets]: sums over the moves of the paths to some vertices, last move
    first; `none` where there is no path.

    `before` [moves] are the vertices that moves leave, `last` is [cases, sources, vertices];
    `values` of moves are [cases or 1, k, moves].
    """
    n_cases, n_sources, _ = last.shape
    sums = np.zeros((n_cases, values.shape[1], n_sources, len(targets)))
    for case in range(n_cases):
        of_case = values[case if len(values) > 1 else 0]
        for row in range(n_sources):
            for column in range(len(targets)):
                move = last[case, row, targets[column]]
                if move == -2:
                    sums[case, :, row, column] = none
                while move >= 0:
                    for k in range(len(of_case)):
                        sums[case, k, row, column] += of_case[k, move]
                    move = last[case, row, before[move]]
    return sums
