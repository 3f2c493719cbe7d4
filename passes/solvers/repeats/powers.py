"""Min-plus powers of a table: the cheapest walks of n steps, and the walks themselves.

    (A B)[x, y] = min over z of A[x, z] + B[z, y]          (`_product`)

Entry [x, y] of T^n is the least total of n steps from state x to state y. It is computed by
repeated squaring (`Power.of`). All tables have a leading axis of cases that never mix.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.arrays import Array
from autopar.passes.solvers.problem import compiled


@dataclass(frozen=True, eq=False)
class Power:
    """T^n: `squares[b]` is T^(2^b). `bits` are the bits of n that are set, lowest first.
    `partial[k]` is the min-plus product of the squares of the first k + 1 of them."""

    squares: tuple[Array, ...]
    bits: tuple[int, ...]
    partial: tuple[Array, ...]

    @staticmethod
    def of(table: Array, n: int) -> Power:
        """`table` is [cases, states, states]; n is at least 1."""
        assert n >= 1
        squares = [np.array(table)]  # writable like the others, so that `_product` is compiled once
        while 2 ** len(squares) <= n:
            squares.append(_product(squares[-1], squares[-1]))
        bits = tuple(b for b in range(len(squares)) if n >> b & 1)
        partial = [squares[bits[0]]]
        for b in bits[1:]:
            partial.append(_product(partial[-1], squares[b]))
        return Power(tuple(squares), bits, tuple(partial))

    @property
    def table(self) -> Array:
        """T^n."""
        return self.partial[-1]

    def path(self, case: int, start: int, end: int) -> list[int]:
        """The states of a cheapest walk of n steps, both ends included."""
        tail: list[int] = []
        at = end
        for k in range(len(self.bits) - 1, 0, -1):
            square = self.squares[self.bits[k]]
            before = _through(self.partial[k - 1], square, case, start, at)
            tail = self._walk(self.bits[k], case, before, at)[1:] + tail
            at = before
        return self._walk(self.bits[0], case, start, at) + tail

    def _walk(self, b: int, case: int, start: int, end: int) -> list[int]:
        """A cheapest walk of 2^b steps."""
        if b == 0:
            return [start, end]
        half = self.squares[b - 1]
        middle = _through(half, half, case, start, end)
        return self._walk(b - 1, case, start, middle) + self._walk(b - 1, case, middle, end)[1:]


@compiled
def _product(left: Array, right: Array) -> Array:
    n_cases, n, _ = left.shape
    out = np.full(left.shape, np.inf)
    for case in range(n_cases):
        for x in range(n):
            best = out[case, x]
            for z in range(n):
                first, then = left[case, x, z], right[case, z]
                for y in range(n):
                    total = first + then[y]
                    best[y] = total if total < best[y] else best[y]
    return out


def _through(left: Array, right: Array, case: int, start: int, end: int) -> int:
    """The state in the middle of a cheapest walk, over `left` and then over `right`."""
    return int((left[case, start] + right[case, :, end]).argmin())
