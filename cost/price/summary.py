"""A plan in few words and numbers, so that plans can be told apart without their programs.

Axes differ between plans, so placements name them with their sizes: `S(0) on dp=64`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from autopar.cost.laws import CostModel
from autopar.cost.price.prediction import collectives_of
from autopar.cost.price.shares import step_shares
from autopar.cost.simulate import Timeline
from autopar.plans import PlanSummary
from autopar.program.lines import Pipeline, StageProgram, starred


def summary_of(
    pipeline: Pipeline, costs: Sequence[CostModel], timeline: Timeline, optimizer: str
) -> PlanSummary:
    """The summary of a pipeline; programs with few of their blocks have the same one."""
    shares = step_shares(pipeline, costs, timeline)
    size_bytes: dict[str, float] = defaultdict(float)
    for c in collectives_of(pipeline, optimizer):
        names = f"{c.kind} over {c.axes_text}"
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
    axes = dict(zip(program.axis_names, program.axis_sizes, strict=True))
    periods = {"use": ", at each use", "micro": ", gradients each microbatch", "step": ""}
    found = []
    for p in program.parameters:
        stored = p.stored.spec.on(axes)
        used = list(dict.fromkeys(spec.on(axes) for spec in program.used_specs[p.name]))
        text = stored if used == [stored] else f"{stored}, used {' and '.join(used)}"
        found.append((starred(p.name), text + periods[p.period]))
    return found
