"""A plan in few words and numbers, so that plans can be told apart without their programs.

Axes differ between plans, so placements name them with their sizes: `S(0) on dp=64`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from autopar.cost.laws import CostModel
from autopar.cost.price.prediction import collectives_of
from autopar.cost.price.shares import step_shares
from autopar.cost.simulate import Timeline
from autopar.placement import Spec
from autopar.plans import PlanSummary
from autopar.program import GatherLine, Pipeline, StageProgram

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def summary_of(
    pipeline: Pipeline, costs: Sequence[CostModel], timeline: Timeline, optimizer: str
) -> PlanSummary:
    """The summary of a pipeline; programs with few of their blocks have the same one."""
    shares = step_shares(pipeline, costs, timeline)
    size_bytes: dict[str, float] = defaultdict(float)
    for c in collectives_of(pipeline, optimizer):
        axes = c.axis if isinstance(c.axis, str) else "+".join(c.axis)
        names = f"{c.kind} over {axes}"
        size_bytes[f"stage {c.stage}: {names}" if pipeline.n_stages > 1 else names] += (
            c.count * c.size_bytes
        )
    placed: dict[str, dict[str, None]] = defaultdict(dict)
    for program in pipeline.stages:
        for name, text in _placements(program):
            placed[name][text] = None
    return PlanSummary(
        {f"{s.kind} over {s.axes}" if s.axes else s.kind: s.time_s for s in shares.parts},
        dict(size_bytes),
        {name: " or ".join(texts) for name, texts in placed.items()},
    )


def _placements(program: StageProgram) -> list[tuple[str, str]]:
    """(name with stars for numbers, how it is stored and used) of every parameter."""
    gathered = {x.parameter: x.out.spec for x in program.body if isinstance(x, GatherLine)}
    periods = {"use": ", at each use", "micro": ", gradients each microbatch", "step": ""}
    found = []
    for p in program.parameters:
        stored = _cuts(p.stored.spec, program)
        used = {_cuts(use.local.spec, program): None for use in p.uses}
        if p.name in gathered:
            used[_cuts(gathered[p.name], program)] = None
        text = stored if list(used) == [stored] else f"{stored}, used {' and '.join(used)}"
        found.append((_NUMBER.sub("*", p.name), text + periods[p.period]))
    return found


def _cuts(spec: Spec, program: StageProgram) -> str:
    axes = zip(spec.placements, program.axis_names, program.axis_sizes, strict=True)
    cut = [
        f"{placed} on {name}={size}"
        for placed, name, size in axes
        if size > 1 and placed.kind in "SP"
    ]
    return ", ".join(cut) or "whole"
