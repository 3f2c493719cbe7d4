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
from autopar.cost.price import collectives_of
from autopar.cost.simulate import Timeline
from autopar.plans import Alternative, PlanData, Predicted
from autopar.program.lines import Pipeline
from autopar.report.blocks import block_set, every_block, modules_of_lines
from autopar.report.division import share_text
from autopar.report.tables import ERROR_TEXT, NOT_TRIED, is_within_error
from autopar.report.words.parallelism import (
    LEAST_FLOPS,
    MODULES,
    OUTER,
    Split,
    StageParallelism,
    Way,
    stage_parallelism,
)
from autopar.units import format_bytes, format_bytes_of, format_seconds

_NUMBERS = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 7: "seven", 8: "eight"}
# A difference below is not worth a number.
_AS_FAST = 0.005
# Peaks above this share of the limit are near it.
_NEAR_LIMIT = 0.9
# A limit that leaves more free is no margin.
_MOST_MARGIN = 0.5
# Stages that differ are described up to this many groups of equal ones.
_MOST_GROUPS = 3


def verdict(
    data: PlanData,
    pipeline: Pipeline,
    predicted: Predicted,
    timeline: Timeline,
    hardware: Hardware,
) -> list[str]:
    """Two to four sentences; `timeline` is a step of the pipeline on the `hardware`.

    The memory limit is the one that the plan was made for; without one, the hardware's.
    """
    device = "GPU" if hardware.is_gpu else "device"
    limit_bytes = data.limit_bytes or hardware.memory_limit_bytes
    memory = _memory(predicted.peak_bytes, limit_bytes, hardware.device.memory_bytes)
    sentences = (
        _does(pipeline, device), _costs(timeline, memory), _compared(data),
        _within_error(data, pipeline, predicted),
    )  # fmt: skip
    return [sentence for sentence in sentences if sentence]


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


def _costs(timeline: Timeline, memory: str) -> str:
    shares = rounded_shares(mean_shares(timeline))
    words = ", ".join(f"{what} {share}%" for what, share in shares.items() if share)
    return f"{words[:1].upper()}{words[1:]}; {memory}."


def _memory(peak_bytes: float, limit_bytes: float, device_bytes: float) -> str:
    """`56.5 of 72.0 GiB`; near the limit, also what that leaves free."""
    if peak_bytes > limit_bytes:
        return f"{format_bytes(peak_bytes)}, more than the limit of {format_bytes(limit_bytes)}"
    text, free = format_bytes_of(peak_bytes, limit_bytes), 1 - limit_bytes / device_bytes
    if peak_bytes < _NEAR_LIMIT * limit_bytes or not 0.005 <= free <= _MOST_MARGIN:
        return text
    return f"{text}: {free:.0%} of {format_bytes(device_bytes)} is kept free"


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
    head = _stages_text(pipeline, device)
    if len(groups) == 1:
        if head:
            yield head
        if all(stage.n_ranks == 1 for stage in stages):
            return
        tensor = _joined_splits([stage.tensor for stage in stages])
        yield from _stage_words(replace(stages[0], tensor=tensor), device)
    elif len(groups) <= _MOST_GROUPS:
        texts = []
        for of in groups.values():
            tensor = _joined_splits([stages[k].tensor for k in of])
            words = _stage_words(replace(stages[of[0]], tensor=tensor), device)
            texts.append(f"{_stages(of)}: {', '.join(words)}")
        yield f"{head} ({'; '.join(texts)})"
    else:
        yield f"{head}, each sharded in its own way"


def _stages_text(pipeline: Pipeline, device: str) -> str:
    """`four stages of 16 GPUs`, `eight stages, two on each of 4 x 16 GPUs`; empty for one."""
    sizes = [mesh.n_ranks for mesh in pipeline.meshes]
    if len(sizes) == 1:
        return ""
    if (n_chunks := pipeline.schedule.n_chunks) > 1:
        n_devices, each = pipeline.schedule.n_devices, _devices(sizes[0], device)
        where = f"each of {n_devices} {device}s" if sizes[0] == 1 else f"{n_devices} times {each}"
        return f"{_number(len(sizes))} stages, {_number(n_chunks)} on {where}"
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
        yield _repeats(stage, device)


