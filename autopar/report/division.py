"""How much of a plan is sharded: the bytes of its parameters and the FLOPs of its matmuls.

A matmul here is any operator with FLOPs: contractions, attention, convolutions. FLOPs are those of
the forward of one microbatch. Fractions over all stages (`division`):

    stored       bytes of parameters that are stored in shards / bytes of all parameters
    products     FLOPs of matmuls that no two ranks repeat / FLOPs of all matmuls
    repeated     FLOPs of ranks that repeat those of another rank / FLOPs of all ranks together
    by_weights   FLOPs of matmuls whose weight is used in shards / FLOPs of matmuls with a weight.
                 A weight is a parameter, or computed from parameters alone
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from autopar.program.lines import (
    CallLine,
    Local,
    Pipeline,
    ShardKind,
    StageProgram,
    StoredParameter,
)


@dataclass(frozen=True)
class Division:
    """The fractions; of what is sharded, each is 1.0 at best, and if there is nothing to shard."""

    stored: float
    products: float
    by_weights: float
    repeated: float = 0.0

    def __str__(self) -> str:
        text = (
            f"Parameter bytes sharded: {self.stored:.0%}. "
            f"Matmul FLOPs sharded: {share_text(self.products)}; "
            f"through sharded weights: {share_text(self.by_weights)}"
        )
        if self.repeated:
            text += (
                f". Of the FLOPs of all ranks, {share_text(self.repeated)} repeat another rank's"
            )
        return text


@dataclass(frozen=True)
class Product:
    """One operator with FLOPs: those of the whole operator, and those of one rank.

    `placed` are its operands and results, `weights` its operands that are weights, as it uses them.
    """

    line: CallLine
    whole_flops: float
    rank_flops: float
    weights: tuple[Local, ...]
    placed: tuple[Local, ...]

    def axes_of(self, kind: ShardKind) -> frozenset[int]:
        """The axes whose ranks share it along factors of a kind."""
        axes = range(len(self.placed[0].spec.placements))
        return frozenset(
            a for a in axes if any(local.shard_kind(a) == kind for local in self.placed)
        )

    @property
    def weight_is_sharded(self) -> bool | None:
        """Is a weight used in shards? None without a weight."""
        return any(map(is_sharded, self.weights)) if self.weights else None


def division(pipeline: Pipeline) -> Division:
    """The fractions of a plan."""
    parameters = [p for s in pipeline.stages for p in s.parameters if p.mirror_of is None]
    found = [(p, mesh.n_ranks) for s, mesh in zip(pipeline.stages, pipeline.meshes, strict=True)
             for p in products(s)]  # fmt: skip
    weighted = [p for p, _ in found if p.weights]
    whole = sum(p.whole_flops for p, _ in found)
    return Division(
        _share(sum(_size_bytes(p) for p in parameters if is_sharded(p.stored)),
               sum(map(_size_bytes, parameters))),
        _share(sum(p.whole_flops for p, n in found if _is_once(p, n)), whole),
        _share(sum(p.whole_flops for p in weighted if p.weight_is_sharded),
               sum(p.whole_flops for p in weighted)),
        _share(sum(p.rank_flops * n - p.whole_flops for p, n in found if not _is_once(p, n)),
               sum(p.rank_flops * n for p, n in found)) if whole else 0.0,
    )  # fmt: skip


def products(program: StageProgram) -> Iterator[Product]:
    """Every operator with FLOPs, in program order."""
    known = {item.local.name: item.local for item in program.delivered}
    known |= {item.local.name: item.local for item in program.received}
    weights: set[str] = set()
    for parameter in program.parameters:
        for local in (parameter.stored, *(use.local for use in parameter.uses)):
            known[local.name] = local
            weights.add(local.name)
    for line in program.body:
        operands = [name for name in line.reads if name in known]  # leaves out groups of ranks
        of_weights = bool(operands) and weights.issuperset(operands)
        if isinstance(line, CallLine) and line.flops:
            placed = [*(known[name] for name in operands), *line.outs]
            own = tuple(known[name] for name in operands if name in weights)
            whole_flops = line.flops * _n_parts(placed, program.axis_sizes)
            yield Product(line, whole_flops, line.flops, own, tuple(placed))
        for out in line.outs:
            known[out.name] = out
            if of_weights:
                weights.add(out.name)


def is_sharded(local: Local) -> bool:
    return any(placement.is_shard for placement in local.spec.placements)


def _n_parts(placed: Iterable[Local], sizes: Sequence[int]) -> int:
    """The ranks an operator is sharded over: those of all axes that shard any of its tensors."""
    cut = {axis for local in placed for axis, p in enumerate(local.spec.placements) if p.is_shard}
    return math.prod(sizes[axis] for axis in cut)


def _size_bytes(parameter: StoredParameter) -> int:
    return math.prod(parameter.shape) * parameter.stored.dtype.itemsize


def _is_once(product: Product, n_ranks: int) -> bool:
    """Does no rank repeat what another computes?"""
    return product.rank_flops * n_ranks <= product.whole_flops * (1 + 1e-9)


def share_text(share: float) -> str:
    """A share in whole percent; 100% and 0% are exact."""
    if share in (0.0, 1.0):
        return f"{share:.0%}"
    return "over 99%" if share > 0.99 else "under 1%" if share < 0.01 else f"{share:.0%}"


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 1.0
