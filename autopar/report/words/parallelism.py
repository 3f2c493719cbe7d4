"""How a plan is parallel, derived from its placements: in the field's words, not the planner's.

On one axis of the mesh, a parameter is

    tensor    used in shards: its operators are split                     used S
    zero      stored in shards, whole in use: gathered; the stage is the period
                                                                          stored S, used R or I
    data      stored whole, and rows of the batch are split                stored R or I, used R

The sizes of its axes of a kind multiply (`ways_of`). The words are those of most bytes: a way that
holds less than a tenth of a stage's parameters is left out.

What a matmul shares on an axis follows from the factors that are sharded on it (`FactorKind`): rows
of the batch, a factor of a weight ("tensor"), or positions ("sequence"). What is tensor parallel is
said by kind of module (`module_kinds`), with its share of the FLOPs (`Split`). Sequences are split
on an axis if most norms, or without norms most matmuls, compute slices of them (`_sequence_axes`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.placement import Spec
from autopar.program.lines import CallLine, ShardKind, StageProgram, StoredParameter
from autopar.report.blocks import Block
from autopar.report.division import Product, is_sharded, products
from autopar.report.picture import kind_of, operator_name, parameter_variables

ZERO = {"step": 1, "micro": 2, "use": 3}
# Kinds of modules in the order of a sentence; the first three are inside of repeated blocks.
MODULES = ("attention", "MLPs", "experts", "matmuls", "embedding", "output head")
OUTER = frozenset({"embedding", "output head"})
# Ways and kinds with a smaller share of the bytes or FLOPs are left out.
_LEAST_BYTES, LEAST_FLOPS = 0.1, 0.01


@dataclass(frozen=True)
class Way:
    """How ranks share a parameter: `zero` is the stage of ZeRO, 0 without.

    `n_zero` ranks hold its shards, in `n_data` copies. Without shards, `n_data` ranks split rows.
    """

    zero: int
    n_zero: int
    n_data: int


@dataclass(frozen=True)
class StageParallelism:
    """How one stage is parallel.

    n_ranks       of the stage
    ways          how parameters of matmuls are shared, those of most bytes first
    tensor        kind of module -> how its matmuls are split along factors of weights
    experts       the ranks that experts are divided over, each with whole ones; 1: none
    context       axes that split sequences and no weight of a matmul: context parallelism
    n_sequence    ranks that sequences are split over, where most weights are not
    norms_split   tensor parallel ranks compute norms on slices of the sequence
    repeated      share of the FLOPs of matmuls that every rank computes whole
    is_idle       every rank computes everything whole
    """

    n_ranks: int
    ways: tuple[Way, ...]
    tensor: Mapping[str, Split]
    experts: int
    context: tuple[int, ...]
    n_sequence: int
    norms_split: bool
    repeated: float
    is_idle: bool

    @property
    def inner(self) -> StageParallelism:
        """The same without what only the first and the last stage have."""
        inside = {kind: split for kind, split in self.tensor.items() if kind not in OUTER}
        return replace(self, tensor=inside)


@dataclass(frozen=True)
class Split:
    """How matmuls of a kind of module are split along factors of weights.

    flops        FLOPs of the kind
    by_ranks     FLOPs by the ranks that split them
    undivided    heads of attention that is not split
    """

    flops: float
    by_ranks: Mapping[int, float]
    undivided: frozenset[int] = frozenset()

    @property
    def n_ranks(self) -> int:
        """The ranks that most of what is split is split over; 1: hardly anything is."""
        several = {
            n: f for n, f in self.by_ranks.items() if n > 1 and f >= LEAST_FLOPS * self.flops
        }
        return max(several, key=lambda n: several[n], default=1)

    @property
    def split_flops(self) -> float:
        """Those that `n_ranks` split."""
        return self.by_ranks.get(self.n_ranks, 0.0)

    @staticmethod
    def of(parts: Iterable[Split]) -> Split:
        """All parts together."""
        parts, by_ranks = list(parts), dict[int, float]()
        for part in parts:
            for n, flops in part.by_ranks.items():
                by_ranks[n] = by_ranks.get(n, 0.0) + flops
        undivided = frozenset(heads for part in parts for heads in part.undivided)
        return Split(sum(part.flops for part in parts), by_ranks, undivided)


def stage_parallelism(program: StageProgram) -> StageParallelism:
    """How the ranks of one stage share its work."""
    every = list(products(program))
    weighted = [p for p in every if p.weights]
    tensor, experts = _tensor(program, every, module_kinds(program))
    sequence = _sequence_axes(program, every)
    on_weights = _axes_of_most(program, weighted, "tensor")
    alone = [a for a in sequence if a not in on_weights]
    split = {a for p in weighted for a in p.axes_of("tensor")}
    sizes = program.axis_sizes
    return StageParallelism(
        math.prod(sizes), ways_of(program, every), tensor, experts,
        tuple(a for a in sequence if a not in split),
        math.prod(sizes[a] for a in alone), len(alone) < len(sequence), _repeated(every),
        not any(is_sharded(out) for line in program.body for out in line.outs),
    )  # fmt: skip


def _repeated(every: Sequence[Product]) -> float:
    total = sum(p.whole_flops for p in every)
    return sum(p.whole_flops for p in every if p.whole_flops <= p.rank_flops) / (total or 1.0)


def context_axes(program: StageProgram) -> tuple[int, ...]:
    """The axes that split sequences and no weight of a matmul."""
    return stage_parallelism(program).context


def ways_of(program: StageProgram, every: Sequence[Product]) -> tuple[Way, ...]:
    """The ways of the parameters that matmuls read, or of all if none do; of most bytes first."""
    rows = _axes_of_most(program, every, "data")
    weighted = [p.line for p in every if p.weights]
    read = _read_by(program, weighted) or {p.name for p in program.parameters}
    sizes: Counter[Way] = Counter()
    for parameter in program.parameters:
        if parameter.name in read:
            uses = program.used_specs[parameter.name]
            size_bytes = math.prod(parameter.shape) * parameter.stored.dtype.itemsize
            sizes[_way(parameter, uses, program.axis_sizes, rows)] += size_bytes
    least_bytes = _LEAST_BYTES * sum(sizes.values())
    kept = (way for way, size_bytes in sizes.most_common() if size_bytes >= least_bytes)
    return tuple(way for way in kept if way.n_zero * way.n_data > 1)


def _read_by(program: StageProgram, lines: Iterable[CallLine]) -> set[str]:
    """The parameters whose values, or what is computed from them alone, some lines read."""
    of: dict[str, set[str]] = {}
    for parameter in program.parameters:
        for local in (parameter.shard, *(use.local for use in parameter.uses)):
            of[local.name] = {parameter.name}
    for line in program.body:
        if line.reads and all(name in of for name in line.reads):
            found = set().union(*(of[name] for name in line.reads))
            of |= {out.name: found for out in line.outs}
    return {name for line in lines for read in line.reads for name in of.get(read, ())}


def _way(
    parameter: StoredParameter, uses: Sequence[Spec], sizes: Sequence[int], rows: Sequence[int]
) -> Way:
    stored = parameter.stored.spec.placements
    sharded = [axis for axis in range(len(sizes)) if stored[axis].is_shard]
    zero = [a for a in sharded if not uses or not all(u.placements[a].is_shard for u in uses)]
    summed = [
        a for a in range(len(sizes))
        if a not in sharded and any(u.placements[a].kind == "R" for u in uses)
    ]  # fmt: skip
    if not zero:
        return Way(0, 1, math.prod(sizes[a] for a in summed if a in rows))
    n_zero, n_data = (math.prod(sizes[a] for a in axes) for axes in (zero, summed))
    return Way(ZERO[parameter.period] if n_zero > 1 else 0, n_zero, n_data)


def _shards(spec: Spec) -> list[int]:
    return [axis for axis, placement in enumerate(spec.placements) if placement.is_shard]


def module_kinds(program: StageProgram) -> Callable[[CallLine], str]:
    """The kind of a matmul, or of an embedding: one of `MODULES`.

    Attention is what is inside of a module that attends. A repeated block's other matmuls are its
    MLP, if the model has attention. Matmuls after all blocks are the output head.
    """
    lines = [line for line in program.body if isinstance(line, CallLine)]
    by_module: dict[str, list[CallLine]] = {}
    for line in lines:
        by_module.setdefault(_module(line), []).append(line)
    attending = {
        module
        for module, of in by_module.items()
        if kind_of(of) == "attention" and not module.rpartition(".")[2].isdigit() and module
    }
    in_blocks = [i for i, line in enumerate(lines) if Block.of(_module(line)).index]
    last = in_blocks[-1] if in_blocks else len(lines)
    after = {line.key for line in lines[last + 1 :]}

    def kind(line: CallLine) -> str:
        module = _module(line)
        if operator_name(line).endswith("embedding"):  # of padded tables, too
            return "embedding"
        if operator_name(line).startswith("expert"):
            return "experts"
        if any(module == a or module.startswith(f"{a}.") for a in attending):
            return "attention"
        if line.key in after:
            return "output head"
        return "MLPs" if attending and Block.of(module).index else "matmuls"

    return kind


def _module(line: CallLine) -> str:
    return line.key.rpartition("/")[0]


def _tensor(
    program: StageProgram, every: Sequence[Product], kind: Callable[[CallLine], str]
) -> tuple[dict[str, Split], int]:
    """Kind of module -> how it is split, and the ranks that experts are divided over."""
    sizes = program.axis_sizes
    parts: dict[str, list[Split]] = {}
    experts = []
    for product in every:
        name, flops = kind(product.line), product.whole_flops
        axes = product.axes_of("tensor")
        if name == "experts":  # a weight of [experts, ...]
            whole = frozenset(
                a for a in axes for w in product.weights
                if w.spec.placements[a].cell == (0, 0) and len(w.shape) == 3
            )  # fmt: skip
            experts.append(Split(flops, {math.prod(sizes[a] for a in whole): flops}))
            axes -= whole
        n_ranks = math.prod(sizes[a] for a in axes)
        undivided = _heads(product) if name == "attention" and n_ranks == 1 else None
        heads = frozenset([undivided]) if undivided else frozenset[int]()
        parts.setdefault(name, []).append(Split(flops, {n_ranks: flops}, heads))
    splits = {name: Split.of(of) for name, of in parts.items()}
    for line in program.body:
        if isinstance(line, CallLine) and kind(line) == "embedding":
            n_ranks = math.prod(sizes[a] for a in _embedding_axes(program, line))
            if n_ranks > 1 or "embedding" not in splits:
                splits["embedding"] = Split(1.0, {n_ranks: 1.0})
    return {name: splits[name] for name in MODULES if name in splits}, Split.of(experts).n_ranks


def _heads(product: Product) -> int | None:
    """Heads of a matmul without weights: the first factor of a weight in its result."""
    if product.weights:
        return None
    result = product.line.outs[0]
    factors = (
        size for dims, kinds in zip(result.dims, result.factor_kinds, strict=True)
        for size, kind in zip(dims, kinds, strict=True) if kind == "tensor"
    )  # fmt: skip
    return next(factors, None)


def _axes_of_most(program: StageProgram, some: Sequence[Product], kind: ShardKind) -> list[int]:
    """The axes whose ranks share most FLOPs of some matmuls along factors of a kind."""
    total = sum(p.whole_flops for p in some)
    return [
        axis
        for axis in range(len(program.axis_sizes))
        if 2 * sum(p.whole_flops for p in some if axis in p.axes_of(kind)) > total
    ]


def _embedding_axes(program: StageProgram, line: CallLine) -> list[int]:
    """The axes that split the table of an embedding."""
    tables = parameter_variables(program)
    return next((_shards(tables[name].spec) for name in line.reads if name in tables), [])


def _sequence_axes(program: StageProgram, every: Sequence[Product]) -> list[int]:
    """The axes on which most norms compute slices of a sequence; without norms, most matmuls."""
    norms = [
        line for line in program.body if isinstance(line, CallLine) and kind_of([line]) == "norm"
    ]
    results = [line.outs[0] for line in norms or [p.line for p in every] if line.outs]
    return [
        axis
        for axis, size in enumerate(program.axis_sizes)
        if size > 1
        and 2 * sum(result.shard_kind(axis) == "sequence" for result in results) > len(results)
    ]
