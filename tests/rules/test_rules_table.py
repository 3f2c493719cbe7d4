"""The table of rules: lookup, registration, and errors that say what to write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import autopar
from autopar.capture import capture
from autopar.errors import (
    AutoparError,
    MissingRuleError,
    NotationError,
    NotSupportedError,
    OptionError,
    VerificationError,
)
from autopar.manual import Manual
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.oracle import OracleCase, check_rule, report_case
from autopar.placement import Notation
from autopar.planning import plan_program
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
from tests.helpers.samples.rule_samples import ints, x

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("registry")


@torch.library.custom_op("autopar_tests::scaled_rows", mutates_args=())
def scaled_rows(table: Tensor, scale: Tensor) -> Tensor:
    return table * scale.unsqueeze(-1)


@torch.library.custom_op("autopar_tests::row_blocks", mutates_args=())
def row_blocks(table: Tensor, n_rows: int) -> Tensor:
    """Fails if `n_rows` is not the number of rows of its input."""
    if len(table) != n_rows:
        raise ValueError(f"{len(table)} rows, not {n_rows}")
    return table + 1.0


@torch.library.custom_op("autopar_tests::shifted_peak", mutates_args=())
def shifted_peak(
    table: Tensor, rows: Tensor, shift: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of a table, shifted; the largest element of each, and where it is."""
    taken = table[rows] if shift is None else table[rows] + shift
    values, places = taken.max(1)
    return taken, values, places


def _shifted_peak_backward(ctx: Any, of_taken: Tensor, of_values: Tensor, _: Any) -> Any:
    rows, places = ctx.saved_tensors
    total = of_taken.scatter_add(1, places[:, None], of_values[:, None])
    return (
        total.new_zeros(ctx.shape).index_add(0, rows, total),
        None,
        total.sum(0) if ctx.needs_input_grad[2] else None,
    )


def _keep_places(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(inputs[1], output[2])
    ctx.shape = inputs[0].shape


shifted_peak.register_autograd(_shifted_peak_backward, setup_context=_keep_places)
PEAK_RULE = "v! h!, b, h -> b h, b, b"


def test_operators_of_the_table_exist_and_are_found_by_name() -> None:
    for rule in all_rules():
        assert str(find_operator(rule.op)) == rule.op
        assert rule_for(rule.op) is rule
        assert has_rule(rule.op)


def test_every_notation_in_text_is_canonical() -> None:
    for rule in all_rules():
        if isinstance(rule.notation, str):
            assert str(Notation.parse(rule.notation)) == rule.notation


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
        ("autopar_tests::scaled_rows.default", "autopar_tests.scaled_rows.default"),
        ("aten::squeeze", "aten.squeeze.default"),
        ("aten::addcmul_", "aten.addcmul_.default"),
        ("aten::softmax.int", "aten.softmax.int"),
        (aten.nll_loss2d, "aten.nll_loss2d.default"),
        (aten.upsample_nearest2d.vec, "aten.upsample_nearest2d.vec"),
    ],
)
def test_find_operator(op: Any, found: str) -> None:
    assert str(find_operator(op)) == found


WITHOUT_RULE: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    ("aten::lu_solve", (torch.rand(4, 3, 2), torch.eye(3).repeat(4, 1, 1), torch.ones(4, 3).int())),
    ("aten::geqrf", (torch.rand(4, 8, 3),)),
    ("aten::_linalg_eigvals", (torch.eye(3),)),
    (
        "aten::_foreach_add.List",
        ([torch.ones(4), torch.ones(1, 8)], [torch.ones(4), torch.ones(8)]),
    ),
    (scaled_rows, (torch.ones(4, 1), torch.ones(4))),
    (row_blocks, (torch.ones(4, 8), 4)),
    (shifted_peak, (torch.rand(8, 4), torch.tensor([3, 1]), torch.rand(4))),
    (shifted_peak, (torch.rand(8, 4), torch.tensor([3, 1]), None)),
)


@pytest.mark.parametrize(("op", "args"), WITHOUT_RULE)
def test_the_line_in_the_hint_gives_the_call_a_rule(op: Any, args: tuple[Any, ...]) -> None:
    operator = find_operator(op)
    call = OpCall.of(operator, args, {}, operator(*args))
    with pytest.raises(MissingRuleError, match="has no sharding rule") as error:
        rule_for(str(operator), call=call)
    line = str(error.value).split("hint: ")[1].split(" keeps it whole")[0]
    exec(line, {"autopar": autopar})
    notation = rule_for(str(operator)).notation_of(call)
    assert notation.frozen == {*notation.names}
    assert [len(term) for term in notation.inputs] == [len(shape) for shape in call.inputs]


