"""How a plan is parallel, derived from its placements: in the field's words, not the planner's.

On one axis of the mesh, a parameter is

    tensor    used in shards: its operators are split                     used S
    zero      stored in shards, whole in use: gathered; the stage is the period
                                                                          stored S, used R or I
    data      stored whole, its gradients summed                          stored R or I, used R

The sizes of its axes of a kind multiply (`ways_of`). The words are those of most bytes: a way that
holds less than a tenth of a stage's parameters is left out. What is tensor parallel is said by kind
of module (`module_kinds`), by FLOPs. The sequence is split on an axis if most norms, or without
norms most matmuls, compute slices of it (`_sequence_axes`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.placement import Spec
from autopar.program import CallLine, Local, StageProgram, StoredParameter
from autopar.report.blocks import Block
from autopar.report.division import Product, products
from autopar.report.picture import kind_of, operator_name, parameter_variables, shard_kinds

ZERO = {"step": 1, "micro": 2, "use": 3}
# Kinds of modules in the order of a sentence; the first three are inside of repeated blocks.
MODULES = ("attention", "MLPs", "experts", "matmuls", "embedding", "output head")
OUTER = frozenset({"embedding", "output head"})
# Ways and kinds with a smaller share of the bytes or FLOPs are left out.
_LEAST_BYTES, _LEAST_FLOPS = 0.1, 0.01


@dataclass(frozen=True)
class Way:
    """How ranks share a parameter: `zero` is the stage of ZeRO, 0 without.

    `n_zero` ranks hold its shards, in `n_data` copies.
    """

    zero: int
    n_zero: int
    n_data: int


@dataclass(frozen=True)
class StageParallelism:
    """How one stage is parallel.

    n_ranks       of the stage
    ways          how parameters of matmuls are shared, those of most bytes first
    tensor        kind of module -> the ranks that each such module is split over
    experts       the ranks that experts are divided over, each with whole ones; 1: none
    n_sequence    ranks that a sequence is split over, without tensor parallelism
    norms_split   tensor parallel ranks compute norms on slices of the sequence
    """

    n_ranks: int
    ways: tuple[Way, ...]
    tensor: Mapping[str, int]
    experts: int
    n_sequence: int
    norms_split: bool

    @property
    def inner(self) -> StageParallelism:
        """The same without what only the first and the last stage have."""
        kept = {kind: n for kind, n in self.tensor.items() if kind not in OUTER}
        return replace(self, tensor=kept)


@dataclass
class _Split:
    """FLOPs of a kind of module: all, and by the ranks that split them."""

    flops: float = 0.0
    by_ranks: dict[int, float] = field(default_factory=dict)

    def add(self, flops: float, n_ranks: int) -> None:
        self.flops += flops
        self.by_ranks[n_ranks] = self.by_ranks.get(n_ranks, 0.0) + flops

    @property
    def n_ranks(self) -> int:
        """The ranks of most FLOPs; 1 if most are not split."""
        n, flops = max(self.by_ranks.items(), key=lambda item: item[1], default=(1, 0.0))
        return n if flops > self.flops / 2 else 1


def stage_parallelism(program: StageProgram) -> StageParallelism:
    """How the ranks of one stage share its work."""
    found = list(products(program))
    weighted = [p for p in found if p.weights]
    kind = module_kinds(program, weighted)
    tensor, experts = _tensor(program, weighted, kind)
    n_tensor = {a for p in weighted for local in p.weights for a in _shards(local.spec)}
    sequence = _sequence_axes(program, weighted)
    sizes = program.axis_sizes
    return StageParallelism(
        math.prod(sizes), ways_of(program, weighted), tensor, experts,
        math.prod(sizes[a] for a in sequence if a not in n_tensor),
        any(a in n_tensor for a in sequence),
    )  # fmt: skip


def ways_of(program: StageProgram, weighted: Iterable[Product]) -> tuple[Way, ...]:
    """The ways of the parameters that matmuls read, or of all if none do; of most bytes first."""
    read = _read_by(program, [p.line for p in weighted]) or {p.name for p in program.parameters}
    sizes: Counter[Way] = Counter()
    for parameter in program.parameters:
        if parameter.name in read:
            uses = program.used_specs[parameter.name]
            size_bytes = math.prod(parameter.shape) * parameter.stored.dtype.itemsize
            sizes[_way(parameter, uses, program.axis_sizes)] += size_bytes
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


def _way(parameter: StoredParameter, uses: Sequence[Spec], sizes: Sequence[int]) -> Way:
    stored = parameter.stored.spec.placements
    n_zero = n_data = 1
    for axis, size in enumerate(sizes):
        used = [spec.placements[axis] for spec in uses]
        if stored[axis].is_shard and not (used and all(p.is_shard for p in used)):
            n_zero *= size
        elif not stored[axis].is_shard and any(p.kind == "R" for p in used):
            n_data *= size
    return Way(ZERO[parameter.period] if n_zero > 1 else 0, n_zero, n_data)


def _shards(spec: Spec) -> list[int]:
    return [axis for axis, placement in enumerate(spec.placements) if placement.is_shard]


def module_kinds(program: StageProgram, weighted: Iterable[Product]) -> Callable[[CallLine], str]:
    """The kind of a matmul with a weight, or of an embedding: one of `MODULES`.

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
        if operator_name(line) == "embedding":
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
    program: StageProgram, weighted: Sequence[Product], kind: Callable[[CallLine], str]
) -> tuple[dict[str, int], int]:
    """Kind of module -> ranks that split it, and the ranks that experts are divided over."""
    sizes = program.axis_sizes
    splits: dict[str, _Split] = {}
    experts = _Split()
    for product in weighted:
        of = kind(product.line)
        axes = {a for local in product.weights for a in _shards(local.spec)}
        if of == "experts":  # a weight of [experts, ...]
            whole = {
                a for a in axes for w in product.weights
                if w.spec.placements[a].cell == (0, 0) and len(w.shape) == 3
            }  # fmt: skip
            experts.add(product.whole_flops, math.prod(sizes[a] for a in whole))
            axes -= whole
        n_ranks = math.prod(sizes[a] for a in axes)
        splits.setdefault(of, _Split()).add(product.whole_flops, n_ranks)
    total = sum(split.flops for split in splits.values())
    found = {of: s.n_ranks for of, s in splits.items() if s.flops >= _LEAST_FLOPS * total}
    for line in program.body:
        if isinstance(line, CallLine) and kind(line) == "embedding":
            n_ranks = math.prod(sizes[a] for a in _embedding_axes(program, line))
            found["embedding"] = max(found.get("embedding", 1), n_ranks)
    return {of: found[of] for of in MODULES if of in found}, experts.n_ranks


def _embedding_axes(program: StageProgram, line: CallLine) -> list[int]:
    """The axes that split the table of an embedding."""
    tables = parameter_variables(program)
    return next((_shards(tables[name].spec) for name in line.reads if name in tables), [])


def _sequence_axes(program: StageProgram, weighted: Sequence[Product]) -> list[int]:
    """The axes on which most norms compute slices of a sequence; without norms, most matmuls."""
    norms = [
        line for line in program.body if isinstance(line, CallLine) and kind_of([line]) == "norm"
    ]
    results = [line.outs[0] for line in norms or [p.line for p in weighted] if line.outs]
    kinds = shard_kinds(program)
    return [
        axis
        for axis, size in enumerate(program.axis_sizes)
        if size > 1
        and 2 * sum(_is_slice(local, kinds[local.name], axis) for local in results) > len(results)
    ]


def _is_slice(local: Local, kinds: Sequence[str], axis: int) -> bool:
    """Is it cut along a dim that is neither the batch nor the features, which are last?"""
    placement = local.spec.placements[axis]
    return kinds[axis] == "sequence" and placement.dim < len(local.shape) - 1