def _repeats(stage: StageParallelism, device: str) -> str:
    if stage.n_ranks == 1:
        return "nothing is sharded"
    if stage.is_idle:
        return f"every {device} repeats the same work"
    matmuls = (
        "all matmuls" if stage.repeated == 1 else f"{share_text(stage.repeated)} of matmul FLOPs"
    )
    return f"every {device} repeats {matmuls}"


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


def _joined_splits(stages: Sequence[Mapping[str, Split]]) -> dict[str, Split]:
    """The splits of all stages together.

    Another stage has the embedding whole where one has it split: a tied weight.
    """
    names = [kind for kind in MODULES if any(kind in of for of in stages)]
    every = {kind: [of[kind] for of in stages if kind in of] for kind in names}
    if "embedding" in every:
        every["embedding"] = [max(every["embedding"], key=lambda split: split.n_ranks)]
    return {kind: Split.of(splits) for kind, splits in every.items()}


def _tensor_words(tensor: Mapping[str, Split]) -> Iterator[str]:
    """`attention and MLPs split in four`; one phrase per number of ranks.

    Kinds with hardly any FLOPs are not named, but count for "all matmuls".
    """
    matmuls = {kind: split for kind, split in tensor.items() if kind != "embedding"}
    together = Split.of(matmuls.values())
    named = {k: s for k, s in matmuls.items() if s.flops >= LEAST_FLOPS * together.flops}
    if len(named) > 1 and len({split.n_ranks for split in named.values()}) == 1:
        named = {"all matmuls": together}
    if "embedding" in tensor:
        named["embedding"] = tensor["embedding"]
    by_size: dict[int, list[str]] = {}
    undivided: dict[int, set[int]] = {}
    for kind in sorted(named, key=("all matmuls", *MODULES).index):
        n = named[kind].n_ranks
        if n > 1:
            others = [_named(other) for other in matmuls if other != kind]
            by_size.setdefault(n, []).append(_split_kind(kind, named[kind], others))
            undivided.setdefault(n, set()).update(h for h in named[kind].undivided if h % n)
    for n, of in by_size.items():
        heads = _and(list(map(str, sorted(undivided[n]))))
        why = f" ({heads} heads do not divide by {n})" if heads else ""
        yield f"{_and(of)} split in {_number(n)}{why}"


def _split_kind(kind: str, split: Split, others: Sequence[str]) -> str:
    """`attention`, or `67% of the FLOPs of attention` if not all of it is split alike.

    `others` are the other kinds of matmuls: what has no name is all but these.
    """
    share = split.split_flops / split.flops
    is_whole = share >= 1 - 1e-9
    if kind == "all matmuls" or (kind == "matmuls" and not others):
        return kind if is_whole else f"{share_text(share)} of matmul FLOPs"
    what = f"all matmuls but {_and(others)}" if kind == "matmuls" else _named(kind)
    return what if is_whole else f"{share_text(share)} of the FLOPs of {what}"


def _named(kind: str) -> str:
    return f"the {kind}" if kind in OUTER else kind


