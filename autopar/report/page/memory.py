"""Memory as data: what it is made of at the peak, and the live bytes over a step.

    kinds     the reader's words for kinds of bytes, in the order in which they are stacked
    stages    of each, what it takes:
      phases    [name, points, left, others]. They are "before"; "forward" and "backward" (if it is
                split, "backward" and "weights") of the first microbatch, then of a later one;
                "after"; "optimizer". A point is [share, bytes, text]: the share of the phase's
                compute before it, bytes by kind, and the number of a text that says what runs.
                `left` are the bytes by kind when the phase is over; `others` of them are of other
                microbatches in flight
      kept      bytes that a microbatch in flight keeps
      message   bytes of gradients that may be under way once a microbatch is done
    devices   of each, its `stages`, and at its peak: the bytes, what runs then, and by kind what
              holds them, and how many of it are alike (`held`)

A rank with several stages, or with a backward in two parts, holds at any time what its stages hold
between their actions, and what the action that runs takes above that (`_held`, `_above`). There a
stage has its phases with one microbatch in flight, and what is held goes by stage.

Phases have a few hundred points: of neighbours, the highest and the lowest are kept.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.cost.memory import LiveBytes, MemoryCourse, Phase, gradients_under_way, kept_bytes
from autopar.cost.price import memory_course_of, peak_of_stage, row_peak_of, works_begin_s
from autopar.program.communication import backward_parts
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
_ONCE = ("before", "after", "optimizer")


@dataclass(frozen=True)
class _Peak:
    """The peak of a device: what runs, and by word and what holds them the bytes of each."""

    at: str
    held: Mapping[tuple[str, str], Sequence[float]]

    @property
    def size_bytes(self) -> float:
        return math.fsum(itertools.chain.from_iterable(self.held.values()))


def memory_bar(pipeline: Pipeline, optimizer: str, limit_bytes: float) -> dict[str, Any]:
    """Bytes of one rank of the fullest stage at its peak, by kind; they add up to the peak."""
    peaks = [peak_of_stage(pipeline, k, optimizer) for k in range(pipeline.n_stages)]
    stage = peaks.index(max(peaks))
    peak = _peak(pipeline, pipeline.schedule.device_of(stage), optimizer)
    sizes = dict.fromkeys(_MEMORY, 0.0)
    for (word, _), each_bytes in peak.held.items():
        sizes[word] += math.fsum(each_bytes)
    return {
        "stage": stage,
        "peak_bytes": peaks[stage],
        "limit_bytes": limit_bytes,
        "at": peak.at,
        "parts": [{"name": name, "size_bytes": size} for name, size in sizes.items() if size],
    }


def memory_facts(subject: Subject) -> dict[str, Any]:
    """The live bytes of every stage over a step; this file's docstring says how."""
    texts: dict[str, int] = {}
    pipeline, optimizer = subject.pipeline, subject.data.optimizer
    return {
        "kinds": list(_MEMORY),
        "stages": [_stage(subject, stage, texts) for stage in range(pipeline.n_stages)],
        "devices": [
            _device(pipeline, device, optimizer) for device in range(pipeline.schedule.n_devices)
        ],
        "texts": list(texts),
    }


def _stage(subject: Subject, stage: int, texts: dict[str, int]) -> dict[str, Any]:
    program, optimizer = subject.pipeline.stages[stage], subject.data.optimizer
    course = memory_course_of(subject.pipeline, stage, optimizer)
    return {
        "phases": [_phase(phase, program, texts) for phase in course.phases],
        "kept": kept_bytes(program, optimizer),
        "message": _message_bytes(subject.pipeline, stage),
    }


def _device(pipeline: Pipeline, device: int, optimizer: str) -> dict[str, Any]:
    stages = pipeline.schedule.stages_on(device)
    peak = _peak(pipeline, device, optimizer)
    size_bytes = peak_of_stage(pipeline, stages[0], optimizer)
    rows = sorted(peak.held.items(), key=lambda row: -sum(row[1]))
    return {
        "stages": list(stages),
        "peak": [size_bytes, peak.at],
        "held": [
            [kind, what, len(sizes), sum(sizes)]
            for (kind, what), sizes in rows[:_N_HELD]
            if sum(sizes) > _LEAST_SHARE * size_bytes
        ],
    }


