"""One stage's program as data: the lines that codegen prints, the runtime runs, costs read.

A strategy says where tensors live; a `StageProgram` says what each rank does: parameters
turned into use, tensors resharded at their first use and shared by every consumer that
wants the same placement, operators on local shapes, dead values dropped. The generated
source, the predicted time, `plan.collectives()` and the verifier all read these lines, so
what is printed is what is priced is what runs.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from typing import Any

import torch

from autopar.options import Recompute
from autopar.placement import Move, PrimitiveKind, Spec
from autopar.program.program import Accumulation
from autopar.program.strategy import Period

# The variable of results that nobody takes.
UNUSED = "_"


@dataclass(frozen=True)
class Ref:
    """A variable of the generated program, as an argument."""

    name: str

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Local:
    """A variable on one rank: its local shape, and how it is placed.

    `dims` are the factor sizes over all ranks, of one microbatch.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: Spec
    dims: tuple[tuple[int, ...], ...] = ()
    has_grad: bool = False

    @cached_property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class MoveLine:
    """One move of a reshard. Bytes are NCCL's accounting; backward is 0 without gradient."""

    out: Local
    source: str
    move: Move
    value: str
    phase: str
    forward_bytes: int
    backward_bytes: int
    forward_s: float
    backward_s: float
    has_grad: bool


@dataclass(frozen=True)
class Workspace:
    """Memory that an operator needs besides its tensors, on one rank.

    Temporaries of forward and of backward; `passed` are inputs whose gradient is, or views,
    the gradient of a result, and so costs nothing.
    """

    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    passed: tuple[str, ...] = ()


@dataclass(frozen=True)
class InnerCall:
    """A collective inside the function that replaces an operator."""

    kind: PrimitiveKind
    phase: str
    size_bytes: int


@dataclass(frozen=True)
class CallLine:
    """One operator on local tensors. `lowered` names the function that replaces it.

    flops         of this rank, forward, in one microbatch
    model_flops   of all ranks without what they do twice, forward and backward
    saved_bytes   what autograd keeps besides inputs and outputs
    keeps         variables whose storage autograd keeps, once per time it is kept
    shares        per output, the variable whose storage it has: a view; None when it is new
    """

    outs: tuple[Local, ...]
    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    key: str
    where: str
    lowered: str | None
    lowered_axes: tuple[int, ...]
    inner: tuple[InnerCall, ...]
    flops: float
    forward_s: float
    backward_s: float
    saved_bytes: float = 0.0
    keeps: tuple[str, ...] = ()
    shares: tuple[str | None, ...] = ()
    model_flops: float = 0.0
    workspace: Workspace = field(default_factory=Workspace)

    @cached_property
    def has_grad(self) -> bool:
        return any(out.has_grad for out in self.outs)

    @property
    def is_attention(self) -> bool:
        """Is it fused attention, which makes what it keeps besides its tensors?"""
        return "scaled_dot_product" in self.target

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """The variables among its arguments, in order."""
        return (*names_in(self.args), *names_in(list(self.kwargs.values())))


@dataclass(frozen=True)
class DetachLine:
    """Leave autograd: an output that is handed to the user."""

    out: Local
    source: str


@dataclass(frozen=True)
class GatherLine:
    """A ZeRO-3 parameter gathered for one operator, and again in backward `regathers` times.

    Whatever keeps it for its backward gathers it again there (`CallLine.keeps`).
    """

    out: Local
    source: str
    parameter: str
    moves: tuple[MoveLine, ...]
    regathers: int


@dataclass(frozen=True)
class FreeLine:
    """Variables that nothing reads any more."""

    names: tuple[str, ...]


Line = MoveLine | CallLine | DetachLine | GatherLine | FreeLine


@dataclass(frozen=True)
class Segment:
    """Lines `start` to `stop` - 1 of a body: a function that runs again in backward.

    Autograd keeps nothing of them but `inputs`, the variables they take, and the results of the
    lines at `kept`. Those at `handed_on` are products whose results only reshards read that are
    kept: they run again as far as autograd goes, which saves what they read. `last` is the last
    line of which backward needs something: before its backward the lines run again, in order, up
    to it, and itself unless `stops_early`, where all that it keeps is there before it runs.
    `results` are the variables that others read.
    """

    name: str
    mode: Recompute
    start: int
    stop: int
    last: int
    inputs: tuple[str, ...]
    results: tuple[str, ...]
    kept: frozenset[int] = frozenset()
    handed_on: frozenset[int] = frozenset()
    stops_early: bool = False

    @property
    def again(self) -> range:
        """The lines that run again, but for those at `kept` and `handed_on`."""
        return range(self.start, self.last + (not self.stops_early))


