"""How simple a plan is: of plans that are equally fast, the simplest is easiest to trust and tune.

In this order, less is simpler:

    order         0: 1f1b, gpipe or one stage; else interleaved, then those that split backward
    chunks        stages of a rank
    searched      0: a plain recipe's own shape, 1: found by the search
    axes          mesh axes in use in a stage, and one more for pipeline stages
    collectives   kinds of collectives
    storages      distinct ways of storing and using parameters
    stages        pipeline stages
    recomputes    0: nothing runs again
    views         mesh axes of its views, in use or not
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from autopar.cost.price import collectives_of
from autopar.passes.inter import Candidate
from autopar.passes.search.simulator import Solved
from autopar.program.lines import Pipeline
from autopar.schedule import CHUNKS

_ORDERS = {
    "1f1b": 0, "gpipe": 0, "interleaved": 1, "zero-bubble": 2, "zero-bubble-v": 3, "dualpipe-v": 4,
}  # fmt: skip


class Simplicity(NamedTuple):
    """A plan's simplicity, by the first part in which two plans differ; less is simpler."""

    order: int = 0
    chunks: int = 1
    searched: int = 0
    axes: int = 0
    collectives: int = 0
    storages: int = 0
    stages: int = 1
    recomputes: int = 0
    views: int = 0

    @staticmethod
    def recipe_on(candidate: Candidate) -> Simplicity:
        """The least that a recipe's plans have; what the user asked for is as if searched."""
        if not candidate.recipe:
            return Simplicity.searched_on(candidate)
        return Simplicity(*_order(candidate), 0, _n_axes(candidate), stages=len(candidate.stages))

    @staticmethod
    def searched_on(candidate: Candidate) -> Simplicity:
        return Simplicity(*_order(candidate), *Simplicity.of_search(_n_axes(candidate))[2:])

    @staticmethod
    def of_order(schedule: str, is_recipe: bool) -> Simplicity:
        """What several stages in this order aim at."""
        order, chunks = _ORDERS[schedule], CHUNKS[schedule][0]
        least = Simplicity(axes=1) if is_recipe else Simplicity.of_search(2)
        return least._replace(order=order, chunks=chunks)

    @staticmethod
    def of_search(n_axes: int) -> Simplicity:
        """What a search aims at: fewer axes than these, or what differs after them, is found by
        chance."""
        return Simplicity(0, 1, 1, n_axes, *[sys.maxsize] * 5)


def simplicity_of(solved: Solved, pipeline: Pipeline, optimizer: str) -> Simplicity:
    """The simplicity of a simulated plan; `pipeline` are its lowered stages."""
    collectives = [c for c in collectives_of(pipeline, optimizer) if c.phase != "loss"]
    axes = [set[str]() for _ in pipeline.stages]
    for c in collectives:
        axes[c.stage].update(set(c.axes) - {"pp", "world"})
    storages = {
        (parameter.stored.spec, parameter.period, *program.used_specs[parameter.name])
        for program in pipeline.stages
        for parameter in program.parameters
    }
    n_stages = len(pipeline.stages)
    return Simplicity(
        *_order(solved.candidate),
        int(not solved.candidate.recipe),
        max(map(len, axes)) + (n_stages > 1),
        len({c.kind for c in collectives}),
        len(storages),
        n_stages,
        int(any(stage.strategy.recomputed for stage in solved.stages)),
        _n_axes(solved.candidate),
    )


def _order(candidate: Candidate) -> tuple[int, int]:
    n_devices = len({*candidate.devices})
    return _ORDERS[candidate.schedule], len(candidate.stages) // n_devices


def _n_axes(candidate: Candidate) -> int:
    axes = max(len(layout.view.active_axes) for layout in candidate.stages)
    return axes + (len(candidate.stages) > 1)
