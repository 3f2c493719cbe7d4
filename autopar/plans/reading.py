"""Reads a plan from JSON: every value is checked, and its place is named where it is wrong.

What is checked here needs no model: types, ranges, words, and that sizes agree with each other.
Whether a placement is legal is checked when the plan is laid on its model (`passes/lowering`).
The limits are far above what runs, so that no file takes memory or time before it is refused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from autopar.errors import OptionError, PlanError
from autopar.lengths import Lengths, parse_lengths
from autopar.mesh import is_axis_name
from autopar.options import FORBIDDABLE, OPTIMIZERS, REDUCE_DTYPES, SOFTWARE
from autopar.plans.data import (
    VERSION,
    Alternative,
    InputSignature,
    MeshRecord,
    PlanData,
    PlanSummary,
    StageRecord,
)
from autopar.plans.json_values import Json, parse_json, read_json
from autopar.precision import WORDS as PRECISIONS
from autopar.program.lines import has_clashing_groups
from autopar.schedule import CHUNKS, ORDERS

MOST_RANKS = 2**20
MOST_AXES = 8
MOST_STAGES = 10_000
MOST_MICROBATCHES = 2**20
MOST_DIMS = 64
MOST_ELEMENTS = 2**48
MOST_COUNTED = 2**40
# Of seconds, and of rates and bytes; a rate has a least value, because times are divided by it.
_MOST_SECONDS, _LEAST_RATE, _MOST_RATE = 1e12, 1e-6, 1e40

_INPUT_DTYPES = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 "
    "float16 bfloat16 float32 float64 complex64 complex128"
).split()
_KEYS = frozenset(
    "version model graph_hash mesh microbatches precision optimizer schedule inputs static_inputs "
    "positional batch_dims forbid stages objective_s stage_gap chosen alternatives".split()
)
_OPTIONAL = frozenset(
    "comments padded kept_whole accumulates recipe bound_s limit_bytes reduce_dtype "
    "master_weights ruled_out imbalance lengths software".split()
)
_TABLES = ("parameters", "operators", "received", "sent")


def load_plan(path: str | Path) -> PlanData:
    """The plan in a file. Raises `PlanError`, which names the place that is malformed."""
    return _plan(read_json(path))


def parse_plan(text: str, where: str = "plan") -> PlanData:
    """The plan in a text, as `load_plan`; `where` names the text in errors."""
    return _plan(parse_json(text, where))


def _plan(document: Json) -> PlanData:
    found = document.members()
    version = found.get("version")
    if version is None or version.value != VERSION or isinstance(version.value, bool):
        shown = "no version" if version is None else f"version {str(version.value)[:20]}"
        raise PlanError(
            f"{document.where} has {shown}; this autopar reads {VERSION}",
            hint="plan again with this version",
        )
    gap = "gap" if "gap" in found else "stage_gap"  # what version 0.3.0 called it
    raw = document.record(_KEYS - {"stage_gap"} | {gap}, _OPTIONAL)
    inputs = _inputs(raw["inputs"])
    static = {path: _scalar(leaf) for path, leaf in raw["static_inputs"].members().items()}
    mesh, stages = _mesh(raw["mesh"]), _stages(raw["stages"])
    plan = PlanData(
        model=raw["model"].text(),
        graph_hash=raw["graph_hash"].text(),
        mesh=mesh,
        microbatches=raw["microbatches"].whole(1, MOST_MICROBATCHES),
        precision=raw["precision"].word(PRECISIONS),
        optimizer=raw["optimizer"].word(OPTIMIZERS),
        schedule=raw["schedule"].word(ORDERS),
        inputs=inputs,
        static_inputs=static,
        positional=raw["positional"].flag(),
        batch_dims=_batch_dims(raw["batch_dims"], inputs),
        forbid=tuple(word.word(FORBIDDABLE) for word in raw["forbid"].items()),
        stages=stages,
        objective_s=raw["objective_s"].number(0, _MOST_SECONDS),
        stage_gap=raw[gap].number(0, _MOST_RATE),
        chosen=raw["chosen"].text(),
        alternatives=tuple(_alternative(item) for item in raw["alternatives"].items()),
        **_optional(raw, stages),
    )
    _check_ranks(document, plan)
    _check_paths(raw, plan)
    return plan


def _optional(raw: Mapping[str, Json], stages: Collection[StageRecord]) -> dict[str, Any]:
    """The values of the keys that may be missing, of those that are there."""
    readers = {
        "comments": _texts,
        "padded": lambda value: _padded(value, stages),
        "kept_whole": lambda value: tuple(name.text() for name in value.items()),
        "accumulates": Json.flag,
        "recipe": Json.text,
        "bound_s": lambda value: _optional_number(value, _MOST_SECONDS),
        "ruled_out": lambda value: _counts(value),
        "limit_bytes": lambda value: _optional_number(value, _MOST_RATE),
        "reduce_dtype": lambda value: None if value.is_null else value.word(REDUCE_DTYPES),
        "master_weights": Json.flag,
        "imbalance": lambda value: value.number(1, MOST_RANKS),
        "lengths": _lengths,
        "software": lambda value: value.word(SOFTWARE),
    }
    return {key: read(raw[key]) for key, read in readers.items() if key in raw}


def _lengths(value: Json) -> Lengths:
    pairs = []
    for item in value.items():
        tokens, share = item.items(2, 2)
        pairs.append((tokens.whole(1, MOST_ELEMENTS), share.number(0, 1)))
    try:
        return parse_lengths(pairs)
    except OptionError as error:
        raise PlanError(f"{value.place}: {error}", where=value.where) from error


def _counts(value: Json) -> dict[str, int]:
    return {key: count.whole(0, MOST_COUNTED) for key, count in value.members().items()}


def _mesh(value: Json) -> MeshRecord:
    raw = value.record("shape axis_names hardware links device".split(), ["figures"])
    shape = tuple(size.whole(1, MOST_RANKS) for size in raw["shape"].items(1, 3))
    if math.prod(shape) > MOST_RANKS:
        raise PlanError(
            f"{raw['shape'].place} has {math.prod(shape):,} ranks; a plan has at most "
            f"{MOST_RANKS:,}",
            where=value.where,
        )
    n = len(shape)
    names = tuple(_axis_name(name) for name in raw["axis_names"].items(n, n))
    if len(set(names)) != n:
        raise PlanError(f"{raw['axis_names'].place} has {names[0]} twice", where=value.where)
    device = raw["device"].record("flops_per_s bytes_per_s memory_bytes launch_s".split())
    launch = device.pop("launch_s").number(0, _MOST_SECONDS)
    rates = {key: rate.number(_LEAST_RATE, _MOST_RATE) for key, rate in device.items()}
    figures = raw["figures"].members() if "figures" in raw else {}
    return MeshRecord(
        shape,
        names,
        raw["hardware"].text(),
        tuple(_link(link) for link in raw["links"].items(n, n)),
        {**rates, "launch_s": launch},
        {key: figure.number(0, _MOST_RATE) for key, figure in figures.items()},
    )


def _link(value: Json) -> tuple[float, ...]:
    """The fields of a `Link`; the third only for a switch that sums."""
    return tuple(number.number(0, _MOST_SECONDS) for number in value.items(2, 3))


def _axis_name(value: Json) -> str:
    name = value.text()
    if not is_axis_name(name):
        raise value.refused("a Python identifier of ASCII letters that is no keyword")
    return name


def _inputs(value: Json) -> tuple[InputSignature, ...]:
    found: list[InputSignature] = []
    for item in value.items():
        raw = item.record(["path", "shape", "dtype"])
        shape = tuple(n.whole(0, MOST_ELEMENTS) for n in raw["shape"].items(0, MOST_DIMS))
        if math.prod(max(n, 1) for n in shape) > MOST_ELEMENTS:
            raise PlanError(
                f"{raw['shape'].place} is {list(shape)}; expected at most {MOST_ELEMENTS:,} "
                "elements",
                where=value.where,
            )
        found.append(InputSignature(raw["path"].text(), shape, raw["dtype"].word(_INPUT_DTYPES)))
    return tuple(found)


def _scalar(value: Json) -> Any:
    """An input that is no tensor: the graph has it as a constant."""
    match value.value:
        case None | bool():
            return value.value
        case str():
            return value.text()
        case int():
            return value.whole(-(2**63), 2**63 - 1)
        case float():
            return value.number(-_MOST_RATE, _MOST_RATE)
    raise value.refused("a number, a text, true, false or null")


def _batch_dims(value: Json, inputs: tuple[InputSignature, ...]) -> dict[str, int | None]:
    n_dims = {signature.path: len(signature.shape) for signature in inputs}
    found: dict[str, int | None] = {}
    for path, dim in value.members().items():
        if path not in n_dims:
            raise PlanError(f"{dim.place} is of no input of the plan", where=value.where)
        if dim.is_null:
            found[path] = None
        elif n_dims[path] == 0:
            raise dim.refused("null, because the input has no dims")
        else:
            found[path] = dim.whole(0, n_dims[path] - 1)
    return found


def _alternative(value: Json) -> Alternative:
    more = "note recipe peak_bytes least_s is_estimate slower_by summary".split()
    raw = value.record(["name", "step_time_s"], more)
    readers: dict[str, Callable[[Json], Any]] = {
        "step_time_s": lambda found: _optional_number(found, _MOST_SECONDS),
        "peak_bytes": lambda found: _optional_number(found, _MOST_RATE),
        "least_s": lambda found: _optional_number(found, _MOST_SECONDS),
        "is_estimate": Json.flag,
        "summary": _summary,
    }
    return Alternative(**{key: readers.get(key, Json.text)(found) for key, found in raw.items()})


def _summary(value: Json) -> PlanSummary | None:
    if value.is_null:
        return None
    raw = value.record([f.name for f in fields(PlanSummary)])
    times = {key: found.number(0, _MOST_SECONDS) for key, found in raw["times_s"].members().items()}
    traffic = raw["traffic_bytes"].members()
    return PlanSummary(
        times, {key: found.number(0, _MOST_RATE) for key, found in traffic.items()},
        _texts(raw["parameters"]),
    )  # fmt: skip


def _optional_number(value: Json, most: float) -> float | None:
    return None if value.is_null else value.number(0, most)


def _stages(value: Json) -> tuple[StageRecord, ...]:
    return tuple(_stage(stage) for stage in value.items(1, MOST_STAGES))


def _stage(value: Json) -> StageRecord:
    raw = value.record(["begins_at", "mesh_shape", "axes", *_TABLES], ["recomputed"])
    nodes, per_node = (n.whole(1, MOST_RANKS) for n in raw["mesh_shape"].items(2, 2))
    axes: dict[str, int] = {}
    for name, size in raw["axes"].members(1, MOST_AXES).items():
        _axis_name(Json(name, value.where, f"a key of {raw['axes'].place}"))
        axes[name] = size.whole(1, MOST_RANKS)
    if math.prod(axes.values()) != nodes * per_node:
        raise PlanError(
            f"{raw['axes'].place} hold {math.prod(axes.values()):,} ranks, "
            f"{raw['mesh_shape'].place} has {nodes * per_node:,}",
            where=value.where,
        )
    if has_clashing_groups(tuple(axes)):
        raise raw["axes"].refused("names that differ when some are joined by _")
    tables = {key: _texts(raw[key]) for key in (*_TABLES, "recomputed") if key in raw}
    return StageRecord(raw["begins_at"].text(), (nodes, per_node), axes, **tables)


def _texts(value: Json) -> dict[str, str]:
    return {key: text.text() for key, text in value.members().items()}


def _padded(value: Json, stages: Collection[StageRecord]) -> dict[str, tuple[int, ...]]:
    known = {name for stage in stages for name in stage.parameters}
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in value.members().items():
        if name not in known:
            raise PlanError(f"{shape.place} is of no parameter of the plan", where=value.where)
        sizes = tuple(n.whole(0, MOST_ELEMENTS) for n in shape.items(0, MOST_DIMS))
        if math.prod(sizes) > MOST_ELEMENTS:
            raise shape.refused(f"at most {MOST_ELEMENTS:,} elements")
        found[name] = sizes
    return found


def _check_ranks(document: Json, plan: PlanData) -> None:
    """Raises `PlanError` unless the stages have the ranks of the mesh, each equally often."""
    held, n_ranks = sum(stage.n_ranks for stage in plan.stages), math.prod(plan.mesh.shape)
    n_chunks, n_stages = held // n_ranks, len(plan.stages)
    fewest, most = CHUNKS[plan.schedule]
    is_plain = n_chunks == 1 and (fewest == 1 or n_stages == 1)
    is_allowed = is_plain or fewest <= n_chunks <= (most or n_chunks)
    if held % n_ranks or not n_chunks or not is_allowed or n_stages % n_chunks:
        raise PlanError(
            f"the plan's stages hold {held:,} ranks, the mesh has {n_ranks:,}",
            where=document.where,
            hint=f"{plan.schedule} has {fewest} or more stages on a rank" if fewest > 1 else None,
        )
    layouts: dict[int, StageRecord] = {}
    for k, (device, stage) in enumerate(zip(plan.devices, plan.stages, strict=True)):
        first = layouts.setdefault(device, stage)
        if (stage.mesh_shape, [*stage.axes.items()]) != (first.mesh_shape, [*first.axes.items()]):
            raise PlanError(
                f"stages[{k}] has other axes than an earlier stage on its ranks",
                where=document.where,
            )


def _check_paths(raw: Mapping[str, Json], plan: PlanData) -> None:
    """Raises `PlanError` for an input that is there twice, or for positions with gaps."""
    paths = [*(signature.path for signature in plan.inputs), *plan.static_inputs]
    place, where = raw["inputs"].place, raw["inputs"].where
    if twice := [path for path, n in Counter(paths).items() if n > 1]:
        raise PlanError(f"{place} and static_inputs have {twice[0]!r} twice", where=where)
    heads = {path.partition(".")[0] for path in paths}
    if plan.positional and heads != {str(k) for k in range(len(heads))}:
        raise PlanError(
            f"{place} and static_inputs are at {sorted(heads)[:5]}; positional inputs are at "
            "0, 1 and so on",
            where=where,
        )