def _peak(pipeline: Pipeline, device: int, optimizer: str) -> _Peak:
    schedule = pipeline.schedule
    stages = schedule.stages_on(device)
    courses = {k: memory_course_of(pipeline, k, optimizer) for k in stages}
    held: dict[tuple[str, str], list[float]] = {}
    if len(stages) == 1 and not schedule.splits_backward:
        (course,) = courses.values()
        for (kind, what), size_bytes in course.held.items():
            held.setdefault((_word(kind), starred(_said(what))), []).append(size_bytes)
        return _Peak(_said(course.peak.at), held)
    found = row_peak_of(pipeline, device, optimizer)
    at = ""
    for k, course in courses.items():
        if (action := found.action) is None:
            moments = itertools.chain.from_iterable(
                phase.moments for phase in course.phases if phase.name in _ONCE
            )
            top = max(moments, key=lambda moment: moment.size_bytes)
            sizes, at = _by_word(top.parts), _said(top.at)
        else:
            sizes = _bytes_between_actions(course, found.counts[k], _message_bytes(pipeline, k))
            if k == action.stage:
                above, at = _above(course, found.phase, action.microbatch > 0)
                sizes = [a + b for a, b in zip(sizes, above, strict=True)]
        held |= {
            (word, f"stage {k}"): [size] for word, size in zip(_MEMORY, sizes, strict=True) if size
        }
    return _Peak(at, held)


def _bytes_between_actions(
    course: MemoryCourse, counts: tuple[int, int, int], message_bytes: float
) -> list[float]:
    """By word, what a stage holds between two actions (`StageMemory.held_bytes`)."""
    n_in_flight, n_waiting, n_done = counts
    before, forward, backward, weights = (_by_word(phase.left) for phase in course.phases[:4])
    splits = course.phases[3].name == "weights"
    done = (weights if splits else backward) if n_done else before
    messages = dict.fromkeys(_MEMORY, 0.0) | {"buffers": message_bytes if n_done else 0.0}
    columns = zip(done, before, forward, backward, messages.values(), strict=True)
    return [
        static + n_in_flight * (kept - start) + n_waiting * (waiting - start) + message
        for static, start, kept, waiting, message in columns
    ]


def _above(course: MemoryCourse, name: str, is_later: bool) -> tuple[list[float], str]:
    """By word, what an action takes above what is held when it begins, and what runs then."""
    at = [i for i, phase in enumerate(course.phases) if phase.name == name][-1 if is_later else 0]
    top = max(course.phases[at].moments, key=lambda moment: moment.size_bytes)
    sizes = zip(_by_word(top.parts), _by_word(course.phases[at - 1].left), strict=True)
    return [size - held for size, held in sizes], _said(top.at)


def _message_bytes(pipeline: Pipeline, stage: int) -> float:
    """Of gradients that a stage may hold until they have gone; its phases have them elsewhere."""
    schedule, received = pipeline.schedule, pipeline.stages[stage].received
    returned = sum(b.local.size_bytes for b in received if b.local.has_grad)
    return float(gradients_under_way(schedule, stage) * returned)


def _phase(phase: Phase, program: StageProgram, texts: dict[str, int]) -> list[Any]:
    begins_s = works_begin_s(program, phase.name != "forward")
    n_first = len(backward_parts(program)[0])
    start_s = begins_s[n_first] if phase.name == "weights" else 0.0
    whole_s = (begins_s[n_first] if phase.name == "backward" else begins_s[-1]) - start_s
    has_works = phase.name not in _ONCE and whole_s > 0
    points = [
        [
            round((begins_s[m.work] - start_s) / whole_s, 6) if has_works else 0.0,
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