@dataclass(frozen=True)
class RepeatedLines:
    """Lines `start` to `stop` - 1 of a body that stand for `count` blocks, one after the other; and
    the variables of constants that each of the blocks has of its own."""

    start: int
    stop: int
    count: int
    delivered: frozenset[str]


@dataclass(frozen=True)
class ParameterUse:
    """One placement a parameter is used at, and the moves that make it from storage."""

    local: Local
    moves: tuple[MoveLine, ...]


@dataclass(frozen=True)
class StoredParameter:
    """A parameter as one rank keeps it.

    `name` is the user's; `shape` the whole tensor's. For period "use" the program takes the
    stored tensor and gathers it itself; otherwise it takes `uses`. `mirror_of` names the
    parameter of an earlier stage that this one is tied to.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dims: tuple[tuple[int, ...], ...]
    stored: Local
    period: Period
    uses: tuple[ParameterUse, ...]
    requires_grad: bool
    mirror_of: str | None = None


@dataclass(frozen=True)
class Delivered:
    """A model input, buffer, constant, divisor or seed as the program takes it.

    `source` is the placeholder of the captured graph, or the name of the buffer, `kind` "input",
    "buffer", "constant", "divisor" or "seed", `batch_cell` the (dim, factor) that microbatches
    cut, `dims` the factor sizes of one microbatch over all ranks.
    """

    local: Local
    source: str
    kind: str
    dims: tuple[tuple[int, ...], ...]
    batch_cell: tuple[int, int] | None


@dataclass(frozen=True)
class Boundary:
    """A tensor that crosses to or from another stage, of one microbatch.

    `value` is its name in the captured graph, the same on both sides, `key` the one that plans
    use. On an axis of more than one rank it is cut, S, so that every slice crosses once; where
    nothing divides, only the rank of coordinate 0 takes part: a sent tensor is R there, and its
    gradient P; a received one P, and its gradient R (`cross_mesh.py`).
    """

    local: Local
    value: str
    key: str


@dataclass(frozen=True)
class ChangedBuffer:
    """What a buffer of this name holds after a microbatch, whole on every rank."""

    name: str
    aliases: tuple[str, ...]
    persistent: bool
    local: Local

    @property
    def shape(self) -> tuple[int, ...]:
        return self.local.shape


@dataclass(frozen=True)
class StageProgram:
    """Everything one stage does in a step; the same for every rank of the stage.

    The generated function takes `parameters`, `delivered` and `received`, and returns the
    loss, `sent`, what `changed` buffers now hold, and `outputs`, for one microbatch. With
    `accumulation`, microbatches are parts of the inputs from which everything starts anew.
    `segments` are disjoint, in order. A program with `repeats`, which are disjoint too, is there to
    be priced, not to be run (`autopar/program/abridged.py`); `every_parameter` are those of the whole, in
    its order, each by the name of the one that stands for it.
    """

    name: str
    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    parameters: tuple[StoredParameter, ...]
    delivered: tuple[Delivered, ...]
    body: tuple[Line, ...]
    loss: str | None
    outputs: tuple[str, ...]
    n_microbatches: int
    prologue: tuple[tuple[str, str], ...] = ()
    prologue_inputs: tuple[str, ...] = ()
    prologue_outputs: tuple[str, ...] = ()
    received: tuple[Boundary, ...] = ()
    sent: tuple[Boundary, ...] = ()
    trains: bool = True
    changed: tuple[ChangedBuffer, ...] = ()
    accumulation: Accumulation | None = None
    segments: tuple[Segment, ...] = ()
    repeats: tuple[RepeatedLines, ...] = ()
    every_parameter: tuple[str, ...] = ()
    # What it costs, for pipelines that share it (`cost/price/prediction.py`): `known` of one that costs the
    # same, and then what is found of either is known of both.
    priced: dict[Hashable, Any] = field(init=False, repr=False, compare=False)
    known: InitVar[dict[Hashable, Any] | None] = None

    def __post_init__(self, known: dict[Hashable, Any] | None) -> None:
        object.__setattr__(self, "priced", {} if known is None else known)

    @cached_property
    def taken(self) -> frozenset[str]:
        """Variables that the function returns."""
        found = {*self.outputs, *(s.local.name for s in self.sent)}
        found |= {b.local.name for b in self.changed}
        return frozenset(found | {self.loss} if self.loss else found)

    @cached_property
    def given(self) -> frozenset[str]:
        """Variables that the body reads and does not make."""
        found = {d.local.name for d in self.delivered} | {b.local.name for b in self.received}
        for p in self.parameters:
            found |= {p.stored.name, *(use.local.name for use in p.uses)}
        return frozenset(found)

    def made(self, name: str) -> Local:
        """A variable of the body as its last line leaves it."""
        results = (out for line in reversed(self.body) for out in outs(line))
        return next(out for out in results if out.name == name)

    @cached_property
    def differentiated(self) -> frozenset[int]:
        """Positions of the body's lines that backward passes through."""
        if not self.trains:
            return frozenset()
        wanted = {s.local.name for s in self.sent}
        if self.loss is not None:
            wanted.add(self.loss)
        found: set[int] = set()
        for i in range(len(self.body) - 1, -1, -1):
            line = self.body[i]
            if any(out.has_grad and out.name in wanted for out in outs(line)):
                found.add(i)
                # Inputs without gradient are only ever written by lines without gradient.
                wanted.update(reads(line))
        return frozenset(found)

    def moves(self) -> Iterator[MoveLine]:
        """The moves of activations, in order."""
        for line in self.body:
            if isinstance(line, MoveLine):
                yield line

    def group_axes(self) -> tuple[tuple[int, ...], ...]:
        """Every group of axes a collective or lowering of this program needs."""
        found: dict[tuple[int, ...], None] = {}
        lines: list[MoveLine] = list(self.moves())
        for parameter in self.parameters:
            for use in parameter.uses:
                lines += use.moves
        for line in self.body:
            if isinstance(line, GatherLine):
                lines += line.moves
            elif isinstance(line, CallLine) and line.lowered:
                found.setdefault(line.lowered_axes)
        for move in lines:
            if (move.move.forward, move.move.backward) != ("identity", "identity"):
                found.setdefault(move.move.axes)
        return tuple(sorted(found, key=lambda axes: (len(axes), axes)))


