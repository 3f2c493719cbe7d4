"""The verdict on a plan, in sentences: what it does, what a step costs, what a simple plan costs.

The first sentence is derived from placements (`parallelism.py`), not from the plan's name. Shares
of a step are means over all ranks; of every rank (`cost/simulate`)

    step = compute + exposed communication + bubble + optimizer

so their percentages, rounded to whole ones, add up to 100 (`rounded_shares`). The last sentence
compares the plan with the fastest of the recipes that were tried beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autopar.cost.hardware import Hardware
from autopar.cost.simulate import Timeline
from autopar.plans import Alternative, PlanData, Predicted
from autopar.program import Pipeline
from autopar.report.blocks import block_set, every_block, modules_of_lines
from autopar.report.words.parallelism import (
    MODULES,
    OUTER,
    StageParallelism,
    Way,
    stage_parallelism,
)
from autopar.units import format_bytes, format_bytes_of

_NUMBERS = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 7: "seven", 8: "eight"}
# Differences below are not worth a number; up to the second, plans are "within" each other.
_AS_FAST, _WITHIN = 0.005, 0.05
# Stages that differ are described up to this many groups of equal ones.
_MOST_GROUPS = 3


def verdict(
    data: PlanData,
    pipeline: Pipeline,
    predicted: Predicted,
    timeline: Timeline,
    hardware: Hardware,
) -> list[str]:
    """Two or three sentences; `timeline` is a step of the pipeline on the `hardware`.

    The memory limit is the one that the plan was made for; without one, the hardware's.
    """
    device = "GPU" if hardware.is_gpu else "device"
    limit_bytes = data.limit_bytes or hardware.memory_limit_bytes
    found = [_does(pipeline, device), _costs(predicted, timeline, limit_bytes), _compared(data)]
    return [sentence for sentence in found if sentence]


def mean_shares(timeline: Timeline) -> dict[str, float]:
    """What a step is spent on -> its share, a mean over all ranks; they add up to 1."""
    seconds = dict.fromkeys(("compute", "exposed communication", "bubble", "optimizer"), 0.0)
    for k, device in enumerate(timeline.devices):
        seconds["compute"] += device.n_ranks * device.compute_s
        seconds["exposed communication"] += device.n_ranks * device.exposed_comm_s
        seconds["bubble"] += device.n_ranks * timeline.idle_s(k)
        seconds["optimizer"] += device.n_ranks * device.update_s
    total_s = sum(seconds.values())
    return {what: time_s / total_s for what, time_s in seconds.items()} if total_s else {}


def rounded_shares(shares: Mapping[str, float]) -> dict[str, int]:
    """Whole percentages that add up to 100: the largest remainders are rounded up."""
    found = {what: math.floor(100 * share) for what, share in shares.items()}
    by_rest = sorted(shares, key=lambda what: found[what] - 100 * shares[what])
    for what in by_rest[: 100 - sum(found.values())]:
        found[what] += 1
    return found


def _costs(predicted: Predicted, timeline: Timeline, limit_bytes: float) -> str:
    shares = rounded_shares(mean_shares(timeline))
    words = ", ".join(f"{what} {share}%" for what, share in shares.items() if share)
    return f"{words[:1].upper()}{words[1:]}; {_memory(predicted.peak_bytes, limit_bytes)}."


def _memory(peak_bytes: float, limit_bytes: float) -> str:
    """`56.5 of 72.0 GiB`."""
    if peak_bytes > limit_bytes:
        return f"{format_bytes(peak_bytes)}, more than the limit of {format_bytes(limit_bytes)}"
    return format_bytes_of(peak_bytes, limit_bytes)


def _does(pipeline: Pipeline, device: str) -> str:
    if pipeline.n_ranks == 1:
        words = [f"one {device}, nothing is sharded"]
    else:
        words = list(_placed(pipeline, device))
    if pipeline.schedule.trains:
        words.append(_recompute(pipeline))
    if pipeline.n_microbatches > 1:
        words.append(f"{pipeline.n_microbatches} microbatches")
    text = ", ".join(words)
    return f"{text[:1].upper()}{text[1:]}."


def _placed(pipeline: Pipeline, device: str) -> Iterator[str]:
    """How stages are parallel; stages that are equal but for embedding and head are one."""
    stages = [stage_parallelism(program) for program in pipeline.stages]
    groups: dict[str, list[int]] = {}
    for k, stage in enumerate(stages):
        groups.setdefault(", ".join(_stage_words(stage.inner, device)), []).append(k)
    # Another stage has the embedding or the head whole where one has it split: a tied weight.
    tensor = {kind: n for stage in stages for kind, n in stage.inner.tensor.items()}
    outer: dict[str, int] = {}
    for stage in stages:
        for kind in OUTER & stage.tensor.keys():
            outer[kind] = max(outer.get(kind, 1), stage.tensor[kind])
    head = _stages_text(pipeline, device)
    if len(groups) == 1:
        if head:
            yield head
        if all(stage.n_ranks == 1 for stage in stages):
            return
        yield from _stage_words(replace(stages[0], tensor=tensor | outer), device)
    elif len(groups) <= _MOST_GROUPS:
        yield f"{head} ({'; '.join(f'{_stages(of)}: {text}' for text, of in groups.items())})"
        yield from _tensor_words(outer)
    else:
        yield f"{head}, each sharded in its own way"


def _stages_text(pipeline: Pipeline, device: str) -> str:
    """`four stages of 16 GPUs`; empty for one."""
    sizes = [mesh.n_ranks for mesh in pipeline.meshes]
    if len(sizes) == 1:
        return ""
    if len(set(sizes)) == 1:
        return f"{_number(len(sizes))} stages of {_devices(sizes[0], device)}"
    return f"{_number(len(sizes))} stages of {_and(list(map(str, sizes)))} {device}s"


def _stage_words(stage: StageParallelism, device: str) -> Iterator[str]:
    if stage.ways:
        yield _ways_text(stage.ways, device)
    split = list(_tensor_words(stage.tensor))
    yield from split
    if stage.experts > 1:
        yield f"experts divided over {_devices(stage.experts, device)}"
    if stage.norms_split:
        yield "sequence parallel"
    if stage.n_sequence > 1:
        yield f"sequences split in {_number(stage.n_sequence)}"
    if not (stage.ways or split or stage.experts > 1 or stage.n_sequence > 1):
        alone = stage.n_ranks == 1
        yield "nothing is sharded" if alone else f"every {device} repeats the same work"


def _ways_text(ways: Sequence[Way], device: str) -> str:
    """`ZeRO-3 over 16 GPUs`; ways that differ in their ranks only are one phrase."""
    sizes: dict[int, list[int]] = {}
    for way in ways if all(way.zero and way.n_data == 1 for way in ways) else ():
        sizes.setdefault(way.zero, []).append(way.n_zero)
    if not sizes:
        return _and([_way_text(way, device) for way in ways])
    return _and(
        [
            f"ZeRO-{zero} over {_and(list(map(str, sorted(of))))} {device}s"
            for zero, of in sizes.items()
        ]
    )


def _way_text(way: Way, device: str) -> str:
    if not way.zero:
        return f"data parallel over {_devices(way.n_data, device)}"
    copies = f" in {_number(way.n_data)} copies" if way.n_data > 1 else ""
    return f"ZeRO-{way.zero} over {_devices(way.n_zero, device)}{copies}"


def _tensor_words(tensor: Mapping[str, int]) -> Iterator[str]:
    """`attention and MLPs split in four`; one phrase per number of ranks."""
    matmuls = {kind: n for kind, n in tensor.items() if kind != "embedding"}
    sizes = set(matmuls.values())
    if len(matmuls) > 1 and len(sizes) == 1:
        kinds = {"all matmuls": sizes.pop()}
        if "embedding" in tensor:
            kinds["embedding"] = tensor["embedding"]
    else:
        kinds = {kind: tensor[kind] for kind in MODULES if kind in tensor}
    by_size: dict[int, list[str]] = {}
    for kind, n in kinds.items():
        if n > 1:
            by_size.setdefault(n, []).append(kind)
    for n, of in by_size.items():
        of = [f"the {kind}" if kind in OUTER else kind for kind in of]
        yield f"{_and(of)} split in {_number(n)}"


def _recompute(pipeline: Pipeline) -> str:
    """`no recompute`, `full recompute of all 80 blocks`."""
    modes: dict[str, list[str]] = {}
    for program in pipeline.stages:
        for segment in program.segments:
            lines = program.body[segment.start : segment.stop]
            modes.setdefault(segment.mode, []).extend(modules_of_lines(lines))
    if not modes:
        return "no recompute"
    every = every_block(pipeline)
    n_every = sum(map(len, every.values()))
    words = []
    for mode, modules in modes.items():
        found = block_set(modules)
        n, others = found.n_blocks, _and(list(found.others))
        of_all = "both" if n == 2 else f"all {n}"
        blocks = f"{of_all if n == n_every > 1 else f'{n} of {n_every}'} blocks" if n else ""
        words.append(f"{mode} recompute of {' and '.join(filter(None, [blocks, others]))}")
    return _and(words)


def _compared(data: PlanData) -> str:
    """How the fastest recipe beside the plan compares, or that none fits; empty: none was tried."""
    known = {a.name: a for a in data.alternatives}
    chosen = known.get(data.chosen)
    simple = [a for a in data.alternatives if a.recipe and a is not chosen]
    if chosen is None or chosen.step_time_s is None:
        return ""
    if data.recipe and not chosen.recipe:
        return "It is the user's recipe: nothing else was tried."
    if chosen.recipe:
        found = (a.step_time_s for a in data.alternatives if not a.is_estimate)
        gain = chosen.step_time_s / min(s for s in found if s is not None) - 1
        if gain < _AS_FAST:
            return f"It is {_plain(chosen)}: the search found nothing faster."
        return f"It is {_plain(chosen)}, within {math.ceil(100 * gain)}% of the fastest plan found."
    runs = [a for a in simple if a.step_time_s is not None]
    if runs:
        best = min(runs, key=lambda a: a.step_time_s or 0.0)
        return _faster((best.step_time_s or 0.0) / chosen.step_time_s - 1, _plain(best))
    lean = [a for a in simple if a.peak_bytes is not None]
    if not lean:
        return ""
    best = min(lean, key=lambda a: a.peak_bytes or 0.0)
    return f"No simple plan fits: {_plain(best)} needs {format_bytes(best.peak_bytes or 0.0)}."


def _faster(gain: float, other: str) -> str:
    """`gain` is how much longer the other plan takes, relative."""
    if gain < _AS_FAST:
        return f"As fast as the best simple plan, {other}."
    if gain <= _WITHIN:
        return f"Within {math.ceil(100 * gain)}% of the best simple plan, {other}."
    if gain < 1:
        return f"{gain:.0%} faster than the best simple plan, {other}."
    return f"{1 + gain:.2g} times as fast as the best simple plan, {other}."


def _plain(alternative: Alternative) -> str:
    """`plain ZeRO-3`; Megatron with its view, because there are many."""
    if alternative.recipe == "Megatron":
        return alternative.name
    return f"plain {alternative.recipe.replace('data parallel', 'data parallelism')}"


def _stages(numbers: Sequence[int]) -> str:
    return f"stage{'s' if len(numbers) > 1 else ''} {_and(list(map(str, numbers)))}"


def _devices(n: int, device: str) -> str:
    return f"{n} {device}{'s' if n != 1 else ''}"


def _number(n: int) -> str:
    return _NUMBERS.get(n, str(n))


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
