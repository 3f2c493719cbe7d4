"""By how much a value of one microbatch differs from what the model would return on its rows.

A program of a whole batch divides by numbers of the whole batch: a mean is a sum over 1/n of all
elements, a loss over labels is a sum over 1/(labels of the batch). One of m microbatches runs the
same divisions on fewer rows. So its mean is that of the model, called on these rows alone, divided
by m; its sum is the model's. In general

    value in the microbatch  =  m^-e · value of the model on these rows            (`row_counts`)

    divisors of the prologue     -1     exact for equal counts of labels
    a / b, a · b                 e(a) - e(b), e(a) + e(b)
    a / number, a · number       e(a) ± k, if the number is m^k times that of the program which is
                                 captured on one microbatch (`len(x)`, the n of a mean)
    other operators              e of the inputs in which the rule is linear; 0 if all are 0
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Number
from typing import Any

from torch import fx

from autopar.program.graph import Operator, Program, operators_of
from autopar.rules import rule_for

_DIVISIONS = ("aten.div.Tensor", "aten.div.Scalar")
_PRODUCTS = ("aten.mul.Tensor", "aten.mul.Scalar")


def row_counts(program: Program, one: Program, n_microbatches: int) -> dict[str, int]:
    """Value -> e, for the values where it is known.

    program   captured on the whole batch; one: the same model on one of its `n_microbatches`
    """
    pairs = _aligned(program, one)
    if pairs is None:
        return {}
    found: dict[str, int | None] = {}
    divisors = program.prologue.outputs if program.prologue else ()
    operators = {operator.name: operator for operator in operators_of(program)}
    for node, other in pairs:
        if node.op == "placeholder":
            found[node.name] = -1 if node.name in divisors else 0
            if node.name in program.constants and node.meta["val"].dim() == 0:
                found[node.name] = _constant(program, one, node.name, n_microbatches)
        elif node.name in operators:
            found[node.name] = _of_operator(
                operators[node.name], node, other, found, n_microbatches
            )
        elif node.op == "call_function":  # a result of a multi-output operator
            source = node.args[0]
            assert isinstance(source, fx.Node)
            found[node.name] = found[source.name]
    return {name: e for name, e in found.items() if e is not None}


def _aligned(program: Program, one: Program) -> list[tuple[fx.Node, fx.Node]] | None:
    nodes, others = list(program.graph.nodes), list(one.graph.nodes)
    same = [(n.op, n.name, str(n.target)) for n in nodes] == [
        (n.op, n.name, str(n.target)) for n in others
    ]
    return list(zip(nodes, others, strict=True)) if same else None


def _of_operator(
    operator: Operator, node: fx.Node, other: fx.Node, found: Mapping[str, int | None], m: int
) -> int | None:
    inputs = [found[name] for name in operator.inputs]
    if any(e is None for e in inputs):
        return None
    known = [e for e in inputs if e is not None]
    target = str(node.target)
    if target in _DIVISIONS or target in _PRODUCTS:
        sign = -1 if target in _DIVISIONS and len(node.args) == 2 else 1
        if len(node.args) != 2:  # a rounding mode
            return 0 if not any(known) else None
        if len(known) == 2:
            return known[0] + sign * known[1]
        power = _power(node.args[1], other.args[1], m)
        if power is None or not isinstance(node.args[0], fx.Node):
            return None
        return known[0] - sign * power
    if _floats(node) != _floats(other):
        return None
    if not any(known):
        return 0
    for linear in rule_for(str(node.target)).linear_of(operator.call):
        outside = [e for i, e in enumerate(known) if i not in linear]
        inside = {known[i] for i in linear}
        if len(inside) == 1 and not any(outside):
            return inside.pop()
    return None


def _floats(node: fx.Node) -> list[Any]:
    """The float arguments; integers may be sizes, which differ with the rows."""
    return [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, float)]


def _constant(program: Program, one: Program, name: str, m: int) -> int | None:
    """A number as a tensor; its power of m counts as for a factor."""
    if name not in one.constants:
        return None
    power = _power(program.constants[name]().item(), one.constants[name]().item(), m)
    return None if power is None else -power


def _power(whole: Any, part: Any, m: int) -> int | None:
    """k where whole = m^k · part; None if there is none."""
    if whole == part:
        return 0
    if not isinstance(whole, Number) or not isinstance(part, Number) or isinstance(whole, complex):
        return None
    ratio = float(whole) / float(part) if part else 0.0  # type: ignore[arg-type]
    if ratio <= 0:
        return None
    power = round(math.log(ratio) / math.log(m))
    return power if math.isclose(ratio, float(m) ** power, rel_tol=1e-12) else None


def microbatch_scales(
    program: Program, one: Program | None, n_microbatches: int
) -> tuple[float, ...]:
    """For each output, the factor that makes a microbatch's value the model's on these rows.

    Where that is not known (the sum of a mean and a sum), the factor of a floating scalar is
    `n_microbatches`: the mean over the microbatches is then the value of the whole batch. With
    gradient accumulation only the loss has a factor, because only it is divided.
    """
    if program.accumulation is not None:
        return tuple(
            float(n_microbatches) if name == program.loss else 1.0 for name in program.outputs
        )
    known = row_counts(program, one, n_microbatches) if one is not None else {}
    scales = []
    for name in program.outputs:
        value = program.node(name).meta["val"]
        is_scalar = value.dim() == 0 and value.is_floating_point()
        scales.append(float(n_microbatches) ** known.get(name, int(is_scalar)))
    return tuple(scales)
