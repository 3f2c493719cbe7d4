"""Every rule, every strategy, every sample call: shards against the whole, gradients too."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from autopar.errors import MissingRuleError, VerificationError
from autopar.oracle import OracleCase, check_rule, check_strategy, combinations, report_case
from autopar.placement import I, Notation, P, R, S
from autopar.program.graph import name_sizes
from autopar.rules import AxisStrategy, OpCall, OpRule, all_rules, find_operator, has_rule, rule_for
from autopar.rules.convolutions import CONVOLUTIONS
from autopar.rules.lowering import VOCABULARY_CROSS_ENTROPY
from tests.helpers.nightly import one_in
from tests.helpers.samples.every_sample import SAMPLES
from tests.helpers.samples.rule_samples import Sample, bools, call, ints, x
from tests.helpers.samples.vision_samples import CONV_1D, CONV_2D, TRANSPOSED_2D, VISION_SAMPLES
from tests.helpers.saved import really_saved, saved_of

RULES = {rule.op: rule for rule in all_rules() if rule.op.startswith("aten.")}


def case_of(op: str, sample: Sample, refine: bool = False, **changes: Any) -> OracleCase:
    """A sample under the operator's own rule, with `changes` if there are any."""
    rule = dataclasses.replace(rule_for(op), **changes)
    return OracleCase.of(rule, find_operator(op), *sample, refine=refine)


def test_every_rule_has_a_sample_and_every_sample_a_rule() -> None:
    assert set(RULES) <= set(SAMPLES)
    assert all(samples and has_rule(op) for op, samples in SAMPLES.items())


@pytest.mark.parametrize("op", SAMPLES)
def test_rule(op: str) -> None:
    for sample in SAMPLES[op]:
        case = case_of(op, sample)
        for sizes in ((2,), (2, 2)):
            for strategies in combinations(case, sizes):
                check_strategy(case, strategies, sizes)


@one_in(4)
@pytest.mark.parametrize("op", SAMPLES)
def test_rule_on_strided_shards(op: str) -> None:
    """Every factor is split in two. Two axes are checked only where they share a dim."""
    for sample in SAMPLES[op]:
        case = case_of(op, sample, refine=True)
        for strategies in combinations(case, (2,)):
            check_strategy(case, strategies, (2,))
        for strategies in combinations(case, (2, 2)):
            if share_a_dim(case, strategies):
                check_strategy(case, strategies, (2, 2))


@pytest.mark.parametrize("op", [rule.op for rule in CONVOLUTIONS])
def test_flops_are_those_that_torch_counts(op: str) -> None:
    rule, operator = rule_for(op), find_operator(op)
    for args, kwargs in VISION_SAMPLES[op]:
        with FlopCounterMode(display=False) as counter:
            result = operator(*args, **kwargs)
        of = OpCall.of(operator, args, kwargs, result)
        sizes = name_sizes(rule.notation_of(of), of.inputs, of.outputs)
        assert rule.flops_of(sizes) == counter.get_total_flops()


# Without those whose shapes depend on data, which no fake run knows.
@one_in(2)
@pytest.mark.parametrize(
    "op", [op for op in SAMPLES if "bincount" not in op and op != "aten.repeat_interleave.Tensor"]
)
def test_what_is_kept_is_what_autograd_keeps(op: str) -> None:
    for args, kwargs in SAMPLES[op]:
        operator = find_operator(op)
        assert saved_of(operator, *args, **kwargs) == really_saved(operator, *args, **kwargs)


def share_a_dim(case: OracleCase, strategies: Sequence[AxisStrategy]) -> bool:
    inputs, outputs = case.specs(strategies)
    sharded = [[p.dim for p in spec.placements if p.is_shard] for spec in (*inputs, *outputs)]
    return any(len(set(dims)) < len(dims) for dims in sharded)


def test_a_strategy_of_two_axes_on_one_factor_is_among_them() -> None:
    case = case_of("aten.relu.default", call(x(4, 8)))
    specs = {str(case.specs(pair)[0][0]) for pair in combinations(case, (2, 2))}
    assert {"S(0) S(0)", "S(1) S(0)", "I R"} <= specs


def faults(op: str, sample: Sample, **changes: Any) -> list[str]:
    """What the oracle finds wrong on 2 ranks if the rule has `changes`."""
    report = report_case(case_of(op, sample, **changes), [(2,)])
    return [line.failure for line in report.lines if line.failure is not None]


def _kernel_summed(call: OpCall) -> Notation:
    notation = rule_for(str(call.op)).notation_of(call)
    return dataclasses.replace(notation, frozen=notation.frozen - {"_k0"})


def _overlapping(call: OpCall) -> Notation:
    return Notation.parse("b i y _k, o i k! _l! -> b o y _k")


