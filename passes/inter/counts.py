"""Which numbers of microbatches are worth trying."""

from __future__ import annotations

import math

from sympy import divisors

from autopar.errors import BatchError, OptionError
from autopar.manual import Manual
from autopar.options import Options
from autopar.passes.analysis import Analysis

# The limit per device: beyond it a microbatch has next to no compute.
_PER_DEVICE = 16
_LEAST_LIMIT = 64


def microbatch_counts(
    analysis: Analysis, options: Options, n_devices: int, n_splits: int = 1
) -> list[int]:
    """Divisors of the batch, as the model views it too, each at least 1.5 times the one before; or
    the number in `options`.

    `n_splits` ranks share each microbatch, so m * n_splits must divide the batch. If no m does, the
    answer is 1. Raises `BatchError` if the number in `options` does not divide the batch.
    """
    batch = analysis.batch
    if isinstance(options.microbatches, int):
        batch.check_divides(options.microbatches)
        return [options.microbatches]
    if batch.size == 0 or batch.broken_at is not None:
        return [1]
    n_rows, rest = divmod(batch.size, n_splits)
    counts: list[int] = []
    for m in divisors(math.gcd(n_rows, analysis.n_divisible)) if not rest else ():
        if m <= max(_LEAST_LIMIT, _PER_DEVICE * n_devices) and m >= 1.5 * (counts or [0])[-1]:
            counts.append(m)
    return counts or [1]


def recipe_counts(
    analysis: Analysis, options: Options, manual: Manual, n_devices: int
) -> list[int]:
    """`microbatch_counts` of a recipe that the user chose.

    Raises `BatchError` if its data parallelism does not divide the batch, `OptionError` if its
    microbatch size does not divide the rows of one rank.
    """
    n_rows, given = analysis.batch.size, options.microbatches
    n_microbatches = analysis.batch.n_splits(given) if isinstance(given, int) else 1
    if manual.dp > 1 and n_rows == 0:
        raise BatchError(
            f"dp={manual.dp} splits the batch, and no input has a batch of several rows",
            hint="give a larger batch, or say where it is with batch_dims",
        )
    if manual.dp > 1 and n_rows % (manual.dp * n_microbatches):
        raise BatchError(
            f"a batch of {n_rows} rows does not divide over dp={manual.dp} ranks"
            + (f" x {n_microbatches} microbatches" if n_microbatches > 1 else ""),
            hint="choose a batch size that divides, or drop_last=True in the loader",
        )
    if manual.microbatch_size is None or analysis.batch.n_accumulated > 1:
        return microbatch_counts(analysis, options, n_devices, manual.dp)
    of_rank = n_rows // manual.dp
    if of_rank % manual.microbatch_size:
        raise OptionError(
            f"microbatch_size={manual.microbatch_size} does not divide the {of_rank} rows "
            f"of one data-parallel rank"
        )
    return [of_rank // manual.microbatch_size]
