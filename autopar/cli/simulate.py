"""`autopar simulate`: the step of a plan, event by event, on its machine and on others.

--slow 1:1.5         stage 1 computes 1.5 times as long
--jitter 0.1:7       every compute takes up to a tenth longer, at random with seed 7
--what-if CHANGES    the same plan on a machine with other numbers (`cost/hardware/what_if.py`)
--scale              the plan with each part of its machine twice as fast; without a mesh, the
                     recipe of a config.json on more and more nodes (`scaling.py`)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.cli.options import PlanRequest
from autopar.cli.plans import plan_of
from autopar.cli.shell import Result, writing
from autopar.errors import OptionError

if TYPE_CHECKING:
    from autopar.cost.simulate import Timeline
    from autopar.planning import Plan


@dataclass(frozen=True)
class PlanPlay:
    """The flags, as texts, that only apply to the step of a plan."""

    slow: str | None
    jitter: str | None
    trace: Path | None
    model: str | None

    def refuse(self) -> None:
        """Raises `OptionError` if any was given."""
        given = [f"--{name}" for name, value in vars(self).items() if value is not None]
        if given:
            raise OptionError(
                f"{', '.join(given)}: --scale without --mesh makes no plan",
                hint="give a --mesh, or leave it out",
            )


def simulate_plan(
    subject: str,
    request: PlanRequest,
    play: PlanPlay,
    what_if: Sequence[str],
    doubled: bool,
    svg: Path | None,
) -> Result:
    """Simulate one step of a plan, and of the same plan on other machines."""
    from autopar.cost.hardware import parse_changes
    from autopar.report import (
        headline,
        simulation_dict,
        simulation_text,
        what_if_dict,
        what_if_text,
    )

    # Refuse unreadable flags before planning, which may take minutes.
    slow, jitter = _slow(play.slow), _jitter(play.jitter)
    for text in what_if:
        parse_changes(text)
    plan = plan_of(subject, play.model, request, "simulate")
    if slow and slow[0] >= len(plan.stages):
        raise OptionError(
            f"--slow {play.slow}: the plan has {len(plan.stages)} stages, counted from 0"
        )
    timeline = plan.simulate(slow, jitter)
    changes = [*what_if, *(_doublings(plan) if doubled else ())]
    others = {text: plan.what_if(text).simulate(slow, jitter) for text in changes}
    written = _write(timeline, svg, play.trace)
    texts = [headline(plan.data), simulation_text(timeline)]
    if others:
        texts.append(what_if_text(timeline, others))
    data = simulation_dict(timeline) | {"what_if": what_if_dict(others), "written": written}
    if written:
        texts.append("\n".join(written))
    return Result("\n\n".join(texts), data)


def _doublings(plan: Plan) -> tuple[str, ...]:
    from autopar.cost.hardware import doublings, profile_of

    assert plan.bound is not None, "a plan that is simulated is bound"
    return doublings(profile_of(plan.bound.mesh))


def _write(timeline: Timeline, svg: Path | None, trace: Path | None) -> list[str]:
    """Write the requested files; returns their paths."""
    written = []
    with writing():
        for path, write in ((svg, timeline.to_svg), (trace, timeline.to_chrome_trace)):
            if path is not None:
                write(path)
                written.append(str(path))
    return written


def _slow(text: str | None) -> tuple[int, float] | None:
    """`1:1.5` -> (1, 1.5)."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+):(\d+(?:\.\d+)?)", text)
    if match is None or float(match[2]) == 0:
        raise OptionError(f"--slow {text!r} is not STAGE:FACTOR", hint="as --slow 1:1.5")
    return int(match[1]), float(match[2])


def _jitter(text: str | None) -> tuple[float, int] | None:
    """`0.1:7` -> (0.1, 7)."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?):(\d+)", text)
    if match is None:
        raise OptionError(f"--jitter {text!r} is not FRACTION:SEED", hint="as --jitter 0.1:7")
    return float(match[1]), int(match[2])
