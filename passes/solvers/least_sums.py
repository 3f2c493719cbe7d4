"""The inner loops of elimination: the least of sums of tables, without writing the sums down."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autopar.compiled import compiled
from autopar.passes.solvers.problem import Codes, FloatArray

# What the compiled loop takes: tables, and their axes beside those of problems and of what goes.
_N_PARTS, _N_AXES = 3, 3
_NOTHING = np.zeros((1, 1))


def least_sum(parts: Sequence[FloatArray], out: FloatArray) -> None:
    """Write the minimum over their second axis, which all have, of the tables' sum.

    Without that axis the tables broadcast to the shape of `out`, [problems, ...].
    """
    absent = _N_AXES + 1 - out.ndim
    if absent < 0:
        for k in range(out.shape[1]):
            one = np.empty((len(out), *out.shape[2:]))
            least_sum([part[:, :, k if part.shape[2] > 1 else 0] for part in parts], one)
            out[:, k] = one
        return
    few = sorted(_few(parts), key=lambda part: -part.shape[-1] if out.ndim > 1 else 0)
    steps = np.zeros((_N_PARTS, _N_AXES + 1), dtype=np.intp)
    rows: list[FloatArray] = [_NOTHING] * _N_PARTS
    for i, part in enumerate(few):
        shape = (*part.shape[:2], *(1 for _ in range(absent)), *part.shape[2:])
        rows[i] = part.reshape(-1, shape[-1])
        for axis, n in enumerate(shape[:-1]):
            steps[i, axis] = 0 if n == 1 else math.prod(shape[axis + 1 : -1])
    n_wide = sum(of.shape[1] > 1 for of in rows)
    into = out.reshape(len(out), *(1 for _ in range(absent)), *out.shape[1:])
    x, y, z = rows
    _least_sum(x, y, z, n_wide, steps, few[0].shape[1], into)


def _few(parts: Sequence[FloatArray]) -> list[FloatArray]:
    """At most `_N_PARTS` tables of the same sum: those that broadcast to another's shape are added
    to it, and if need be others."""
    out: list[FloatArray] = []
    for part in sorted(parts, key=lambda part: -part.size):
        for i, larger in enumerate(out):
            if all(n in (1, of) for n, of in zip(part.shape, larger.shape, strict=True)):
                out[i] = larger + part
                break
        else:
            out.append(part)
    while len(out) > _N_PARTS:
        *out, second, last = out
        out.append(second + last)
    return out


@compiled
def _least_sum(
    x: FloatArray, y: FloatArray, z: FloatArray, n_wide: int, steps: Codes, n_first: int,
    out: FloatArray,
) -> None:  # fmt: skip
    """`out` is [problems, a, b, c]. Tables are rows over c, the first `n_wide` of them, or of one
    entry; row [problem, first, a, b] is at the sum of these times the table's `steps`."""
    n, n_a, n_b, n_c = out.shape
    for p in range(n):
        for a in range(n_a):
            for b in range(n_b):
                best = out[p, a, b]
                for c in range(n_c):
                    best[c] = np.inf
                i = p * steps[0, 0] + a * steps[0, 2] + b * steps[0, 3]
                j = p * steps[1, 0] + a * steps[1, 2] + b * steps[1, 3]
                m = p * steps[2, 0] + a * steps[2, 2] + b * steps[2, 3]
                for _ in range(n_first):
                    if n_wide == 3:
                        of_x, of_y, of_z = x[i], y[j], z[m]
                        for c in range(n_c):
                            total = of_x[c] + of_y[c] + of_z[c]
                            best[c] = total if total < best[c] else best[c]
                    elif n_wide == 2:
                        of_x, of_y, fixed = x[i], y[j], z[m, 0]
                        for c in range(n_c):
                            total = of_x[c] + of_y[c] + fixed
                            best[c] = total if total < best[c] else best[c]
                    elif n_wide == 1:
                        of_x, fixed = x[i], y[j, 0] + z[m, 0]
                        for c in range(n_c):
                            total = of_x[c] + fixed
                            best[c] = total if total < best[c] else best[c]
                    else:
                        total = x[i, 0] + y[j, 0] + z[m, 0]
                        for c in range(n_c):
                            best[c] = total if total < best[c] else best[c]
                    i += steps[0, 1]
                    j += steps[1, 1]
                    m += steps[2, 1]