def batch_shards(item: Delivered, sizes: Sequence[int]) -> int:
    """Over how many ranks the item's batch is split."""
    if item.batch_cell is None:
        return 1
    return math.prod(sizes[a] for a in item.local.spec.axes_of(item.batch_cell))


def most_batch_shards(items: Sequence[Delivered], sizes: Sequence[int]) -> int:
    """The finest split of the batch that any delivered tensor has."""
    return max((batch_shards(item, sizes) for item in items), default=1)


def names_in(value: Any) -> list[str]:
    """The variables in an argument, in order."""
    if isinstance(value, Ref):
        return [value.name]
    if isinstance(value, (list, tuple)):
        return [n for v in value for n in names_in(v)]
    return []


def reads(line: Line) -> tuple[str, ...]:
    """The variables a line reads."""
    if isinstance(line, CallLine):
        return line.reads
    return () if isinstance(line, FreeLine) else (line.source,)


def outs(line: Line) -> tuple[Local, ...]:
    """What a line defines; results that nobody takes are all called `_`."""
    if isinstance(line, CallLine):
        return line.outs
    return () if isinstance(line, FreeLine) else (line.out,)


def writes(line: Line) -> list[str]:
    """The variables a line defines."""
    return [out.name for out in outs(line) if out.name != UNUSED]


def storage_owners(body: Iterable[Line]) -> Iterator[dict[str, str]]:
    """After each line: variable -> owner of its storage, views being their source's.

    A reshard's variable is assigned once per move; each assignment is an owner of its own.
    Variables from outside the body own their storage.
    """
    owner: dict[str, str] = {}
    for i, line in enumerate(body):
        if isinstance(line, CallLine):
            found = line.shares or (None,) * len(line.outs)
            for out, shared in zip(line.outs, found, strict=True):
                if shared is None:
                    owner[out.name] = f"{out.name}@{i}"
                else:
                    owner[out.name] = owner.get(shared, shared)
        elif isinstance(line, DetachLine) or (
            isinstance(line, MoveLine) and line.move.forward == "identity"
        ):
            owner[line.out.name] = owner.get(line.source, line.source)
        elif not isinstance(line, FreeLine):
            owner[line.out.name] = f"{line.out.name}@{i}"
        yield owner
