"""The table of rules: lookup, registration, and the errors that tell what to write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.errors import (
    AutoparError,
    MissingRuleError,
    NotationError,
    NotSupportedError,
    OptionError,
    VerificationError,
)
from autopar.oracle import Case, check_rule, report_case
from autopar.rules import (
    OpCall,
    OpRule,
    all_rules,
    check_call,
    find_operator,
    has_rule,
    register_rule,
    rule_for,
)
from tests.conftest import Golden
from tests.rule_samples import ints, x

aten = torch.ops.aten


@torch.library.custom_op("autopar_tests::scaled_rows", mutates_args=())
def scaled_rows(table: Tensor, scale: Tensor) -> Tensor:
    return table * scale.unsqueeze(-1)


@torch.library.custom_op("autopar_tests::row_blocks", mutates_args=())
def row_blocks(table: Tensor, n_rows: int) -> Tensor:
    """Fails unless told the number of rows of its input."""
    if len(table) != n_rows:
        raise ValueError(f"{len(table)} rows, not {n_rows}")
    return table + 1.0


def test_operators_of_the_table_exist_and_are_found_by_name() -> None:
    for rule in all_rules():
        assert str(find_operator(rule.op)) == rule.op
        assert rule_for(rule.op) is rule
        assert has_rule(rule.op)


def test_every_notation_in_text_is_canonical() -> None:
    texts = [rule.notation for rule in all_rules() if isinstance(rule.notation, str)]
    assert texts
    for rule in all_rules():
        if isinstance(rule.notation, str):
            assert str(rule._parsed) == rule.notation


@pytest.mark.parametrize(
    ("op", "found"),
    [
        ("aten::mm", "aten.mm.default"),
        ("aten::add.Tensor", "aten.add.Tensor"),
        ("aten.add.Tensor", "aten.add.Tensor"),
        (aten.mm, "aten.mm.default"),
        (aten.add.Tensor, "aten.add.Tensor"),
        (scaled_rows, "autopar_tests.scaled_rows.default"),
        ("autopar_tests::scaled_rows", "autopar_tests.scaled_rows.default"),
    ],
)
def test_find_operator(op: Any, found: str) -> None:
    assert str(find_operator(op)) == found


class TestRegister:
    def test_a_registered_rule_is_found_and_holds(self) -> None:
        assert not has_rule("autopar_tests.scaled_rows.default")
        rule = register_rule(scaled_rows, "b h, b -> b h", flops="b*h")
        assert rule_for("autopar_tests.scaled_rows.default") is rule
        assert rule.flops_of({"b": 3, "h": 5}) == 15
        with torch.no_grad():
            report = check_rule(scaled_rows, torch.ones(4, 8), torch.ones(4))
        assert report.ok, report.text()
        assert "R, I" not in report.text()
        assert "   2  S(0), S(0) -> S(0)" in report.text()

    def test_arguments_with_sizes_are_localised(self) -> None:
        def localise(
            call: OpCall, inputs: Sequence[tuple[int, ...]], outputs: Sequence[tuple[int, ...]]
        ) -> dict[str, Any]:
            return {"n_rows": inputs[0][0]}

        operator, values = find_operator(row_blocks), torch.ones(4, 8, dtype=torch.float64)
        wrong = Case.of(register_rule(row_blocks, "b h -> b h"), operator, (values, 4))
        (failure,) = [n.failure for n in report_case(wrong, [(2,)]).lines if n.failure]
        assert failure == "autopar_tests.row_blocks.default: 2 rows, not 4"
        right = register_rule(row_blocks, "b h -> b h", lower=localise)
        assert report_case(Case.of(right, operator, (values, 4)), [(2,)]).ok


def test_flops_count_leading_dims_and_ignore_names_that_are_not_there() -> None:
    rule = rule_for("aten.linear.default")
    assert rule.flops_of({"_0": 2, "_1": 3, "i": 5, "o": 7}) == 2 * 2 * 3 * 5 * 7
    attention = rule_for("aten.scaled_dot_product_attention.default")
    assert attention.flops_of({"_0": 2, "s": 3, "t": 5, "e": 7}) == 4 * 2 * 3 * 5 * 7
    assert rule_for("aten.einsum.default").flops_of({"_a": 2, "_b": 3, "_c": 5}) == 60
    assert rule_for("aten.relu.default").flops_of({"d0": 8}) == 0


def notation_of(rule: OpRule, *args: Any) -> None:
    operator = find_operator(rule.op)
    rule.notation_of(OpCall.of(operator, args, {}, operator(*args)))


def refused(op: str, *args: Any) -> None:
    operator = find_operator(op)
    call = OpCall.of(operator, args, {}, torch.ones(()))
    check_call(rule_for(op), call, "loss.py:7")


def check_without_gradient() -> None:
    register_rule(scaled_rows, "b h, b -> b h")
    check_rule(scaled_rows, torch.ones(4, 8), torch.ones(4))


FAILURES: tuple[tuple[type[AutoparError], Callable[[], object]], ...] = (
    (MissingRuleError, lambda: rule_for("aten.lu_solve.default")),
    (MissingRuleError, lambda: rule_for("mylib.scan.fast", "encoder/scan#2 (model.py:88)")),
    (OptionError, lambda: register_rule("mylib::scan", "b s -> b s")),
    (OptionError, lambda: register_rule("mm", "m k, k n -> m n")),
    (OptionError, lambda: register_rule("aten::mm.out_of_place", "m k, k n -> m n")),
    (OptionError, lambda: register_rule(torch.nn.functional.relu, "b -> b")),
    (NotationError, lambda: register_rule("aten::mm", "m k, k n")),
    (NotationError, lambda: notation_of(OpRule("aten.mm.default", "m k -> m"), x(2, 3), x(3, 4))),
    (NotationError, lambda: notation_of(rule_for("aten.linear.default"), x(2, 3), x(4, 3), x(4))),
    (VerificationError, check_without_gradient),
    (NotSupportedError, lambda: refused("aten.cross_entropy_loss.default", x(4, 8), ints(8, 4))),
    (
        NotSupportedError,
        lambda: refused("aten.cross_entropy_loss.default", x(4, 8), x(4, 8), None, 2),
    ),
    (NotSupportedError, lambda: refused("aten.index.Tensor", x(4, 4), [x(4, 4) > 0])),
    (NotSupportedError, lambda: refused("aten.nll_loss.default", x(4, 8), ints(8, 4))),
    (
        NotSupportedError,
        lambda: refused("aten.embedding.default", x(8, 4), ints(8, 4), -1, False, True),
    ),
)


def test_messages(golden: Golden) -> None:
    messages = []
    for kind, fail in FAILURES:
        with pytest.raises(AutoparError) as error:
            fail()
        assert type(error.value) is kind
        messages.append(f"{kind.__name__}: {error.value}\n")
    golden("rule_errors.txt", "\n".join(messages))
