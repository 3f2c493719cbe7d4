"""Strategies from notation and factors: how one operator may be placed on one mesh axis.

A *label* is one factor of one name. On each mesh axis an operator may

    shard a label   inputs with the label S, other inputs R; outputs with it S, others P
    stay invariant  all inputs I, outputs I
    replicate       all inputs R, outputs R
    be linear       one input P, the others R (if jointly linear, several inputs P); outputs P
    be lowered      if shards of a label are not enough, a function replaces the operator
                    (`lowering.py`)

A rule with `whole_gradients` never has R outputs with gradient, because their gradients are P.

I never mixes with R, S or P. If the scale of a layer norm were I while activations are sharded, the
loss would be right and the gradient of the scale wrong. Tensors without gradient do not distinguish
I and R, and have R.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.placement import I, Notation, P, Placement, R, S, TensorType
from autopar.rules.lowering import Lowering
from autopar.rules.rule import OpCall, OpRule

Cell = tuple[int, int]


@dataclass(frozen=True)
class Pattern:
    """The labels of an operator.

    labels   label -> its (dim, factor) in each input and in each output, None if it is not there
    sizes    label -> size
    names    label -> the name that it is a factor of
    """

    labels: Mapping[str, tuple[tuple[Cell | None, ...], tuple[Cell | None, ...]]]
    sizes: Mapping[str, int]
    names: Mapping[str, str]


@dataclass(frozen=True)
class AxisStrategy:
    """An operator's placements on one mesh axis.

    `label` is the sharded label, if any; two labels that are sharded together are separated by a
    space. `lowering` replaces the operator, if it is not None.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    label: str | None = None
    lowering: Lowering | None = None

    def __str__(self) -> str:
        show = lambda ps: ", ".join(map(str, ps))  # noqa: E731
        return f"{show(self.inputs)} -> {show(self.outputs)}"


def resolve(
    notation: Notation, inputs: Sequence[TensorType], outputs: Sequence[TensorType],
    sizes: Mapping[str, int],
) -> Pattern:  # fmt: skip
    """The labels of a notation, by the factors of the actual tensors.

    `sizes` are those of the names. A name gets no label, so that the operator cannot shard it, if
    it is frozen, if its factors differ between tensors, or if they do not align with a dim's.
    """
    operands = [
        *zip(notation.inputs, inputs, strict=True),
        *zip(notation.outputs, outputs, strict=True),
    ]
    found: dict[str, list[tuple[int, int, int, tuple[int, ...]]]] = {}
    broken = set(notation.frozen)
    for position, (term, tensor) in enumerate(operands):
        for dim, (names, factors) in enumerate(zip(term, tensor.dims, strict=True)):
            start = 0
            for name, run in _distribute(names, factors, sizes):
                if run is None:
                    broken.add(name)
                    continue
                found.setdefault(name, []).append((position, dim, start, run))
                start += len(run)
    labels, label_sizes, owner = {}, {}, {}
    for name, places in found.items():
        runs = {run for *_, run in places}
        if name in broken or len(runs) > 1:
            continue
        for k, size in enumerate(next(iter(runs))):
            cells: list[Cell | None] = [None] * len(operands)
            for position, dim, start, _ in places:
                cells[position] = (dim, start + k)
            label = f"{name}.{k}"
            labels[label] = (tuple(cells[: len(inputs)]), tuple(cells[len(inputs) :]))
            label_sizes[label] = size
            owner[label] = name
    return Pattern(labels, label_sizes, owner)


def _distribute(
    names: Sequence[str], factors: Sequence[int], sizes: Mapping[str, int]
) -> list[tuple[str, tuple[int, ...] | None]]:
    """Each name of a dim, with its consecutive factors; None if they do not align."""
    out: list[tuple[str, tuple[int, ...] | None]] = []
    rest = list(factors)
    aligned = True
    for name in names:
        size, run, product = sizes.get(name, 1), [], 1
        while aligned and product < size and rest:
            run.append(rest.pop(0))
            product *= run[-1]
        aligned = aligned and product == size
        out.append((name, tuple(run) if aligned else None))
    return out


def _sharded_together(rule: OpRule, pattern: Pattern) -> Iterator[tuple[str, ...]]:
    """Every label that may be alone, and the pairs of labels that the rule lowers."""
    yield from ((label,) for label in pattern.labels if pattern.names[label] not in rule.paired)
    for pair in (key.split() for key in rule.lower if " " in key):
        yield from itertools.product(
            *([label for label in pattern.labels if pattern.names[label] == n] for n in pair)
        )


def _cells(pattern: Pattern, labels: Sequence[str]) -> tuple[list[Cell | None], list[Cell | None]]:
    """The cell of one of the labels in each input and output; no tensor has two of them."""
    inputs, outputs = zip(*(pattern.labels[label] for label in labels), strict=True)

    def either(per_label: Sequence[Sequence[Cell | None]]) -> list[Cell | None]:
        found = [[cell for cell in cells if cell] for cells in zip(*per_label, strict=True)]
        assert all(len(cells) < 2 for cells in found), f"{labels} are of one tensor"
        return [cells[0] if cells else None for cells in found]

    return either(inputs), either(outputs)


def axis_strategies(
    rule: OpRule,
    call: OpCall,
    pattern: Pattern,
    input_grads: Sequence[bool],
    output_grads: Sequence[bool],
) -> tuple[AxisStrategy, ...]:
    """Every strategy of one operator on one axis, in a fixed order; divisibility is not checked."""
    n_in, n_out = len(input_grads), len(output_grads)
    found: dict[tuple[tuple[Placement, ...], tuple[Placement, ...]], AxisStrategy] = {}

    def add(
        inputs: Sequence[Placement], outputs: Sequence[Placement], label: str | None = None,
        lowering: Lowering | None = None,
    ) -> None:  # fmt: skip
        ins = tuple(p if g or p != I else R for p, g in zip(inputs, input_grads, strict=True))
        outs = tuple(p if g or p != I else R for p, g in zip(outputs, output_grads, strict=True))
        if rule.whole_gradients and any(
            p == R and g for p, g in zip(outs, output_grads, strict=True)
        ):
            return
        found.setdefault((ins, outs), AxisStrategy(ins, outs, label, lowering))

    add([I] * n_in, [I] * n_out)
    add([R] * n_in, [R] * n_out)
    for labels in _sharded_together(rule, pattern):
        lowering = rule.lower.get(" ".join(pattern.names[label] for label in labels))
        if lowering and not _is_contiguous(lowering, pattern, labels):
            continue
        in_cells, out_cells = _cells(pattern, labels)
        outputs = [S(*c) if c else P for c in out_cells]
        for i, kind in enumerate(lowering.outputs if lowering else ()):
            outputs[i] = Placement(kind) if kind else outputs[i]
        add([S(*c) if c else R for c in in_cells], outputs, " ".join(labels), lowering)
    for together in rule.linear_of(call):
        inputs = [P if i in together else R for i in range(n_in)]
        if all(input_grads[i] or not any(input_grads) for i in together):
            add(inputs, [P] * n_out)
    return tuple(found.values())


def _is_contiguous(lowering: Lowering, pattern: Pattern, labels: Sequence[str]) -> bool:
    """Are shards of the labels contiguous where the function needs that?"""
    needed = {"none": [], "last": labels[-1:], "all": labels}[lowering.contiguous]
    cells = (cell for label in needed for side in pattern.labels[label] for cell in side)
    return not any(cell and cell[1] for cell in cells)
