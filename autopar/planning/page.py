"""Everything that a plan's page shows, computed: its costs, what it was chosen over, what helps.

choices   other options, planned again; twice the microbatches, simulated; the fastest recipe
machine   the same plan on a machine with one part twice as fast, simulated; with half or twice the
          memory, or twice the nodes, planned again
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from autopar.cost.hardware import changed, doublings, profile_of, resolve_on
from autopar.cost.price import link_between, timeline_of
from autopar.errors import AutoparError
from autopar.manual import Manual
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.passes.analysis import blocks
from autopar.passes.binding import example_of
from autopar.passes.compilation import Compilation
from autopar.passes.explain import runners_up
from autopar.passes.facts import Placed, Source, Target, Unverified
from autopar.passes.pipeline import PASSES
from autopar.passes.search import PlanningResult
from autopar.planning.bound import Bound
from autopar.planning.commands import Commands, ShellModel, round_limit
from autopar.plans import Alternative, PlanData
from autopar.program.graph import Program
from autopar.program.lines import Pipeline
from autopar.report import Help, Subject
from autopar.schedule import ORDERS
from autopar.units import format_bytes

# Planning again stops after so many seconds; the row then shows the best plan so far.
REPLAN_S = 10.0
_SAME_REL = 1e-6
_RECIPES = ("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3", "Megatron")
_WORDS = {
    "device.peak_flops_per_s": "matmuls twice as fast",
    "device.peak_bytes_per_s": "device memory twice as fast",
    "link.intra_node.s_per_byte": "links inside a node twice as fast",
    "link.inter_node.s_per_byte": "links between nodes twice as fast",
}


def subject_of(bound: Bound, with_replans: bool, shell: ShellModel | None = None) -> Subject:
    """What the page of a bound plan is made of; `shell` is how a command line named its model."""
    commands = Commands.of(bound, shell)
    choices = [
        *_choices(bound, commands, with_replans),
        _more_microbatches(bound, commands),
        *_simpler(bound, commands),
    ]
    machine = [
        *_faster_parts(bound, commands),
        *_memory(bound, commands, with_replans),
        *_nodes(bound, commands, with_replans),
    ]
    return Subject(
        bound.data,
        bound.pipeline,
        bound.predicted,
        bound.collectives,
        bound.costs,
        bound.timeline(),
        bound.hardware,
        runners_up(bound.stages, bound.data),
        choices,
        machine,
        commands.plan(),
        bound.sources,
        bound.assumed,
    )


def _choices(bound: Bound, commands: Commands, with_replans: bool) -> Iterator[Help]:
    """Options that anyone can change: what runs again, how the batch is cut, precision."""
    options, reruns = commands.options, _reruns(bound.data)
    n, n_rows = bound.data.microbatches, _batch_size(bound)
    changes: dict[str, dict[str, Any]] = {}
    if blocks(bound.analysis):
        what = "no recompute" if reruns else "recompute of all blocks"
        changes[what] = _recompute(options, recompute="none" if reruns else "full")
    if options.manual is None or options.manual.microbatch_size is None:
        for count, size in ((2 * n, "half"), (n // 2, "twice")):
            if count and n_rows % count == 0:
                many = f"{count} microbatch{'' if count == 1 else 'es'}, {size} the size"
                changes[many] = {"microbatches": count}
    for what, change in changes.items():
        yield _replanned(bound, what, "", commands.plan(**change), with_replans, change)
    dtypes = {p.stored.dtype for s in bound.pipeline.stages for p in s.parameters}
    if bound.data.precision == "model" and dtypes == {torch.float32}:
        note = "not priced here: the graph is captured again"
        command = commands.plan(precision="bf16-mixed")
        yield Help("compute in bf16, state in float32", None, None, note, command)


def _recompute(options: Options, recompute: str) -> dict[str, Any]:
    """What to change for a mode of recompute: of a recipe, the recipe's."""
    if options.manual is None or options.recompute != "auto":
        return {"recompute": recompute}
    return {"manual": replace(options.manual, recompute=recompute)}


def _simpler(bound: Bound, commands: Commands) -> Iterator[Help]:
    """The fastest recipe, if the plan is none."""
    known = [a for a in bound.data.alternatives if a.recipe and a.step_time_s is not None]
    if not known or bound.data.recipe:
        return
    best = min(known, key=lambda a: a.step_time_s or 0.0)
    if manual := _recipe(best):
        gain = bound.predicted.step_time_s / (best.step_time_s or 1.0) - 1
        note = "an estimate" if best.is_estimate else ""
        command = commands.plan(manual=manual)
        what = f"a simpler plan: {best.name}"
        yield Help(what, best.step_time_s, gain, note, command, best.peak_bytes)


def _recipe(row: Alternative) -> Manual | None:
    """The options of a recipe of one stage and one microbatch."""
    match = re.fullmatch(r"(.+) on dp=(\d+)(?: x tp=(\d+))?", row.name)
    if match is None or row.recipe not in _RECIPES:
        return None
    zero = re.search(r"ZeRO-(\d)", match[1])
    return Manual(
        dp=int(match[2]), tp=int(match[3] or 1), sp="with SP" in match[1],
        zero=int(zero[1]) if zero else 0,
    )  # fmt: skip


