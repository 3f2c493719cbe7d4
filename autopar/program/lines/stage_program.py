"""One stage's program as data: the lines that codegen prints, the runtime runs and costs read.

A strategy says where tensors live. A `StageProgram` says what each rank does: it converts
parameters from storage, reshards a tensor at the first use of a spec and shares the result with all
consumers of that spec, and runs operators on local shapes. `order.py` says in which order, both
ways. The generated source, the predicted time, `plan.collectives()` and the verifier all read the
same lines: what is printed is what is priced is what runs.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch

from autopar.caching import once
from autopar.manual import Recompute
from autopar.placement import Move, PrimitiveKind, Spec, TensorType
from autopar.program.graph import Accumulation
from autopar.program.lines.strategy import Period
from autopar.program.lines.variables import Assignment, Operation
from autopar.rules import own_rule

# What a factor of a tensor's dim counts:
#   data       rows of the batch
#   tensor     what a factor of a weight counts, such as features, heads or experts
#   sequence   anything else, such as positions
FactorKind = Literal["data", "tensor", "sequence"]
# The kind of the factor that is sharded; R or I; P.
ShardKind = Literal["data", "tensor", "sequence", "replicated", "partial"]


@dataclass(frozen=True)
class Local:
    """A variable on one rank, with its local shape and its spec.

    `dims` are the global factor sizes, of one microbatch. `gradient_dtype` is that of the gradient
    if it is another one, as of a parameter in mixed precision. `factor_kinds` has a `FactorKind`
    per factor of `dims`. `folded` is the axis whose shard is in head-tail order, if there is one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: Spec
    dims: tuple[tuple[int, ...], ...] = ()
    has_grad: bool = False
    gradient_dtype: torch.dtype | None = None
    factor_kinds: tuple[tuple[FactorKind, ...], ...] = field(default=(), compare=False, repr=False)
    folded: int | None = None

    def shard_kind(self, axis: int) -> ShardKind:
        """What the ranks of a mesh axis have of this tensor."""
        placement = self.spec.placements[axis]
        if placement.is_shard:
            dim, factor = placement.cell
            return self.factor_kinds[dim][factor]
        return "partial" if placement.kind == "P" else "replicated"

    @cached_property
    def tensor(self) -> TensorType:
        """The type of the whole tensor, of one microbatch."""
        itemsize = self.gradient_dtype.itemsize if self.gradient_dtype else 0
        return TensorType(self.dims, self.dtype.itemsize, self.has_grad, itemsize)

    @cached_property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def gradient_bytes(self) -> int:
        return math.prod(self.shape) * (self.gradient_dtype or self.dtype).itemsize


@dataclass(frozen=True)
class MoveLine(Assignment):
    """One move of a reshard of `value`.

    Bytes are NCCL's accounting. Without gradient, bytes and seconds of backward are 0.
    `under_matmul`: the software of the prices runs its collectives under a matmul, in chunks.
    """

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
    under_matmul: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Workspace:
    """Temporaries of an operator on one rank, in forward and in backward.

    `passed` are inputs whose gradient is, or views, the gradient of a result: it needs no memory.
    """

    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    passed: tuple[str, ...] = ()


@dataclass(frozen=True)
class InnerCall:
    """A collective inside a lowered function, which runs it `count` times.

    Each runs beside `beside_s` of the function's compute, and takes `imbalance` times as long as if
    all ranks sent and received equally much.
    """

    kind: PrimitiveKind
    phase: str
    size_bytes: int
    count: int = 1
    beside_s: float = 0.0
    imbalance: float = 1.0


