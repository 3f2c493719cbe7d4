"""Programs as text: they parse back, passes run on them, and a wrong word is refused by name."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import autopar
from autopar import Manual
from autopar.errors import OptionError, VerificationError
from autopar.passes.compilation import text_of
from autopar.passes.facts import Differentiated, Sources
from autopar.passes.on_text import run_passes
from autopar.program.lines import (
    DEVICE,
    CallLine,
    JointProgram,
    Ref,
    StageProgram,
    parse_programs,
    program_text,
)
from tests.conftest import Golden
from tests.helpers.jobs import machine
from tests.helpers.models.tiny_model import Tiny, batch
from tests.helpers.plans import pipeline_of

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "passes"
LAYOUTS = {
    "tp": ((2, 2), Manual(dp=2, tp=2)), "zero_3": ((1, 2), Manual(dp=2, zero=3)),
    "stages": ((1, 2), Manual(pp=2)),
}  # fmt: skip


def lowered(layout: str) -> str:
    return (GOLDEN / f"{layout}_lowered.txt").read_text()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_golden_pairs(layout: str, golden: Golden) -> None:
    """What `lower` makes of a model; and from that text alone, what is emitted."""
    mesh, manual = LAYOUTS[layout]
    plan = autopar.plan(Tiny(), machine(mesh), batch(), manual=manual)
    short = text_of(pipeline_of(plan)).replace(f"{ROOT}/", "")
    text = "".join(map(program_text, parse_programs(short, StageProgram)))
    golden(f"passes/{layout}_lowered.txt", text)
    made = run_passes(text, ["verify", "differentiate", "emit"])
    golden(f"passes/{layout}_emitted.txt", "".join(made[Sources].files.values()))
    joints = made[Differentiated]
    assert parse_programs(text_of(joints), JointProgram) == list(joints.stages)
    assert run_passes(text_of(joints), ["emit"])[Sources] == made[Sources]


UP_WEIGHT = "Local('up_weight', (8, 8), torch.float32,"
AFTER_LINEAR = (
    "Spec('S(0) {}'), dims=((8,), (4,)), has_grad=True, factor_kinds=(('data',), ('tensor',)), ), "
    "source='linear_1', move=Move('p_to_"
)
# What is written into a golden text in place of something else, and why it is refused.
WRONG: dict[str, tuple[str, str, str, str]] = {
    "no such variable": ("tp", "args=(relu,", "args=(absent,", "absent is read before it is def"),
    "a variable twice": ("tp", "outs=(Local('div'", "outs=(Local('to'", "to is defined twice"),
    "another move": ("tp", "'p_to_i'", "'p_to_r'", "p_to_r is no move from P to I on axis"),
    "another axis": ("tp", "'p_to_i', (1,)", "'p_to_i', (0,)", "axis"),
    "two axes at once": (
        "tp", "_as_II', (), torch.float32, Spec('I I')", "_as_II', (), torch.float32, Spec('I R')",
        r"over axes \(0,\) changes axis 1",
    ),
    "a shape": ("tp", "'relu', (4, 8)", "'relu', (4, 7)", "has local shape"),
    "bytes": ("zero_3", "forward_bytes=512", "forward_bytes=513", "moves .* bytes"),
    "no gradient": (
        "zero_3", "backward_bytes=4, forward_s=6.0, backward_s=0.0, has_grad=True",
        "backward_bytes=0, forward_s=6.0, backward_s=0.0, has_grad=False",
        "has_grad is False",
    ),
    "replicated beside invariant": (
        "tp", f"{AFTER_LINEAR.format('I')}i'", f"{AFTER_LINEAR.format('R')}r'",
        "is I and .* on axis",
    ),
    **{f"a parameter stored {placement}": (
        "tp", "'down_bias', (4,), torch.float32, Spec('I I')",
        f"'down_bias', (4,), torch.float32, Spec('{placement} I')", "only I and S can be",
    ) for placement in "PR"},
    "a use that is not what moves lead to": (
        "tp", f"ParameterUse({UP_WEIGHT} Spec('R", f"ParameterUse({UP_WEIGHT} Spec('I", "lead to",
    ),
    "a gather of what is not there": (
        "zero_3", "'up_weight', 'up.weight',", "'up_weight', 'other',", "is not gathered for each",
    ),
    "a gather that gathers less": (
        "zero_3", "'up_weight_gathered', (16, 8), torch.float32, Spec('R I')",
        "'up_weight_gathered', (8, 8), torch.float32, Spec('S(0) I')", "lead to",
    ),
    "a partial loss": ("zero_3", "loss='div'", "loss='cross_entropy_loss'", "ends P on axis dp"),
    "a value that no stage sends": (
        "stages", "'add', 'up/add.Tensor#0'", "'other', 'up/add.Tensor#0'", "no earlier stage",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_word_is_refused(what: str) -> None:
    layout, right, wrong, reason = WRONG[what]
    text = " ".join(lowered(layout).split()).replace("( ", "(").replace(") Stage", "); Stage")
    assert right in text
    with pytest.raises(VerificationError, match=reason) as refused:
        run_passes(text.replace(right, wrong, 1), ["verify"])
    assert what.startswith("a value") or (refused.value.where and refused.value.hint)


# Texts that are no program.
NO_PROGRAM = {
    "def f(): pass": "line 1: this is no StageProgram or JointProgram",
    "StageProgram(": r"line 1: '\(' was never closed",
    "StageProgram(name='x')": "line 1: .* missing .* required",
    "Local('x', (2,), torch.float32, Spec('R'))": "line 1: this is no StageProgram",
    "StageProgram(1, ('dp',), (2,), (), (), (), None, (), 1)": "line 1: `name` of",
    "StageProgram(name=open('x'))": r"line 1: `open\('x'\)` is not part of a program",
    "StageProgram(name=torch.load)": "`torch.load` is not part of a program",
    "": "the text has no program",
}


@pytest.mark.parametrize("text", NO_PROGRAM)
def test_what_is_no_program_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match=NO_PROGRAM[text]):
        run_passes(text, ["verify"])


def test_what_verify_does_not_prove_is_refused_too() -> None:
    text = lowered("tp").replace("(add_1, labels, None, 2,", "(add_1, labels, None, 'two',")
    run_passes(text, ["verify"])
    with pytest.raises(OptionError, match="differentiate fails on this program: RuntimeError"):
        run_passes(text, ["verify", "differentiate"])


def test_passes_that_a_text_does_not_serve() -> None:
    text = lowered("tp")
    with pytest.raises(OptionError, match="emit reads Differentiated, which the text does not"):
        run_passes(text, ["emit"])
    with pytest.raises(OptionError, match="lower reads Placed, PlanData"):
        run_passes(text, ["lower", "verify"])
    with pytest.raises(OptionError, match="no pass is called polish"):
        run_passes(text, ["verify", "polish"])


def test_values_of_every_kind_parse_back() -> None:
    """As arguments of an operator: they need not fit it."""
    (program,) = parse_programs(lowered("tp"), StageProgram)
    at = next(i for i, line in enumerate(program.body) if isinstance(line, CallLine))
    call = program.body[at]
    assert isinstance(call, CallLine)
    kwargs = {
        "numbers": (-1, 2.5, -0.0, math.inf, -math.inf, 1e-300, 2 - 1j, True, None),
        "words": ["a'b", "\n", "ü"], "nothing": ((), [], {}),
        "torch": (torch.int8, torch.strided, torch.channels_last, torch.device("cpu")),
        "variables": [Ref("x"), (DEVICE, Ref("y_1"))],
    }  # fmt: skip
    body = (*program.body[:at], replace(call, kwargs=kwargs), *program.body[at + 1 :])
    changed = replace(program, body=body)
    assert parse_programs(program_text(changed) * 2, StageProgram) == [changed, changed]
    assert repr(parse_programs(program_text(changed), StageProgram)[0]) == repr(changed)
