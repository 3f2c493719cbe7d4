"""Everything that a plan's page shows, computed: its costs, what it was chosen over, what helps.

helps   the same plan on a machine with one part twice as fast, or with twice the microbatches,
        simulated; with half or twice the memory, or twice the nodes, planned again
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from autopar.cost.hardware import changed, doublings, profile_of, resolve_on
from autopar.cost.price import link_between, timeline_of
from autopar.errors import AutoparError
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.passes.binding import example_of
from autopar.passes.compilation import Compilation
from autopar.passes.explain import runners_up
from autopar.passes.facts import Placed, Source, Target, Unverified
from autopar.passes.pipeline import PASSES
from autopar.passes.search import PlanningResult
from autopar.planning.bound import Bound
from autopar.program.graph import Program
from autopar.program.lines import Pipeline
from autopar.report import Help, Subject
from autopar.schedule import ORDERS
from autopar.units import format_bytes

# Planning again stops after so many seconds; the row then shows the best plan so far.
REPLAN_S = 10.0
_SAME_REL = 1e-6
_WORDS = {
    "device.peak_flops_per_s": "matmuls twice as fast",
    "device.peak_bytes_per_s": "device memory twice as fast",
    "link.intra_node.s_per_byte": "links inside a node twice as fast",
    "link.inter_node.s_per_byte": "links between nodes twice as fast",
}


def subject_of(bound: Bound, with_replans: bool) -> Subject:
    """What the page of a bound plan is made of."""
    return Subject(
        bound.data,
        bound.pipeline,
        bound.predicted,
        bound.collectives,
        bound.costs,
        bound.timeline(),
        bound.hardware,
        runners_up(bound.stages, bound.data),
        [
            *_faster_parts(bound),
            _more_microbatches(bound),
            *_memory(bound, with_replans),
            *_nodes(bound, with_replans),
        ],
        bound.sources,
        bound.assumed,
    )


def _faster_parts(bound: Bound) -> Iterator[Help]:
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
        command = f"autopar simulate plan.json --model MODEL --what-if {change}"
        yield Help(_WORDS[key], step_s, gain, "", command)


def _changed_step_s(bound: Bound, change: str) -> float:
    """What `plan.what_if(change)` takes. Lines do not know links, and what is proved stays proved,
    so only what the change touches is made again."""
    profile = changed(profile_of(bound.mesh), change)
    hardware = resolve_on(profile, bound.mesh, bound.hardware.dtype)
    target = Target(bound.mesh.with_links(hardware.links, hardware.device), Options())
    other = Compilation(PASSES, target, bound.data, bound.analysis)
    costs = [stage.cost for stage in other[Placed].stages]
    pipeline = bound.pipeline if change.startswith("link.") else other[Unverified].pipeline
    links = link_between(target.mesh, hardware.links)
    return timeline_of(pipeline, costs, bound.data.optimizer, links).step_time_s


def _more_microbatches(bound: Bound) -> Help:
    """Twice the batch, as twice the microbatches of the same size."""
    pipeline, n = bound.pipeline, 2 * bound.data.microbatches
    programs = [replace(program, n_microbatches=n) for program in pipeline.stages]
    doubled = Pipeline.of(programs, pipeline.meshes, ORDERS[bound.data.schedule])
    links = link_between(bound.mesh, bound.hardware.links)
    step_s = timeline_of(doubled, bound.costs, bound.data.optimizer, links).step_time_s
    note = f"{n} microbatches of the same size; another plan may be faster"
    return Help(
        "twice the batch", step_s, 2 * bound.predicted.step_time_s / step_s - 1, note,
        f"autopar plan MODEL {_machine(bound.mesh, bound)} --batch {2 * _batch_size(bound)}",
    )  # fmt: skip


def _memory(bound: Bound, with_replans: bool) -> Iterator[Help]:
    """Half and twice the memory: the same plan where it fits and nothing binds, else another."""
    peak_bytes, limit_bytes = bound.predicted.peak_bytes, bound.limit_bytes
    for what, factor in (("half the memory", 0.5), ("twice the memory", 2.0)):
        other_bytes = int(limit_bytes * factor)
        command = f"autopar plan MODEL {_machine(bound.mesh, bound)} --memory-limit {other_bytes}B"
        limit = format_bytes(other_bytes)
        if factor < 1 and peak_bytes <= other_bytes:
            note = f"the plan fits in {limit} as it is: it needs {format_bytes(peak_bytes)}"
            yield Help(what, bound.predicted.step_time_s, 0.0, note, command)
            continue
        does_not = f"the plan needs {format_bytes(peak_bytes)} of {limit}" if factor < 1 else ""
        yield _replanned(bound, what, does_not, command, with_replans, limit=other_bytes)


def _nodes(bound: Bound, with_replans: bool) -> Iterator[Help]:
    """Twice the nodes; of a mesh of one axis, twice the devices."""
    first, *others = bound.mesh.shape
    mesh = replace(bound.mesh, shape=(2 * first, *others))
    what = "twice the nodes, same batch" if others else "twice the devices, same batch"
    command = f"autopar plan MODEL {_machine(mesh, bound)}"
    yield _replanned(bound, what, "", command, with_replans, mesh=mesh)


def _replanned(
    bound: Bound,
    what: str,
    note: str,
    command: str,
    with_replans: bool,
    limit: int | None = None,
    mesh: Mesh | None = None,
) -> Help:
    """The best plan of the same program under another limit, or on another mesh."""
    if not with_replans:
        return Help(what, None, None, note or "not planned again", command)
    target = bound.compilation[Target]
    options = replace(
        target.options,
        memory_limit=limit or target.options.memory_limit,
        time_limit_s=REPLAN_S,
        progress=False,
    )
    made = bound.compilation
    program = made[Program] if Program in made else bound.analysis.program  # noqa: SIM401, no `get`
    try:
        source = Source(nn.Module(), example_of(bound.data))
        machine = Target(mesh or bound.mesh, options)
        found = Compilation(PASSES, source, machine, program)[PlanningResult].solved
    except AutoparError as error:
        return Help(what, None, None, str(error).splitlines()[0], command)
    name, gain = found.candidate.name, bound.predicted.step_time_s / found.step_time_s - 1
    other = "the same view with other placements" if name == bound.data.chosen else name
    words = [note, f"then: {other}" if abs(gain) > _SAME_REL else "nothing changes"]
    return Help(what, found.step_time_s, gain, "; ".join(filter(None, words)), command)


def _machine(mesh: Mesh, bound: Bound) -> str:
    """The flags of a mesh; links and devices given as numbers have none."""
    shape = "x".join(map(str, mesh.shape))
    profile = "PROFILE.toml" if mesh.links is not None else bound.data.mesh.hardware
    return f"--mesh {shape} --hardware {profile}"


def _batch_size(bound: Bound) -> int:
    return bound.analysis.batch.size * bound.analysis.batch.n_accumulated