@dataclass(frozen=True)
class CallLine(Operation):
    """One operator on local tensors.

    lowered       the function that replaces it, over the group along `lowered_axes`; or None
    flops         of this rank, forward, in one microbatch
    model_flops   of all ranks without replicated work, forward and backward
    again_s       what running it again in backward adds to a step
    saved_bytes   what autograd saves besides inputs and outputs
    keeps         variables whose storage autograd saves; one that it saves twice is here twice
    shares        for each output, the variable whose storage it views; None for new storage
    block         the module of its block (`blocks.py`); None outside of blocks
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
    again_s: float = 0.0
    saved_bytes: float = 0.0
    keeps: tuple[str, ...] = ()
    shares: tuple[str | None, ...] = ()
    model_flops: float = 0.0
    workspace: Workspace = field(default_factory=Workspace)
    block: str | None = None

    @cached_property
    def has_grad(self) -> bool:
        return any(out.has_grad for out in self.outs)

    @property
    def is_attention(self) -> bool:
        """Is it fused attention?"""
        rule = own_rule(self.target)
        return rule is not None and rule.fused

    @property
    def saves_more(self) -> bool:
        """Does it save more than copies of its inputs, besides these and its outputs?"""
        rule = own_rule(self.target)
        return rule is not None and rule.saves_more


@dataclass(frozen=True)
class DetachLine(Assignment):
    """Detach an output that is returned to the user."""

    out: Local
    source: str


@dataclass(frozen=True)
class GatherLine(Assignment):
    """A ZeRO-3 parameter of `block` gathered for one operator (`blocks.py`).

    Neighbours are a run, which is gathered together (`gathers.py`). Backward gathers a run again
    if an operator keeps one of it (`CallLine.keeps`), but for the last run (`kept_gathers`).
    """

    out: Local
    source: str
    parameter: str
    moves: tuple[MoveLine, ...]
    block: str | None = None


Line = MoveLine | CallLine | DetachLine | GatherLine


@dataclass(frozen=True)
class Segment:
    """Lines `start` to `stop` - 1 of a body, of which those at `again` run again in backward.

    Each does before the first backward that needs it (`autopar/program/communication/reruns.py`).
    Between forward and backward only what they read is kept, and what the backward of the other
    lines needs.
    """

    name: str
    mode: Recompute
    start: int
    stop: int
    again: tuple[int, ...]

    @property
    def last(self) -> int:
        """The last line: the first whose backward needs something of the segment."""
        return self.stop - 1


@dataclass(frozen=True)
class RepeatedLines:
    """Lines `start` to `stop` - 1 of a body: one block that stands for `count` consecutive blocks.

    `delivered` are the variables of constants that every one of these blocks has for itself.
    """

    start: int
    stop: int
    count: int
    delivered: frozenset[str]


@dataclass(frozen=True)
class ParameterUse:
    """One spec that a parameter is used with, and the moves from storage to it."""

    local: Local
    moves: tuple[MoveLine, ...]


@dataclass(frozen=True)
class StoredParameter:
    """A parameter as one rank keeps it.

    `name` is the user's; `shape` is that of the whole tensor. For period "use" the program takes
    the stored tensor and gathers it itself (`GatherLine`); otherwise it takes `uses`. `mirror_of`
    names the parameter of an earlier stage that this one is tied to. `cast` is the shard in the
    dtype of use, made once a step in `cast_s` seconds, from which all moves start; None if that is
    the dtype of storage.
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
    cast: Local | None = None
    cast_s: float = 0.0

    @property
    def shard(self) -> Local:
        """What the program, or the moves to its uses, start from."""
        return self.cast or self.stored


@dataclass(frozen=True)
class Delivered:
    """A model input, buffer, constant, divisor or seed, as the program takes it.

    source       the placeholder in the captured graph, or the name of the buffer
    kind         "input", "buffer", "constant", "divisor" or "seed"
    dims         global factor sizes, of one microbatch
    batch_cell   the (dim, factor) that microbatches split, or None
    """

    local: Local
    source: str
    kind: str
    dims: tuple[tuple[int, ...], ...]
    batch_cell: tuple[int, int] | None


@dataclass(frozen=True)
class Boundary:
    """A tensor of one microbatch that crosses to or from another stage.

    `value` is its name in the captured graph, the same on both stages. `key` is its name in plans.
    On an axis of more than one rank it is S, so that every slice crosses once. If nothing divides,
    only the rank at coordinate 0 takes part: a sent tensor is then R and its gradient P, a received
    one P and its gradient R (`cross_mesh.py`).
    """

    local: Local
    value: str
    key: str


@dataclass(frozen=True)
class ChangedBuffer:
    """The new value of a buffer after a microbatch, whole on every rank."""

    name: str
    aliases: tuple[str, ...]
    persistent: bool
    local: Local

    @property
    def shape(self) -> tuple[int, ...]:
        return self.local.shape