def _faster_parts(bound: Bound, commands: Commands) -> Iterator[Help]:
    """Each part of the machine twice as fast, with the same decisions.

    Nothing of a machine whose links and device were given as numbers: it has no profile to change.
    """
    if bound.mesh.links is not None:
        return
    *nodes, n_local = bound.mesh.shape
    n_nodes = math.prod(nodes)
    for change in doublings(profile_of(bound.mesh)):
        key = change.partition("=")[0]
        is_alone = n_nodes == 1 if "inter_node" in key else n_local == 1 and "intra_node" in key
        if is_alone:
            continue
        step_s = _changed_step_s(bound, change)
        gain = bound.predicted.step_time_s / step_s - 1
        yield Help(_WORDS[key], step_s, gain, "", commands.what_if(change))


def _changed_step_s(bound: Bound, change: str) -> float:
    """What `plan.what_if(change)` takes. Lines do not know links, and what is proved stays proved,
    so only what the change touches is made again."""
    profile = changed(profile_of(bound.mesh), change)
    hardware = resolve_on(profile, bound.mesh, bound.hardware.dtype, bound.options.software)
    machine = bound.mesh.with_links(hardware.links, hardware.device)
    target = replace(bound.compilation[Target], mesh=machine)
    other = Compilation(PASSES, target, bound.data, bound.analysis)
    costs = [stage.cost for stage in other[Placed].stages]
    pipeline = bound.pipeline if change.startswith("link.") else other[Unverified].pipeline
    links = link_between(target.mesh, hardware.links)
    return timeline_of(pipeline, costs, bound.data.optimizer, links).step_time_s


def _more_microbatches(bound: Bound, commands: Commands) -> Help:
    """Twice the batch, as twice the microbatches of the same size."""
    pipeline, n = bound.pipeline, 2 * bound.data.microbatches
    programs = [replace(program, n_microbatches=n) for program in pipeline.stages]
    doubled = Pipeline.of(programs, pipeline.meshes, ORDERS[bound.data.schedule])
    links = link_between(bound.mesh, bound.hardware.links)
    step_s = timeline_of(doubled, bound.costs, bound.data.optimizer, links).step_time_s
    note = f"{n} microbatches of the same size; another plan may be faster"
    cut: dict[str, Any] = {} if commands.options.microbatches == "auto" else {"microbatches": n}
    return Help(
        "twice the batch", step_s, 2 * bound.predicted.step_time_s / step_s - 1, note,
        commands.plan(batch=2, **cut),
    )  # fmt: skip


def _memory(bound: Bound, commands: Commands, with_replans: bool) -> Iterator[Help]:
    """Half and twice the memory: the same plan where it fits and nothing binds, else another."""
    peak_bytes, limit_bytes = bound.predicted.peak_bytes, bound.limit_bytes
    for what, factor in (("half the memory", 0.5), ("twice the memory", 2.0)):
        other_bytes = round_limit(limit_bytes * factor)
        changed: dict[str, Any] = {"memory_limit": other_bytes, "memory_margin": None}
        command = commands.plan(**changed)
        limit = format_bytes(other_bytes)
        if factor < 1 and peak_bytes <= other_bytes:
            note = f"the plan fits in {limit} as it is: it needs {format_bytes(peak_bytes)}"
            yield Help(what, bound.predicted.step_time_s, 0.0, note, command, peak_bytes)
            continue
        does_not = f"the plan needs {format_bytes(peak_bytes)} of {limit}" if factor < 1 else ""
        yield _replanned(bound, what, does_not, command, with_replans, changed)


def _nodes(bound: Bound, commands: Commands, with_replans: bool) -> Iterator[Help]:
    """Twice the nodes; of a mesh of one axis, twice the devices. Not if options fix the ranks."""
    options = commands.options
    if options.manual or isinstance(options.stages, tuple) or options.mesh_shape != "auto":
        return
    first, *others = bound.mesh.shape
    mesh = replace(bound.mesh, shape=(2 * first, *others))
    what = "twice the nodes, same batch" if others else "twice the devices, same batch"
    yield _replanned(bound, what, "", commands.plan(mesh), with_replans, mesh=mesh)


def _replanned(
    bound: Bound,
    what: str,
    note: str,
    command: str,
    with_replans: bool,
    changed: Mapping[str, Any] = MappingProxyType({}),
    mesh: Mesh | None = None,
) -> Help:
    """The best plan of the same program with other options, or on another mesh."""
    if not with_replans:
        return Help(what, None, None, note or "not planned again", command)
    target = bound.compilation[Target]
    options = replace(target.options, **changed, time_limit_s=REPLAN_S, progress=False)
    made = bound.compilation
    program = made[Program] if Program in made else bound.analysis.program  # noqa: SIM401, no `get`
    try:
        source = Source(nn.Module(), example_of(bound.data))
        machine = Target(mesh or bound.mesh, options)
        compilation = Compilation(PASSES, source, machine, program)
        found, data = compilation[PlanningResult].solved, compilation[PlanData]
    except AutoparError as error:
        return Help(what, None, None, str(error).splitlines()[0], command)
    name, gain = found.candidate.name, bound.predicted.step_time_s / found.step_time_s - 1
    other = "the same view with other placements" if name == bound.data.chosen else name
    if _reruns(data) != _reruns(bound.data):
        other = f"{'recompute' if _reruns(data) else 'no recompute'}, {other}"
    words = [note, f"then: {other}" if abs(gain) > _SAME_REL else "nothing changes"]
    note = "; ".join(filter(None, words))
    return Help(what, found.step_time_s, gain, note, command, found.peak_bytes)


def _reruns(data: PlanData) -> bool:
    return any(stage.recomputed for stage in data.stages)


def _batch_size(bound: Bound) -> int:
    return bound.analysis.batch.size * bound.analysis.batch.n_accumulated
