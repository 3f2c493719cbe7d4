"""`compile="auto"`: compile regions if every rank can, and a run of `N_STEPS` steps gains by it.

Nobody says how long a run is, so one length is assumed of all. Rank 0 decides, once, before the
first step: all ranks run the same kernels, and so does a run that starts again.

    compiled   N_STEPS * (predicted step - the same, compiled) > regions * REGION_S   (`verdict`)
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from autopar.cost.hardware import Hardware
from autopar.module.agreement import compared, has_others
from autopar.module.job import from_rank_0, own_rank
from autopar.options import Options
from autopar.passes.compilation import Compilation
from autopar.passes.facts import Placed, Target, Unverified
from autopar.planning import Bound
from autopar.plans import Predicted
from autopar.program.lines import Pipeline
from autopar.report import REGION_S
from autopar.runtime.execute import lacking
from autopar.units import format_ranks, format_seconds

# A short training run; whoever trains less measures or tries something.
N_STEPS = 1000
# Facts with prices: those of a compiled step are others.
_PRICED = Hardware, Placed, Unverified, Pipeline, Predicted


def settle_compile(options: Options, compilation: Compilation, device: torch.device) -> Options:
    """The options with "auto" decided, as those of the compilation's target; rank 0 says why.

    Every rank must call it, with the plan in its compilation.
    """
    if options.compile != "auto":
        return options
    lack = (lacking(device, "regions") or ("",))[0]
    of_ranks = compared("settings", lack, device) if has_others() else None
    missing = [(rank, text) for rank, text in (of_ranks or {own_rank(): lack}).items() if text]

    def on_rank_0() -> tuple[str, str]:
        if missing:
            rank, text = missing[0]
            return "none", f"eager: {format_ranks([rank])} needs {text}"
        eager = Bound(compilation)
        compiled = eager.run_as(compile="regions")
        saved_s = eager.predicted.step_time_s - compiled.predicted.step_time_s
        return verdict(saved_s, compiled.n_regions)

    word, reason = from_rank_0(on_rank_0)
    if own_rank() == 0:
        print(f'autopar compile="auto": {reason}', file=sys.stderr, flush=True)  # noqa: T201
    options, target = replace(options, compile=word), compilation[Target]
    compilation.forget(Target)
    compilation.give(replace(target, options=options))
    for kind in _PRICED if options.compiles else ():
        if kind in compilation:
            compilation.forget(kind)
    return options


def verdict(saved_s: float, n_regions: int) -> tuple[str, str]:
    """What `compile` is if so many regions save these seconds of a step, and why."""
    gain_s, compile_s = N_STEPS * saved_s, n_regions * REGION_S
    why = (
        f"{N_STEPS:,} steps would gain {format_seconds(max(gain_s, 0.0))}, "
        f"compiling {n_regions} regions takes some {format_seconds(compile_s)}"
    )
    return ("regions", f"compiled: {why}") if gain_s > compile_s else ("none", f"eager: {why}")
