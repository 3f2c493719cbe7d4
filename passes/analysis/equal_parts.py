"""Which programs are equal except for names, such as the middle stages of a pipeline.

What is chosen for one of them is renamed and reused for the others. Values and operators are
numbered in order. Two programs are equal if the same numbers mean the same operators, on values of
the same types, factors and batch, in the same roles.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cost.hardware import KernelMode
from autopar.passes.analysis.analysis import Analysis
from autopar.program.graph import Program
from autopar.program.lines import (
    Boundary,
    GatherLine,
    Line,
    StageProgram,
    StoredParameter,
    Strategy,
)


@dataclass(frozen=True)
class Numbered:
    """A program's values and operators, numbered in an order that equal programs share.

    Two programs are equal if their `likeness` is equal.
    """

    values: tuple[str, ...]
    operators: tuple[str, ...]
    likeness: Hashable

    @staticmethod
    def of(
        analysis: Analysis, ranges: Sequence[range] = (), kernels: KernelMode = "eager"
    ) -> Numbered:
        """Number a program; `ranges` of positions must be equal too (`Recomputable.within`), and
        what operators move in this mode."""
        program, operators = analysis.program, analysis.operators
        read = (n for o in operators for n in (*o.inputs, *o.outputs))
        values = tuple(dict.fromkeys((*read, *program.parameters, *program.received)))
        number = {name: i for i, name in enumerate(values)}
        fused = analysis.fused_traffic(kernels)
        ends = (tuple(program.parameters), program.received, program.sent, program.outputs)
        likeness = (
            tuple(
                (
                    analysis.kinds[o.name],
                    analysis.temporaries[o.name],
                    fused.get(o.name),
                    *(number[n] for n in (*o.inputs, *o.outputs)),
                )
                for o in operators
            ),
            tuple(tuple(number[n] for n in names) for names in ends),
            number[program.loss] if program.loss is not None else None,
            _placeholders(analysis, number),
            _factors(analysis, values),
            tuple(analysis.dtypes[n] for n in values),
            tuple(ranges),
        )
        return Numbered(values, tuple(o.name for o in operators), likeness)

    def names_in(self, other: Numbered) -> dict[str, str]:
        """Name in this program -> name in an equal program."""
        own, theirs = (*self.values, *self.operators), (*other.values, *other.operators)
        return dict(zip(own, theirs, strict=True))


def _placeholders(analysis: Analysis, number: Mapping[str, int]) -> tuple[Hashable, ...]:
    """Describe each placeholder. Equal programs may have different parameters and constants.

    Inputs, buffers and the seed must be the same ones.
    """
    program, first = analysis.program, dict[Hashable, int]()
    found: list[Hashable] = []
    for node in program.graph.find_nodes(op="placeholder"):
        i = number.get(node.name)
        if node.name in program.parameters:
            info = program.parameters[node.name]
            is_mirror = info.mirror_of is not None
            found.append((i, info.shape, info.dtype, info.requires_grad, is_mirror))
        elif node.name in program.constants:  # of equal constants, only the first is delivered
            same = first.setdefault(program.constants[node.name], len(first))
            found.append((i, same))
        elif node.name not in program.received:
            found.append((i, node.name))
    return tuple(found)


def _factors(analysis: Analysis, values: Sequence[str]) -> tuple[int, ...]:
    """The factor classes of the values, renumbered by first appearance."""
    numbers: dict[int, int] = {}
    classes = (c for n in values for dim in analysis.types.classes[n] for c in dim)
    return tuple(numbers.setdefault(c, len(numbers)) for c in classes)


def rename_strategy(strategy: Strategy, names: Mapping[str, str]) -> Strategy:
    """A strategy, renamed for an equal program (`Numbered.names_in`)."""
    return replace(
        strategy,
        operators={names[n]: chosen for n, chosen in strategy.operators.items()},
        storage={names[n]: storage for n, storage in strategy.storage.items()},
        received={names[n]: spec for n, spec in strategy.received.items()},
        sent={names[n]: spec for n, spec in strategy.sent.items()},
        recomputed=tuple(
            replace(item, operators=tuple(names[n] for n in item.operators))
            for item in strategy.recomputed
        ),
    )


def rename_lowered(
    lowered: StageProgram, program: Program, other: Program, names: Mapping[str, str]
) -> StageProgram:
    """A lowered program, renamed for an equal program so that it can be joined and priced.

    Its lines keep their names, but for the parameters that they gather.
    """
    infos = {info.name: other.parameters[names[n]] for n, info in program.parameters.items()}

    def parameter(p: StoredParameter) -> StoredParameter:
        info = infos[p.name]
        return replace(p, name=info.name, aliases=info.aliases, mirror_of=info.mirror_of)

    def named(line: Line) -> Line:
        if not isinstance(line, GatherLine):
            return line
        return replace(line, parameter=infos[line.parameter].name)

    def crossing(boundary: Boundary) -> Boundary:
        value = names[boundary.value]
        return replace(boundary, value=value, key=other.value_key(value))

    return replace(
        lowered,
        body=tuple(map(named, lowered.body)),
        parameters=tuple(map(parameter, lowered.parameters)),
        received=tuple(map(crossing, lowered.received)),
        sent=tuple(map(crossing, lowered.sent)),
        every_parameter=tuple(infos[n].name for n in lowered.every_parameter),
        shared_prices=lowered.price_cache,
    )