@dataclass(frozen=True)
class StageProgram:
    """Everything that one stage does in a step; the same on every rank of the stage.

    The generated function runs one microbatch. It takes `parameters`, `delivered` and `received`,
    and returns the loss, `sent`, the new values of `changed` buffers, and `outputs`. With
    `accumulation`, each microbatch has its own prologue and its own seed. `segments` are disjoint
    and in order. A program with `repeats` (disjoint too) is for pricing and cannot run
    (`abridged.py`); its `every_parameter` lists the parameters of the whole program in order, each
    by the name of the one that stands for it. If it `is_compiled`, runs of its operators are
    functions that a compiler fuses (`compilable.py`). If it `splits_backward`, gradients that only
    parameters need are a second action of a microbatch.
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
    is_compiled: bool = False
    splits_backward: bool = False
    # Prices of this program, computed once for all pipelines that share it
    # (`cost/price/prediction.py`). Pass the dict of a program with equal costs as
    # `shared_prices`, and both share it.
    price_cache: dict[Hashable, Any] = field(init=False, repr=False, compare=False)
    shared_prices: InitVar[dict[Hashable, Any] | None] = None

    def __post_init__(self, shared_prices: dict[Hashable, Any] | None) -> None:
        object.__setattr__(self, "price_cache", {} if shared_prices is None else shared_prices)

    @once
    def split_backward(self) -> StageProgram:
        """The same program, whose backward is two actions."""
        prices = self.price_cache.setdefault("split backward", {})
        return replace(self, splits_backward=True, shared_prices=prices)

    @cached_property
    def returned(self) -> frozenset[str]:
        """The variables that the function returns."""
        return self.held | {self.loss} if self.loss else self.held

    @cached_property
    def held(self) -> frozenset[str]:
        """The variables that the function returns besides the loss."""
        found = {*self.outputs, *(s.local.name for s in self.sent)}
        return frozenset(found | {b.local.name for b in self.changed})

    @cached_property
    def arguments(self) -> frozenset[str]:
        """The arguments of the function: variables that the body reads and does not make."""
        found = {d.local.name for d in self.delivered} | {b.local.name for b in self.received}
        for p in self.parameters:
            found |= {p.stored.name, *(use.local.name for use in p.uses)}
        return frozenset(found)

    @cached_property
    def folded(self) -> int | None:
        """The axis whose shards of sequences are in head-tail order, if there is one."""
        axes = (local.folded for local in self.variables.values())
        return next((axis for axis in axes if axis is not None), None)

    @cached_property
    def given_variables(self) -> Mapping[str, Local]:
        """The variables that the body, or the moves of parameters before it, start from."""
        found = {item.local.name: item.local for item in self.delivered}
        found |= {boundary.local.name: boundary.local for boundary in self.received}
        for p in self.parameters:
            found[p.shard.name] = p.shard
            found |= {use.local.name: use.local for use in p.uses}
        return found

    @cached_property
    def variables(self) -> Mapping[str, Local]:
        """All variables, as the last line that assigns them leaves them."""
        return {
            **self.given_variables,
            **{out.name: out for line in self.body for out in line.outs},
        }

    @cached_property
    def differentiated(self) -> frozenset[int]:
        """Positions of the lines that have a backward."""
        if not self.trains:
            return frozenset()
        needed = {s.local.name for s in self.sent}
        if self.loss is not None:
            needed.add(self.loss)
        found: set[int] = set()
        for i in range(len(self.body) - 1, -1, -1):
            line = self.body[i]
            if any(out.has_grad and out.name in needed for out in line.outs):
                found.add(i)
                # Reads without gradient do no harm: the lines that write them have none either.
                needed.update(line.reads)
        return frozenset(found)

    @cached_property
    def used_specs(self) -> Mapping[str, tuple[Spec, ...]]:
        """Parameter -> the distinct specs that operators use it in; gathered at use or before."""
        found = {p.name: {use.local.spec: None for use in p.uses} for p in self.parameters}
        for line in self.body:
            if isinstance(line, GatherLine):
                found[line.parameter][line.out.spec] = None
        return {name: tuple(specs) for name, specs in found.items()}

    def moves(self) -> Iterator[MoveLine]:
        """The moves of activations, in order."""
        for line in self.body:
            if isinstance(line, MoveLine):
                yield line

    def group_axes(self) -> tuple[tuple[int, ...], ...]:
        """Every group of axes that a collective or a lowered function of this program needs."""
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
    """Into how many shards the item's batch is split."""
    if item.batch_cell is None:
        return 1
    return math.prod(sizes[a] for a in item.local.spec.axes_of(item.batch_cell))


def most_batch_shards(items: Sequence[Delivered], sizes: Sequence[int]) -> int:
    """The most shards into which any of the items splits the batch."""
    return max((batch_shards(item, sizes) for item in items), default=1)


def storage_owners(body: Iterable[Line]) -> Iterator[dict[str, str]]:
    """After each line: variable -> owner of its storage; a view has the owner of its source.

    A reshard assigns its variable once per move, and every assignment is an owner of its own.
    Variables from outside the body own their storage and are left out.
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
        else:
            owner[line.out.name] = f"{line.out.name}@{i}"
        yield owner
