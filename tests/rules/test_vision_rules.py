"""Image rules beyond the oracle: FLOPs, what is saved for backward, and planted faults."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
from torch.utils.flop_counter import FlopCounterMode

from autopar.placement import Notation
from autopar.program import name_sizes
from autopar.rules import OpCall, find_operator, rule_for
from autopar.rules.convolutions import CONVOLUTIONS
from autopar.verifier import OracleCase, report_case
from tests.helpers.samples.rule_samples import Sample, call, x
from tests.helpers.samples.vision_samples import CONV_1D, CONV_2D, TRANSPOSED_2D, VISION_SAMPLES
from tests.helpers.saved import really_saved, saved_of


@pytest.mark.parametrize("op", [rule.op for rule in CONVOLUTIONS])
def test_flops_are_those_that_torch_counts(op: str) -> None:
    rule, operator = rule_for(op), find_operator(op)
    for args, kwargs in VISION_SAMPLES[op]:
        with FlopCounterMode(display=False) as counter:
            result = operator(*args, **kwargs)
        call = OpCall.of(operator, args, kwargs, result)
        sizes = name_sizes(rule.notation_of(call), call.inputs, call.outputs)
        assert rule.flops_of(sizes) == counter.get_total_flops()


@pytest.mark.parametrize("op", VISION_SAMPLES)
def test_what_is_kept_is_what_autograd_keeps(op: str) -> None:
    for args, kwargs in VISION_SAMPLES[op]:
        operator = find_operator(op)
        assert saved_of(operator, *args, **kwargs) == really_saved(operator, *args, **kwargs)


def _kernel_summed(call: OpCall) -> Notation:
    notation = rule_for(str(call.op)).notation_of(call)
    return dataclasses.replace(notation, frozen=notation.frozen - {"_k0"})


def _overlapping(call: OpCall) -> Notation:
    return Notation.parse("b i y _k, o i k! _l! -> b o y _k")


PLANTED: Mapping[str, tuple[str, Sample, dict[str, Any]]] = {
    "groups of a convolution not localised": (
        "aten.conv1d.default",
        CONV_1D[1],
        {"localise": None},
    ),
    "groups of a transposed convolution not localised": (
        "aten.conv_transpose2d.input",
        TRANSPOSED_2D[1],
        {"localise": None},
    ),
    "a kernel sharded": (
        "aten.conv2d.default",
        CONV_2D[3],
        {"notation": _kernel_summed},
    ),
    "overlapping windows sharded": (
        "aten.conv2d.default",
        call(CONV_2D[4][0][0], x(4, 4, 3, 3), None, [1], [1]),
        {"notation": _overlapping},
    ),
    "groups of a norm not localised": (
        "aten.group_norm.default",
        VISION_SAMPLES["aten.group_norm.default"][0],
        {"localise": None},
    ),
    "a batch with statistics of its own sharded": (
        "aten.batch_norm.default",
        VISION_SAMPLES["aten.batch_norm.default"][3],
        {"notation": "b c s! -> b c s"},
    ),
    "a maximum taken for linear": (
        "aten.max_pool2d.default",
        VISION_SAMPLES["aten.max_pool2d.default"][0],
        {"linear": ((0,),)},
    ),
    "places of maxima in sharded rows": (
        "aten.max_pool2d_with_indices.default",
        VISION_SAMPLES["aten.max_pool2d_with_indices.default"][1],
        {"notation": "b c (h k!) (w l!) -> b c h w, b c h w"},
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_is_noticed(fault: str) -> None:
    op, (args, kwargs), changes = PLANTED[fault]
    rules = rule_for(op), dataclasses.replace(rule_for(op), **changes)
    cases = [OracleCase.of(rule, find_operator(op), args, kwargs) for rule in rules]
    assert [report_case(case, [(2,)]).ok for case in cases] == [True, False]
