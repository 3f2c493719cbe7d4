"""Derived rules: every operator that torch tags as pointwise is pointwise on shards too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from autopar.errors import VerificationError
from autopar.oracle import OracleCase, report_case
from autopar.rules import has_rule, own_rule, rule_for
from autopar.rules.derived import derived_rule
from autopar.rules.operators import lookup
from tests.helpers.samples.rule_samples import bools, fixed, ints, positive, x


def tagged() -> Iterator[torch._ops.OpOverload]:
    """Every overload of ATen that has a derived rule."""
    for name in torch._C._dispatch_get_all_op_names():
        op = lookup(name) if name.startswith("aten::") else None
        if op is not None and "backward" not in name and derived_rule(str(op)) is not None:
            yield op


def arguments(op: torch._ops.OpOverload, tensors: Iterator[Any]) -> list[Any] | None:
    """Values for the arguments without default; None if one is neither a tensor nor a number."""
    out: list[Any] = []
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if kind == "Tensor":
            out.append(next(tensors))
        elif argument.kwarg_only or argument.has_default_value():
            continue
        elif kind in ("number", "float", "int"):
            out.append(2)
        else:
            return None
    return out


# Values in (0, 1), any reals, values above 1, integers, masks: every operator takes one of them.
OPERANDS = (
    lambda: iter([fixed(4, 8).sigmoid().requires_grad_(), fixed(8).sigmoid(), fixed(4, 1)]),
    lambda: iter([x(4, 8), x(8), fixed(4, 1)]),
    lambda: iter([(positive(4, 8).detach() + 1).requires_grad_(), positive(8), fixed(4, 1)]),
    lambda: iter([ints(5, 4, 8) + 1, ints(5, 8) + 1, ints(5, 4, 1) + 1]),
    lambda: iter([bools(4, 8), x(8), x(4, 1)]),
)


def case(op: torch._ops.OpOverload) -> OracleCase | None:
    """The operator on the first operands that it takes; None if it takes none."""
    for operands in OPERANDS:
        args = arguments(op, operands())
        if args is None:
            return None
        try:
            found = OracleCase.of(rule_for(str(op)), op, args)
        except (RuntimeError, NotImplementedError, VerificationError):  # not for these dtypes
            continue
        if not any(result.isnan().any() for result in found.results):
            return found
    return None


def test_every_tagged_operator_is_pointwise() -> None:
    checked, wrong = 0, list[str]()
    for found in filter(None, map(case, tagged())):
        report = report_case(found, [(2,)])
        checked += 1
        if not report.ok:
            wrong.append(report.text())
    assert not wrong, "\n".join(wrong)
    assert checked > 150


@pytest.mark.parametrize("op", ["aten.bernoulli.default", "aten.relu_.default", "aten.mylib.scan"])
def test_random_and_writing_operators_have_no_derived_rule(op: str) -> None:
    assert derived_rule(op) is None
    assert not has_rule(op)


def test_a_rule_of_its_own_goes_first() -> None:
    assert own_rule("aten.relu.default") is None
    assert rule_for("aten.add.Tensor") is own_rule("aten.add.Tensor")
    assert rule_for("aten.add.Tensor") != derived_rule("aten.add.Tensor")
