"""Random models under random legal placements: loss and every gradient on every rank.

Graphs of operators of all families (`tests/helpers/random_models/graphs.py`) are captured, and the
program is compared with the model. Then it is placed at random on up to four ranks, in one stage or
two, with a number of microbatches that keeps the step exact, and compared with one process.

`AUTOPAR_GRAPHS=N` draws the seeds 0 .. N-1, and `AUTOPAR_GRAPHS=M:N` the seeds M .. N-1. By default
`SEEDS` are drawn.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from autopar.capture import capture, reference_step, whole_buffers
from autopar.errors import BatchError, NotSupportedError
from autopar.parity import whole_parameters
from autopar.passes.analysis import Analysis
from autopar.passes.intra import Constraints, intra_op_problem
from tests.helpers.harness import abstract_cost, generated_code, random_strategy, thread_step
from tests.helpers.pipeline_harness import Layout, random_ends, random_pipeline
from tests.helpers.random_models.graphs import Graph, random_batch, random_graph
from tests.helpers.ranks import TOLERANCE, pipeline_step, relative_error

__all__ = ["generated_code"]

MESHES = ((2,), (4,), (2, 2))
STAGES = (((1, 2), (1, 2)), ((1, 1), (2, 1)), ((2, 1), (1, 1)))
COUNTS = (1, 2, 4)
EXTRA = os.environ.get("AUTOPAR_GRAPHS")
N_ASSIGNMENTS = 2
# 85: a batch norm over ranks saves a scale that ZeRO-3 gathers, and backward regathers it.
SEEDS = (0, 1, 2, 3, 4, 5, 85)


def seeds() -> Sequence[int]:
    if not EXTRA:
        return SEEDS
    first, _, last = EXTRA.rpartition(":")
    return range(int(first or 0), int(last))


@pytest.mark.parametrize("seed", seeds())
def test_graph(seed: int) -> None:
    model, batch, rng = random_graph(seed), random_batch(seed), random.Random(seed)
    analysis = Analysis.of(capture(model, batch, precision="fp64"))
    check_capture(model, analysis, seed)
    counts = exact_counts(analysis)
    for _ in range(N_ASSIGNMENTS):
        check_one_stage(analysis, rng.choice(MESHES), rng.choice(counts), rng, seed)
    check_stages(analysis, rng.choice(STAGES), rng.choice(counts), rng, seed)


def check_capture(model: Graph, analysis: Analysis, seed: int) -> None:
    """The captured program computes what the model does; not checked if it draws random numbers."""
    program, batch = analysis.program, random_batch(seed)
    if program.seed is not None:
        return
    loss, _ = reference_step(
        program, whole_parameters(program, model), batch, whole_buffers(program, model)
    )
    assert loss is not None
    assert relative_error(loss, model(**batch)) <= TOLERANCE


def exact_counts(analysis: Analysis) -> list[int]:
    """The numbers of microbatches that compute the same step."""
    found = []
    for n in COUNTS:
        try:
            analysis.microbatch_types(n)
        except (BatchError, NotSupportedError):
            continue
        found.append(n)
    return found


def check_one_stage(
    analysis: Analysis, sizes: tuple[int, ...], n_microbatches: int, rng: random.Random, seed: int
) -> None:
    cost = abstract_cost(sizes)
    problem = intra_op_problem(analysis, cost, n_microbatches, Constraints(), "adamw")
    strategy = random_strategy(analysis, problem, n_microbatches, rng)
    step = thread_step(analysis, cost, strategy, random_batch(seed), seed)
    assert step.wrong == {}
    assert Counter(step.calls) == Counter(step.foretold)


def check_stages(
    analysis: Analysis, shapes: tuple[tuple[int, ...], ...], n_microbatches: int,
    rng: random.Random, seed: int,
) -> None:  # fmt: skip
    ends = random_ends(analysis.program, len(shapes), rng)
    pipeline = random_pipeline(analysis, ends, Layout(shapes, n_microbatches), rng)
    errors, _ = pipeline_step(analysis.program, pipeline, random_batch(seed), seed)
    assert {name: error for name, error in errors.items() if not error <= TOLERANCE} == {}
