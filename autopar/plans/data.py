"""Plan data: everything a plan decides, as JSON that a person can edit.

Keys are stable: parameters go by name, operators by "module path/operator name#occurrence", never
by graph node. A plan holds no code. Its costs are for the reader: they are computed again when a
plan is loaded. A stage starts at an operator and ends before the first of the next stage. Its ranks
follow those of the stage before. If stages hold v times the ranks of the mesh, each rank has v of
them (chunks), as the schedule places them. The entries of a stage are

    parameters       the storage and, if it is sharded, how often it is gathered   `I S(0)`
    operators        `inputs -> outputs`: one spec per tensor, one placement per logical axis
    received, sent   key of the operator that made a value -> how it is cut when it crosses
    recomputed       key of the first operator that runs again in backward -> `full until KEY`,
                     where KEY is the last one's; the modes are those of `options.Recompute`

and besides, for the whole plan

    padded           parameter -> the padded shape it is stored with (`passes/analysis/padding.py`)
    comments         parameter -> a remark of the planner
    kept_whole       operators without a rule that the user accepted (`passes/analysis/fallback.py`)
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch

from autopar.errors import OptionError, PlanError
from autopar.lengths import Lengths
from autopar.manual import Recompute
from autopar.placement import Spec
from autopar.precision import Precision
from autopar.program.lines import Period, Storage
from autopar.schedule import devices_of

VERSION = 2


@dataclass(frozen=True)
class InputSignature:
    """Shape and dtype of one model input. With it a saved plan needs no example inputs."""

    path: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class MeshRecord:
    """The mesh that a plan was made for, without any path.

    hardware        name of its profile, or "explicit" for links and a device given as numbers
    links, device   those numbers; of a profile, what it means for this mesh and the plan's dtype
    figures         those of a profile that is not shipped
    """

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    hardware: str
    links: tuple[tuple[float, ...], ...]
    device: Mapping[str, float]
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PlanSummary:
    """A plan in few words: what its step is made of, what it sends, how parameters are placed.

    times_s         seconds of the busiest stage by kind (`cost/price/shares.py`), as
                    `collective over dp`; they add up to the step
    traffic_bytes   `all_gather over dp` -> bytes of a step, on the first rank of each stage
    parameters      name with stars for numbers -> `S(0) on dp=8, used whole`
    """

    times_s: Mapping[str, float]
    traffic_bytes: Mapping[str, float]
    parameters: Mapping[str, str]


@dataclass(frozen=True)
class Alternative:
    """A plan that was considered, and what the search found out about it.

    step_time_s   predicted; None if it has no plan that fits and may be the fastest
    note          in words, what the numbers do not say
    recipe        "data parallel", "ZeRO-3" or "Megatron"; empty for the search
    peak_bytes    on one rank; without `step_time_s`, what the leanest placements need
    least_s       lower bound on its step, of what was ruled out by it
    is_estimate   `step_time_s` is the search's estimate: it could not win, and was not simulated
    slower_by     what makes it slower than the plan: `all_reduce across nodes`
    summary       of the fastest ones; else None
    """

    name: str
    step_time_s: float | None
    note: str = ""
    recipe: str = ""
    peak_bytes: float | None = None
    least_s: float | None = None
    is_estimate: bool = False
    slower_by: str = ""
    summary: PlanSummary | None = None

    @property
    def is_too_large(self) -> bool:
        """Does not even its leanest plan fit?"""
        return self.step_time_s is None and self.least_s is None and self.peak_bytes is not None


@dataclass(frozen=True)
class StageRecord:
    """The decisions of one stage. `mesh_shape` is its (nodes, devices per node)."""

    begins_at: str
    mesh_shape: tuple[int, int]
    axes: Mapping[str, int]
    parameters: Mapping[str, str]
    operators: Mapping[str, str]
    received: Mapping[str, str] = field(default_factory=dict)
    sent: Mapping[str, str] = field(default_factory=dict)
    recomputed: Mapping[str, str] = field(default_factory=dict)

    @property
    def n_ranks(self) -> int:
        return math.prod(self.axes.values())


# `PlanData.recipe` of a plan with the option `manual`.
MANUAL = "manual=Manual(...)"


@dataclass(frozen=True)
class PlanData:
    """The decisions of a plan. The docstring of this file explains the texts.

    objective_s   seconds of a step, as the solver minimised them
    stage_gap     the worst proven gap of a stage's own problem, relative; 0 for a recipe
    bound_s       no plan takes less; None where nothing is proven of all plans
    ruled_out     level of the search -> how many sets of plans got no further
    limit_bytes   the memory limit per device that it was planned for; None in older files
    reduce_dtype  as the option of that name
    recipe        the recipe that placed it, `MANUAL` for the user's; empty for the search
    imbalance, lengths, software   as the options of these names: what it was priced with
    """

    model: str
    graph_hash: str
    mesh: MeshRecord
    microbatches: int
    precision: str
    optimizer: str
    schedule: str
    inputs: tuple[InputSignature, ...]
    static_inputs: Mapping[str, Any]
    positional: bool
    batch_dims: Mapping[str, int | None]
    forbid: tuple[str, ...]
    stages: tuple[StageRecord, ...]
    objective_s: float
    stage_gap: float
    chosen: str = ""
    alternatives: tuple[Alternative, ...] = ()
    version: int = VERSION
    comments: Mapping[str, str] = field(default_factory=dict)
    padded: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    kept_whole: tuple[str, ...] = ()
    accumulates: bool = False
    recipe: str = ""
    bound_s: float | None = None
    ruled_out: Mapping[str, int] = field(default_factory=dict)
    limit_bytes: float | None = None
    reduce_dtype: str | None = None
    master_weights: bool = False
    imbalance: float = 1.0
    lengths: Lengths = ()
    software: str = "autopar"

    @property
    def devices(self) -> tuple[int, ...]:
        """The device of every stage: stages on one device have the same ranks."""
        held = sum(stage.n_ranks for stage in self.stages)
        n_chunks = max(1, held // math.prod(self.mesh.shape))
        if n_chunks == 1:
            return tuple(range(len(self.stages)))
        return devices_of(self.schedule, len(self.stages) // n_chunks, n_chunks)

    @property
    def first_ranks(self) -> tuple[int, ...]:
        """The first rank of every stage."""
        first: dict[int, int] = {}
        n_ranks = 0
        for device, stage in sorted(zip(self.devices, self.stages, strict=True), key=_device):
            if device not in first:
                first[device], n_ranks = n_ranks, n_ranks + stage.n_ranks
        return tuple(first[device] for device in self.devices)

    @property
    def is_manual(self) -> bool:
        """Did the user decide, and not the search?"""
        return self.recipe == MANUAL

    @property
    def dtypes(self) -> Precision:
        """The dtypes that the plan is made for."""
        if self.precision == "fp64":
            return Precision.of("fp64")
        reduce_dtype = getattr(torch, self.reduce_dtype) if self.reduce_dtype else None
        return Precision(self.precision, reduce_dtype, self.master_weights)

    @property
    def parameters(self) -> dict[str, str]:
        """Parameter -> its storage on the first stage that has this name."""
        texts: dict[str, str] = {}
        for stage in self.stages:
            for name, text in stage.parameters.items():
                texts.setdefault(name, text)
        return texts

    @property
    def operators(self) -> dict[str, str]:
        """Operator key -> its specs; all stages together."""
        return {key: text for stage in self.stages for key, text in stage.operators.items()}

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json(), encoding="utf-8")


def _device(placed: tuple[int, StageRecord]) -> int:
    return placed[0]


def storage_text(storage: Storage) -> str:
    """`I S(0)`, or `S(0) I; each use` for ZeRO-3."""
    period = "" if storage.period == "step" else f"; each {storage.period}"
    return f"{storage.spec}{period}"


def parse_storage(text: str, name: str) -> Storage:
    """The inverse of `storage_text`; raises `PlanError`."""
    spec, _, period = text.partition(";")
    word = period.strip().removeprefix("each").strip() or "step"
    if word not in get_args(Period):
        raise PlanError(f"parameter {name}: {word!r} is none of {get_args(Period)}")
    return Storage(parse_spec(spec.strip(), f"parameter {name}"), word)  # type: ignore[arg-type]


def parse_spec(text: str, where: str) -> Spec:
    try:
        return Spec.parse(text)
    except OptionError as error:
        raise PlanError(f"{where}: {error}") from error


def operator_text(inputs: Sequence[Spec], outputs: Sequence[Spec]) -> str:
    """`S(0) R, R S(0) -> S(0) S(1)`."""
    return f"{', '.join(map(str, inputs))} -> {', '.join(map(str, outputs))}"


def parse_operator(text: str, key: str) -> tuple[tuple[Spec, ...], tuple[Spec, ...]]:
    """The inverse of `operator_text`; raises `PlanError`."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise PlanError(f"operator {key}: {text!r} is not `inputs -> outputs`")

    def specs(side: str) -> tuple[Spec, ...]:
        words = [w.strip() for w in side.split(",")]
        return tuple(parse_spec(w, f"operator {key}") for w in words if w)

    return specs(left), specs(right)


def recomputed_text(mode: Recompute, last: str) -> str:
    """`full until h.0.mlp/add#0`."""
    return f"{mode} until {last}"


def parse_recomputed(text: str, key: str) -> tuple[Recompute, str]:
    """The inverse of `recomputed_text`; raises `PlanError`."""
    mode, until, last = text.partition(" until ")
    if not until or mode not in get_args(Recompute):
        words = ", ".join(get_args(Recompute))
        raise PlanError(f"recomputed from {key}: {text!r} is not `MODE until KEY`", hint=words)
    return mode, last  # type: ignore[return-value]