def _recompute(pipeline: Pipeline) -> str:
    """`no recompute`, `full recompute of all 80 blocks`, `activations gathered again in ...`."""
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
        done = "activations gathered again in" if mode == "gathers" else f"{mode} recompute of"
        words.append(f"{done} {' and '.join(filter(None, [blocks, others]))}")
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
        simulated_s = (a.step_time_s for a in data.alternatives if not a.is_estimate)
        gain = chosen.step_time_s / min(s for s in simulated_s if s is not None) - 1
        if gain <= 0:
            in_time = " in its time" if NOT_TRIED in known else ""
            return f"It is {_plain(chosen)}: the search found nothing faster{in_time}."
        if gain < _AS_FAST:
            return f"It is {_plain(chosen)}, as fast as the fastest plan found."
        return f"It is {_plain(chosen)}, {_percent(gain)} slower than the fastest plan found."
    timed = [a for a in simple if a.step_time_s is not None]
    bounds_s = [a.least_s for a in simple if a.least_s is not None]
    if timed:
        best = min(timed, key=lambda a: a.step_time_s or 0.0)
        best_s = best.step_time_s or 0.0
        tried = " tried" if min(bounds_s, default=best_s) < best_s else ""
        words = _faster(chosen.step_time_s, best_s, "about " if best.is_estimate else "")
        return f"{words[:1].upper()}{words[1:]} the best simple plan{tried}, {_plain(best)}."
    if bounds_s:
        return f"Every simple plan takes at least {format_seconds(min(bounds_s))}, or does not fit."
    lean = [a for a in simple if a.peak_bytes is not None]
    if not lean:
        return ""
    best = min(lean, key=lambda a: a.peak_bytes or 0.0)
    return f"No simple plan fits: {_plain(best)} needs {format_bytes(best.peak_bytes or 0.0)}."


def _within_error(data: PlanData, pipeline: Pipeline, predicted: Predicted) -> str:
    """Of a searched plan that beats the best simple one by less than predictions err: what it needs
    for that, and how to get the simple one; else empty."""
    known = {a.name: a for a in data.alternatives}
    chosen = known.get(data.chosen)
    timed = [a for a in data.alternatives if a.recipe and a.step_time_s is not None]
    if chosen is None or chosen.recipe or not chosen.step_time_s or not timed:
        return ""
    best = min(timed, key=lambda a: a.step_time_s or 0.0)
    best_s = best.step_time_s or 0.0
    gain = best_s / chosen.step_time_s - 1
    if gain <= 0 or not is_within_error(predicted, chosen.step_time_s, best_s):
        return ""
    way_out = f"tie={math.ceil(100 * gain) / 100:g} chooses that"
    if best.is_estimate:  # simulated, it may be slower than the tie allows
        way_out = "That is estimated, not simulated"
    return (
        f"That is within {ERROR_TEXT}: {_calls(data, pipeline, best)}. "
        f"{way_out}: {format_seconds(best_s)}."
    )


def _calls(data: PlanData, pipeline: Pipeline, simple: Alternative) -> str:
    """`it needs 17,904 calls of 16 kinds of collectives, the simple plan 2 kinds`."""
    every = collectives_of(pipeline, data.optimizer)
    kinds = {(c.stage, c.kind, c.axes_text) for c in every}
    n_calls = sum(c.count for c in every)
    needs = f"{n_calls:,} calls of {_kinds(len(kinds))} of" if every else "no"
    text = f"it needs {needs} collectives"
    if simple.summary is None:
        return f"{text}, and the simple plan others"
    return f"{text}, the simple plan {_kinds(len(simple.summary.traffic_bytes))}"


def _kinds(n: int) -> str:
    return f"{n} kind{'s' if n != 1 else ''}"


def _faster(own_s: float, other_s: float, about: str) -> str:
    """`4.0% faster than`, of a plan that takes `own_s`."""
    if abs(other_s / own_s - 1) < _AS_FAST:
        return f"{about}as fast as"
    if own_s > other_s:
        return f"{about}{_percent(own_s / other_s - 1)} slower than"
    if other_s < 2 * own_s:
        return f"{about}{_percent(other_s / own_s - 1)} faster than"
    times = other_s / own_s
    return (
        f"{about}{times:.2g} times as fast as"
        if times < 10
        else f"{about}{times:.0f} times as fast as"
    )


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.0995 else f"{share:.0%}"


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
