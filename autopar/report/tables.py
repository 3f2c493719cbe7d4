"""The tables of a plan as rows of values; `explanation.py` and the page format them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autopar.cost.hardware import PAIR_ERROR
from autopar.plans import Alternative, PlanData, Predicted, StageRecord
from autopar.program.communication import Collective
from autopar.program.lines import StageProgram, StoredParameter, starred
from autopar.report.blocks import Block, range_text
from autopar.units import format_bytes, format_bytes_of, format_seconds

# A search over stages considers many more alternatives than a reader wants listed.
N_ALTERNATIVES = 25
# Plans are as fast as each other if their steps differ by less, relative.
_AS_FAST_REL = 5e-4
# A bound further below the plan, relative, rules nothing out. `tolerance` and `tie` are less.
_OPEN_REL = 0.03
# Layouts that people know by name; pipelines with tensor parallelism over a node; and the row of
# what was not tried (`passes/search`).
_KNOWN, _OF_A_NODE, NOT_TRIED = ("HSDP", "FSDP x TP"), "(Megatron)", "the rest"
# Level of the search (`passes/search/levels.py`) -> how it rules plans out.
_LEVELS = {
    "shared": "by equal shares",
    "layers": "by what layers take",
    "priced": "by what stages take with their bytes",
    "stages": "by what stages take",
    "free": "without a memory limit",
    "rerun": "by what must run again",
}


@dataclass(frozen=True)
class ParameterRow:
    """Parameters that are stored and used in the same way; `pattern` has `*` for numbers.

    `blocks` says which, where other rows have the same pattern.
    """

    pattern: str
    count: int
    stored: str
    used: str
    shape: str
    blocks: str = ""
    members: tuple[StoredParameter, ...] = field(default=(), repr=False, compare=False)


@dataclass(frozen=True)
class TrafficRow:
    """Collectives of one stage, phase, kind and axis: totals of one step on one rank."""

    stage: int
    phase: str
    kind: str
    axis: str
    calls: int
    size_bytes: int


def headline(data: PlanData) -> str:
    """`Model on (dp=2 x tp=2), 1 microbatch: search`; `|` separates stages."""
    axes = " | ".join(_axes(stage) for stage in data.stages)
    n_stages = len(data.stages)
    where = f"({axes})" if n_stages == 1 else f"{n_stages} stages ({axes})"
    batches = "microbatch" if data.microbatches == 1 else "microbatches"
    order = "" if n_stages == 1 else f", {data.schedule}"
    return f"{data.model} on {where}, {data.microbatches} {batches}{order}: {data.chosen}"


def idle_warnings(data: PlanData) -> list[str]:
    """Warnings about axes with several ranks on which nothing is sharded, stage by stage."""
    found = []
    for number, stage in enumerate(data.stages):
        if idle := _idle_axes(stage):
            where = f"stage {number}: " if len(data.stages) > 1 else ""
            axes = ", ".join(idle)
            found.append(
                f"{where}axis {axes} repeats the same work on every rank: nothing is sharded on it"
            )
    return found


def alternative_rows(data: PlanData) -> tuple[list[Alternative], str]:
    """The best alternatives, always with the chosen one, those known by name and what was not
    tried; and a summary of the others."""
    first, others = data.alternatives[:N_ALTERNATIVES], data.alternatives[N_ALTERNATIVES:]
    kept = [a for a in others if a.name == data.chosen or _is_known(a)]
    rest = [a for a in others if a not in kept]
    words = _kinds_text(rest, chosen_s(data) or 0.0)
    return [*first, *kept], f"and {len(rest)} more: {', '.join(words)}" if rest else ""


def _is_known(alternative: Alternative) -> bool:
    """Is it a layout that people look for, or what the time was not enough for?"""
    name = alternative.name
    return alternative.recipe in _KNOWN or name.endswith(_OF_A_NODE) or name == NOT_TRIED


def _kinds_text(rest: Sequence[Alternative], own_s: float) -> Iterator[str]:
    """`14 slower, 10 ruled out: at least 74.4 s, 2 do not fit: the leanest needs 91.0 GiB`."""
    times_s = [a.step_time_s for a in rest if a.step_time_s is not None]
    n_slower = sum(time_s > own_s for time_s in times_s)
    untimed = [a for a in rest if a.step_time_s is None]
    bounds_s = [a.least_s for a in untimed if a.least_s is not None]
    needs = [a.peak_bytes or 0.0 for a in untimed if a.is_too_large]
    n_others = len(untimed) - len(bounds_s) - len(needs)
    open_s = [s for s in bounds_s if _is_open(s, own_s)]
    bounds_s = [s for s in bounds_s if not _is_open(s, own_s)]
    if n_slower:
        yield f"{n_slower} slower"
    if len(times_s) > n_slower:
        yield f"{len(times_s) - n_slower} as fast or faster, not as simple"
    if bounds_s:
        yield f"{len(bounds_s)} ruled out: at least {format_seconds(min(bounds_s))}"
    if open_s:
        yield f"{len(open_s)} not searched to the end: at least {format_seconds(min(open_s))}"
    if needs:
        yield f"{len(needs)} that do not fit: the leanest needs {format_bytes(min(needs))}"
    if n_others:
        yield f"{n_others} without a plan"


def alternative_note(alternative: Alternative, data: PlanData) -> str:
    """Why an alternative is not the plan: `slower by 12%: all_reduce across nodes`."""
    if alternative.name == data.chosen:
        return alternative.note
    if alternative.step_time_s is not None:
        return alternative.note or _slower(alternative, data)
    if alternative.least_s is not None:
        least = format_seconds(alternative.least_s)
        is_open = _is_open(alternative.least_s, chosen_s(data) or 0.0)
        return f"{'not searched to the end' if is_open else 'ruled out'}: at least {least}"
    if alternative.is_too_large:
        peak_bytes = alternative.peak_bytes or 0.0
        needs = format_bytes(peak_bytes)
        if data.limit_bytes is not None:
            needs = format_bytes_of(peak_bytes, data.limit_bytes)
        return f"does not fit: needs {needs}"
    return alternative.note


def _is_open(least_s: float, own_s: float) -> bool:
    """Is a bound too far below the plan to rule anything out?"""
    return least_s < own_s * (1 - _OPEN_REL)


def _slower(alternative: Alternative, data: PlanData) -> str:
    own_s = chosen_s(data)
    if not own_s or alternative.step_time_s is None:
        return ""
    gain = alternative.step_time_s / own_s - 1
    about = "about " if alternative.is_estimate else ""
    if abs(gain) < _AS_FAST_REL:
        return f"{about}as fast"
    percent = f"{abs(gain):.1%}" if abs(gain) < 0.1 else f"{abs(gain):.0%}"
    if gain < 0:
        why = "an estimate: it was not simulated" if alternative.is_estimate else "not as simple"
        return f"faster by {about}{percent}, {why}"
    words = f"slower by {about}{percent}"
    if gain >= 1:
        words = f"takes {about}{gain + 1:.2g} times as long"
    return f"{words}: {alternative.slower_by}" if alternative.slower_by else words


def chosen_s(data: PlanData) -> float | None:
    """The step of the plan itself, as its row has it."""
    return next((a.step_time_s for a in data.alternatives if a.name == data.chosen), None)


# What "within the error" means, wherever it is said.
ERROR_TEXT = f"the error of predictions between plans, {PAIR_ERROR:.1%} for half of published pairs"


def is_within_error(predicted: Predicted, own_s: float | None, other_s: float | None) -> bool:
    """Do two steps of one model, batch and machine differ by less than `ERROR_TEXT` says?

    No where nothing is known of the machine, which `predicted`, of a plan on it, says.
    """
    if predicted.interval_s is None or not own_s or not other_s:
        return False
    return max(own_s, other_s) / min(own_s, other_s) - 1 < PAIR_ERROR


def interval_text(predicted: Predicted) -> str:
    """`7.9 s to 10.9 s`: what 80% of steps take; empty where nothing is known of the machine."""
    return " to ".join(map(format_seconds, predicted.interval_s or ()))


def parameter_rows(program: StageProgram) -> list[ParameterRow]:
    """Parameters grouped by pattern and placement: `h.*.mlp.c_fc.weight`."""
    groups: dict[tuple[str, str, str, str], list[StoredParameter]] = {}
    for parameter in program.parameters:
        uses = ", ".join(dict.fromkeys(str(u.local.spec) for u in parameter.uses)) or "each use"
        kept = str(parameter.stored.spec)
        kept = kept if parameter.period == "step" else f"{kept} {parameter.period}"
        key = (starred(parameter.name), str(list(parameter.shape)), kept, uses)
        groups.setdefault(key, []).append(parameter)
    patterns = Counter(pattern for pattern, *_ in groups)
    return [
        ParameterRow(pattern, len(members), kept, uses, shape,
                     _blocks_text(members) if patterns[pattern] > 1 else "", tuple(members))
        for (pattern, shape, kept, uses), members in groups.items()
    ]  # fmt: skip


def _blocks_text(members: Sequence[StoredParameter]) -> str:
    """`blocks 0, 11`, of parameters of one pattern."""
    indices = sorted({int(b.index) for p in members if (b := Block.of(p.name)).index})
    return f"block{'s' if len(indices) > 1 else ''} {range_text(indices)}" if indices else ""


def traffic_rows(collectives: Sequence[Collective]) -> list[TrafficRow]:
    """Collectives summed by stage, phase, kind and axis."""
    sums: dict[tuple[int, str, str, str], list[int]] = {}
    for c in collectives:
        total = sums.setdefault((c.stage, c.phase, c.kind, c.axes_text), [0, 0])
        total[0] += c.count
        total[1] += c.count * c.size_bytes
    return [TrafficRow(*key, count, size_bytes) for key, (count, size_bytes) in sums.items()]


def _axes(stage: StageRecord) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in stage.axes.items())


def _idle_axes(stage: StageRecord) -> list[str]:
    """Axes with several ranks on which nothing is sharded."""
    out = []
    for position, (axis, size) in enumerate(stage.axes.items()):
        texts = (*stage.operators.values(), *stage.parameters.values())
        sharded = any(
            _placement(spec, position).startswith("S") for text in texts for spec in _specs(text)
        )
        if size > 1 and not sharded:
            out.append(axis)
    return out


def _specs(text: str) -> list[str]:
    body = text.partition(";")[0]
    return [s.strip() for side in body.split("->") for s in side.split(",") if s.strip()]


def _placement(spec: str, position: int) -> str:
    words = spec.split(" order ")[0].split()
    return words[position] if position < len(words) else ""


def optimality(data: PlanData, step_time_s: float) -> str:
    """What is proven of the choice, which takes `step_time_s`, and what is not."""
    if data.bound_s is None:
        if data.recipe:
            return f"proven: nothing; laid out by a recipe ({data.recipe})"
        return f"proven: each stage within {data.stage_gap:.1%} of its optimum"
    gap = max(0.0, 1 - data.bound_s / step_time_s)
    text = f"proven: no plan takes less than {format_seconds(data.bound_s)}, {gap:.1%} below this"
    found_s = [row.step_time_s for row in data.alternatives if not row.is_estimate]
    fastest_s = min((s for s in found_s if s is not None), default=step_time_s)
    if fastest_s < step_time_s * (1 - _AS_FAST_REL):
        text += f" (the fastest found, not as simple: {1 - fastest_s / step_time_s:.1%})"
    if data.ruled_out:
        levels = ", ".join(f"{n} {_LEVELS.get(k, k)}" for k, n in data.ruled_out.items())
        text += f"; ruled out: {levels}"
    return text
