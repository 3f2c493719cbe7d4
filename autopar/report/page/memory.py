"""Memory as data: what it is made of at the peak, and the live bytes over a step.

    kinds     the reader's words for kinds of bytes, in the order in which they are stacked
    phases    of each stage, [name, points, left, others]. They are "before"; "forward" and
              "backward" of the first microbatch, then of a later one; "after"; "optimizer". A point
              is [share, bytes, text]: the share of the phase's compute before it, bytes by kind,
              and the number of a text that says what runs. `left` are the bytes by kind when the
              phase is over; `others` of them are of other microbatches in flight
    kept      bytes that a microbatch in flight keeps
    peak      bytes, what runs then, and the number of its phase
    held      at the peak, by kind, what holds it, and how many of it are alike

Phases have a few hundred points: of neighbours, the highest and the lowest are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autopar.cost.memory import LiveBytes, Phase, kept_bytes
from autopar.cost.price import memory_course_of, peak_of_stage, works_begin_s
from autopar.program.lines import Pipeline, StageProgram, starred
from autopar.report.page.subject import Subject

# Kinds of `cost/memory` that one reader's word covers, in the order of the bar; others are
# activations.
_MEMORY = {
    "weights": ("parameters",),
    "gradients": ("gradients", "gradients of uses", "synced"),
    "optimizer": ("optimizer",),
    "activations": (),
    "gathered weights": ("converted", "gathered", "gathers under way"),
    "buffers": ("workspace", "batch", "messages", "reductions under way"),
}
_WORD = {kind: word for word, kinds in _MEMORY.items() for kind in kinds}
# Of each phase, about twice as many points are kept; rows of what is held at the peak.
_N_BUCKETS, _N_HELD = 300, 12
_LEAST_SHARE = 0.002


def memory_bar(pipeline: Pipeline, optimizer: str, limit_bytes: float) -> dict[str, Any]:
    """Bytes of one rank of the fullest stage at its peak, by kind; they add up to the peak."""
    peaks = [peak_of_stage(pipeline, k, optimizer) for k in range(pipeline.n_stages)]
    stage = peaks.index(max(peaks))
    peak = memory_course_of(pipeline, stage, optimizer).peak
    sizes = zip(_MEMORY, _by_word(peak.parts), strict=True)
    return {
        "stage": stage,
        "peak_bytes": peak.size_bytes,
        "limit_bytes": limit_bytes,
        "at": _said(peak.at),
        "parts": [{"name": name, "size_bytes": size} for name, size in sizes if size],
    }


def memory_facts(subject: Subject) -> dict[str, Any]:
    """The live bytes of every stage over a step; this file's docstring says how."""
    texts: dict[str, int] = {}
    stages = [_stage(subject, stage, texts) for stage in range(subject.pipeline.n_stages)]
    return {"kinds": list(_MEMORY), "texts": list(texts), "stages": stages}


def _stage(subject: Subject, stage: int, texts: dict[str, int]) -> dict[str, Any]:
    program, optimizer = subject.pipeline.stages[stage], subject.data.optimizer
    course = memory_course_of(subject.pipeline, stage, optimizer)
    held: dict[tuple[str, str], list[float]] = {}
    for (kind, what), size_bytes in course.held.items():
        held.setdefault((_word(kind), starred(_said(what))), []).append(size_bytes)
    rows = sorted(held.items(), key=lambda row: -sum(row[1]))
    least_bytes = _LEAST_SHARE * course.peak.size_bytes
    return {
        "phases": [_phase(phase, program, texts) for phase in course.phases],
        "kept": kept_bytes(program, optimizer),
        "peak": [course.peak.size_bytes, _said(course.peak.at), course.peak_phase],
        "held": [
            [kind, what, len(sizes), sum(sizes)]
            for (kind, what), sizes in rows[:_N_HELD]
            if sum(sizes) > least_bytes
        ],
    }


def _phase(phase: Phase, program: StageProgram, texts: dict[str, int]) -> list[Any]:
    begins_s = works_begin_s(program, phase.name != "forward")
    has_works = phase.name in ("forward", "backward", "weights") and begins_s[-1] > 0
    points = [
        [
            round(begins_s[m.work] / begins_s[-1], 6) if has_works else 0.0,
            _by_word(m.parts),
            texts.setdefault(_said(m.at), len(texts)),
        ]
        for m in _thinned(phase.moments)
    ]
    return [phase.name, points, _by_word(phase.left), phase.left.get("in flight", 0.0)]


def _thinned(moments: Sequence[LiveBytes]) -> list[LiveBytes]:
    size = len(moments) // _N_BUCKETS
    if size < 3:
        return list(moments)
    found: list[LiveBytes] = []
    for start in range(0, len(moments), size):
        of = moments[start : start + size]
        ends = {id(f(of, key=lambda m: m.size_bytes)) for f in (min, max)}
        found += [m for m in of if id(m) in ends]
    return found


def _word(kind: str) -> str:
    return _WORD.get(kind, "activations")


def _by_word(parts: Mapping[str, float]) -> list[float]:
    sizes = dict.fromkeys(_MEMORY, 0.0)
    for kind, size_bytes in parts.items():
        sizes[_word(kind)] += size_bytes
    return [int(size) if size.is_integer() else size for size in map(float, sizes.values())]


def _said(at: str) -> str:
    at = "other microbatches in flight" if at == "others" else at
    return " ".join(at.replace("/", " ").partition("#")[0].split())