def test_the_hint_of_an_operator_that_no_rule_describes_is_a_way_out() -> None:
    for op, hint in (
        ("aten.relu_.default", "returns what it computes"),
        ("aten.poisson.default", "draw them"),
    ):
        with pytest.raises(MissingRuleError, match=hint):
            rule_for(op)


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
        wrong = OracleCase.of(register_rule(row_blocks, "b h -> b h"), operator, (values, 4))
        (failure,) = [n.failure for n in report_case(wrong, [(2,)]).lines if n.failure]
        assert failure == "autopar_tests.row_blocks.default: 2 rows, not 4"
        right = register_rule(row_blocks, "b h -> b h", lower=localise)
        assert report_case(OracleCase.of(right, operator, (values, 4)), [(2,)]).ok

    def test_several_results_integers_and_an_optional_tensor(self) -> None:
        """Terms of tensors that a call omits are dropped; integers have no gradient."""
        register_rule(shifted_peak, PEAK_RULE)
        table, rows, shift = torch.randn(6, 8), torch.randint(6, (4,)), torch.randn(8)
        for call in ((table, rows, shift), (table, rows, None)):
            report = check_rule(shifted_peak, *call)
            assert report.ok, report.text()
            given = ", R" * (call[2] is not None)
            assert f"   2  R, S(0){given} -> S(0), S(0), S(0)  value" in report.text()

    def test_what_no_mesh_divides_is_told(self) -> None:
        """Three rows do not divide over two ranks, so no strategy that shards rows is checked."""
        register_rule(shifted_peak, PEAK_RULE)
        report = check_rule(shifted_peak, torch.randn(6, 8), torch.tensor([1, 0, 5]), None)
        assert report.ok
        assert report.unchecked == ("b of 3",)
        assert report.text().endswith("\nnot checked, as no mesh divides them: b of 3")

    @pytest.mark.parametrize(
        ("notation", "wrong"),
        [
            ("v! h, b, h -> b h, b, b", "output 1 under P"),  # a maximum is no sum
            ("v h!, b, h -> b h, b, b", "index"),  # rows of another rank
        ],
    )
    def test_a_wrong_line_is_found(self, notation: str, wrong: str) -> None:
        register_rule(shifted_peak, notation)
        table, rows = torch.randn(6, 8), torch.tensor([5, 4, 0, 1])
        report = check_rule(shifted_peak, table, rows, torch.randn(8))
        assert not report.ok
        assert any(wrong in (line.failure or "") for line in report.lines), report.text()

    def test_a_linear_claim_is_checked(self) -> None:
        """A rule registered by a line claims no linearity; what the tables claim is checked."""
        assert register_rule(scaled_rows, "b h, b -> b h").linear == ()
        rule = OpRule("aten.square.default", "b h -> b h", linear=((0,),))
        report = report_case(OracleCase.of(rule, aten.square.default, (x(4, 8),)), [(2,)])
        (failure,) = [line.failure for line in report.lines if line.failure]
        assert failure.startswith("aten.square.default: output 0 under P is wrong by")

    def test_the_second_rule_replaces_the_first(self) -> None:
        first = register_rule(scaled_rows, "b! h, b -> b h")
        second = register_rule("autopar_tests::scaled_rows.default", "b h, b -> b h")
        assert rule_for("autopar_tests.scaled_rows.default") is second != first

    def test_a_rule_may_come_after_capture(self) -> None:
        """A captured graph holds the operator; planning looks up its rule."""

        class Peaks(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table = torch.nn.Parameter(torch.randn(6, 8))

            def forward(self, rows: Tensor) -> Tensor:
                return shifted_peak(self.table, rows, None)[1].sum()

        shifted_peak.register_fake(
            lambda table, rows, shift: (
                table.new_empty(len(rows), table.shape[1]),
                table.new_empty(len(rows)),
                rows.new_empty(len(rows)),
            )
        )
        inputs = {"rows": torch.randint(6, (4,))}
        program = capture(Peaks(), inputs)
        mesh, options = Mesh((1, 2)), Options.of(manual=Manual(dp=2))
        with pytest.raises(MissingRuleError, match="shifted_peak"):
            plan_program(program, mesh, inputs, options)
        register_rule(shifted_peak, PEAK_RULE)
        chosen = plan_program(program, mesh, inputs, options)
        (operator,) = [
            spec for key, spec in chosen.data.stages[0].operators.items() if "peak" in key
        ]
        assert operator == "R I, S(0) I -> S(0) I, S(0) I, S(0) I"


def test_flops_count_leading_dims_and_ignore_names_that_are_not_there() -> None:
    rule = rule_for("aten.linear.default")
    assert rule.flops_of({"_0": 2, "_1": 3, "i": 5, "o": 7}) == 2 * 2 * 3 * 5 * 7
    attention = rule_for("aten.scaled_dot_product_attention.default")
    assert attention.flops_of({"_0": 2, "s": 3, "t": 5, "e": 7}) == 4 * 2 * 3 * 5 * 7
    assert rule_for("aten.einsum.default").flops_of({"_a": 2, "_b": 3, "_c": 5}) == 60
    assert rule_for("aten.relu.default").flops_of({"d0": 8}) == 0


def test_sizes_of_collectives_inside_are_found_together_as_apart() -> None:
    lowered = {low for rule in all_rules() for low in rule.lower.values() if low.inner}
    sizes = {name: np.array([3, 640, 4097]) for name in ("n", "i", "o", "e", "c", "_0")}
    assert lowered
    for low in lowered:
        for inner in low.inner:
            of_all = low.values(inner.size_bytes, sizes, 2, np.array([2, 4, 8]))
            of_each = [
                low.value(inner.size_bytes, {name: int(of[k]) for name, of in sizes.items()}, 2, n)
                for k, n in enumerate((2, 4, 8))
            ]
            assert of_all.tolist() == of_each


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
    (OptionError, lambda: register_rule(torch.nn.ReLU(), "b -> b")),
    (OptionError, lambda: register_rule("aten::scatter", "b -> b")),
    (OptionError, lambda: register_rule(aten.index_fill, "b -> b")),
    (OptionError, lambda: register_rule(scaled_rows, "b h, b -> b h", flops="2*b*g")),
    (OptionError, lambda: register_rule(scaled_rows, "b h, b -> b h", flops="2*b*")),
    (NotSupportedError, lambda: register_rule("aten::relu_", "b -> b")),
    (NotSupportedError, lambda: register_rule("aten::poisson", "b -> b")),
    (NotationError, lambda: register_rule(scaled_rows, "b h -> b h")),
    (NotationError, lambda: register_rule(scaled_rows, "b h, b -> b h, b")),
    (NotationError, lambda: register_rule(shifted_peak, "v h, b, h, h -> b h, b, b")),
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