PLANTED: Mapping[str, tuple[str, Sample, dict[str, Any], str]] = {
    "groups of a convolution not localised": (
        "aten.conv1d.default", CONV_1D[1], {"localise": None}, "Given groups=4",
    ),
    "groups of a transposed convolution not localised": (
        "aten.conv_transpose2d.input", TRANSPOSED_2D[1], {"localise": None},
        "outputs have shapes (2, 8, 4, 4)",
    ),
    "a kernel sharded": (
        "aten.conv2d.default", CONV_2D[3], {"notation": _kernel_summed},
        "outputs have shapes (2, 4, 2, 2)",
    ),
    "overlapping windows sharded": (
        "aten.conv2d.default", call(CONV_2D[4][0][0], x(4, 4, 3, 3), None, [1], [1]),
        {"notation": _overlapping}, "output 0 under S(2)",
    ),
    "groups of a norm not localised": (
        "aten.group_norm.default", VISION_SAMPLES["aten.group_norm.default"][0], {"localise": None},
        "output 0 under S(1)",
    ),
    "a batch with statistics of its own sharded": (
        "aten.batch_norm.default", VISION_SAMPLES["aten.batch_norm.default"][3],
        {"notation": "b c s! -> b c s"}, "output 0 under S(0)",
    ),
    "a maximum taken for linear": (
        "aten.max_pool2d.default", VISION_SAMPLES["aten.max_pool2d.default"][0],
        {"linear": ((0,),)}, "output 0 under P",
    ),
    "places of maxima in sharded rows": (
        "aten.max_pool2d_with_indices.default",
        VISION_SAMPLES["aten.max_pool2d_with_indices.default"][1],
        {"notation": "b c (h k!) (w l!) -> b c h w, b c h w"}, "output 1 under S(2)",
    ),
    "softmax over a sharded dim": (
        "aten.softmax.int", call(x(4, 8), -1), {"notation": "... d -> ... d"},
        "output 0 under S(1)",
    ),
    "mul linear in both inputs at once": (
        "aten.mul.Tensor", call(x(4, 8), x(8)), {"linear": ((0, 1),)}, "output 0 under P",
    ),
    "a scalar added once per rank": (
        "aten.add.Tensor", call(x(4, 8), 3), {"linear": ((0,),)}, "output 0 under P",
    ),
    "relu linear": ("aten.relu.default", call(x(4, 8)), {"linear": ((0,),)}, "output 0 under P"),
    "a mean over a sharded dim": (
        "aten.mean.dim", call(x(4, 8), [1]), {"notation": "a b -> a"}, "output 0 under P",
    ),
    "a maximum over a sharded dim": (
        "aten.amax.default", call(x(4, 8), [1]), {"notation": "a b -> a"}, "output 0 under P",
    ),
    "a normalised dim sharded": (
        "aten.layer_norm.default", call(x(4, 8), [8], x(8), x(8)), {"notation": "a b, b, b -> a b"},
        "normalized_shape",
    ),
    "a vocabulary without its lowering": (
        "aten.embedding.default", call(x(8, 4), torch.tensor([0, 5])), {"lower": {}},
        "index out of range",
    ),
    "classes without their lowering": (
        "aten.cross_entropy_loss.default", call(x(4, 8), ints(8, 4), None, 2), {"lower": {}},
        "out of bounds",
    ),
    "a loss that is summed twice": (
        "aten.cross_entropy_loss.default", call(x(4, 8), ints(8, 4), None, 2),
        {"lower": {"v": dataclasses.replace(VOCABULARY_CROSS_ENTROPY, outputs=("P",))}},
        "output 0 under P",
    ),
    "keys of attention sharded": (
        "aten.scaled_dot_product_attention.default",
        call(x(2, 2, 4, 2), x(2, 2, 4, 2), x(2, 2, 4, 2)),
        {"notation": "b h s e!, b h t e, b h t f -> b h s f", "paired": ()}, "output 0 under P",
    ),
    "a causal mask on a sharded query": (
        "aten.scaled_dot_product_attention.default",
        call(x(2, 2, 4, 2), x(2, 2, 4, 2), x(2, 2, 4, 2), is_causal=True),
        {"notation": "b h s e!, b h t! e, b h t f! -> b h s f"}, "output 0 under S(2)",
    ),
    "sizes of a view not localised": (
        "aten.view.default", call(x(4, 8), [4, 2, 4]), {"localise": None},
        "invalid for input of size",
    ),
    "a slice of a sharded dim not localised": (
        "aten.slice.Tensor", call(x(4, 8), 1, 4, 8), {"localise": None},
        "outputs have shapes (4, 0), S(1) means (4, 2)",
    ),
    "a fused projection split as one factor": (
        "aten.split.Tensor", call(x(4, 12), 4, 1), {"notation": "b d -> b e, b e, b e"},
        "outputs have shapes (4, 4), (4, 2), P, P, P means (4, 4), (4, 4), (4, 4)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_is_noticed(fault: str) -> None:
    op, sample, changes, message = PLANTED[fault]
    assert faults(op, sample) == []
    found = faults(op, sample, **changes)
    assert any(message in failure for failure in found), found


NORM = call(x(4, 8), [8], x(8), x(8))
MISPLACED: Mapping[str, tuple[str, Sample, AxisStrategy, str]] = {
    # The loss would be right; only the gradient is wrong.
    "a scale left I under sharded activations": (
        "aten.layer_norm.default", NORM, AxisStrategy((S(0), I, I), (S(0),)),
        "gradient of input 1 under I is wrong .*; ranks differ",
    ),
    "a product's sum that claims to be complete": (
        "aten.mm.default", call(x(4, 8), x(8, 4)), AxisStrategy((S(1), S(0)), (R,)),
        "output 0 under R",
    ),
    "a product's sum that claims an invariant output": (
        "aten.mm.default", call(x(4, 8), x(8, 4)), AxisStrategy((S(1), S(0)), (I,)),
        "output 0 under I",
    ),
    "I and R in one operator": (
        "aten.mul.Tensor", call(x(4, 8), x(4, 8)), AxisStrategy((I, R), (R,)),
        "gradient of input 0 under I",
    ),
    "R taken for I": (
        "aten.relu.default", call(x(4, 8)), AxisStrategy((R,), (I,)), "gradient of input 0 under P",
    ),
    "I taken for R": (
        "aten.relu.default", call(x(4, 8)), AxisStrategy((I,), (R,)), "gradient of input 0 under I",
    ),
    "a bias added on every rank of a partial sum": (
        "aten.add.Tensor", call(x(4, 8), x(8)), AxisStrategy((P, R), (P,)), "output 0 under P",
    ),
    "an output that is larger than claimed": (
        "aten.relu.default", call(x(4, 8)), AxisStrategy((R,), (S(0),)),
        r"outputs have shapes \(4, 8\), S\(0\) means \(2, 8\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", MISPLACED)
def test_misplaced_strategy_is_noticed(fault: str) -> None:
    op, sample, strategy, message = MISPLACED[fault]
    with pytest.raises(VerificationError, match=message):
        check_strategy(case_of(op, sample), [strategy], (2,))


def test_the_outer_axis_is_the_first() -> None:
    """If the two axes of an output are taken in the wrong order, its pieces are swapped."""
    case = case_of("aten.relu.default", call(x(4, 8)))
    sharded = AxisStrategy((S(0),), (S(0),), "d0.0")
    check_strategy(case, [sharded, sharded], (2, 2))
    swapped = AxisStrategy((S(0, 1),), (S(0),), "d0.1")
    split = case_of("aten.relu.default", call(x(4, 8)), refine=True)
    first = AxisStrategy((S(0),), (S(0, 1),), "d0.0")
    with pytest.raises(VerificationError, match="output 0 under"):
        check_strategy(split, [swapped, first], (2, 2))


class TestCheckRule:
    def test_report_of_a_rule_that_holds(self) -> None:
        report = check_rule("aten::mm", torch.ones(4, 8), torch.ones(8, 4))
        assert report.ok
        first, *lines = report.text().splitlines()
        assert first == "rule of aten.mm.default holds"
        assert any("2x2  S(1), S(0) -> P | S(0), R -> S(0)" in line for line in lines)
        assert len(lines) == len(report.lines)

    def test_report_of_a_rule_that_is_wrong(self) -> None:
        rule = OpRule("aten.relu.default", "... -> ...", linear=((0,),))
        case = OracleCase.of(rule, find_operator("aten::relu"), (x(4),))
        report = report_case(case, [(2,)])
        assert not report.ok
        assert report.text().splitlines()[0] == "rule of aten.relu.default is WRONG"
        assert "P -> P  WRONG: aten.relu.default: output 0 under P" in report.text()

    def test_inputs_are_lifted_and_options_pass(self) -> None:
        masked = torch.ops.aten.scaled_dot_product_attention
        q = torch.randn(2, 4, 2, dtype=torch.bfloat16)
        assert check_rule(masked, q, q, q, bools(4, 4) | torch.eye(4).bool(), scale=0.5).ok

    def test_an_operator_without_a_rule(self) -> None:
        with pytest.raises(MissingRuleError, match=r"aten\.lu_solve\.default has no sharding rule"):
            check_rule("aten::lu_solve", torch.ones(3, 3), torch.eye(3), torch.arange(1, 4).int())
