"""A generated text that reads what has no value is refused before it runs."""

from __future__ import annotations

import pytest

from autopar.codegen.defined import check_defined
from autopar.errors import VerificationError

TEXT = """
import torch
aten_add = torch.ops.aten.add.Tensor

def blocks_forward(i, carried, env):
    x, = carried; carried.clear()
    with env.phase("forward"):
        y = aten_add(x, x); del x
    return [y]

def forward(parameters, delivered, env):
    (x,) = delivered
    saved = {}
    carried = [x]; del x
    for i in range(3):
        carried = blocks_forward(i, carried, env)
        saved[i] = [t for t in carried]
    y, = carried; del carried
    return y, saved
"""
# What is changed -> the name that has no value then.
FAULTS = {
    ("    (x,) = delivered\n", ""): "x",
    ("    y, = carried; del carried\n", ""): "y",
    ("return [y]", "return [y, x]"): "x",
    ("saved[i] = [t for t in carried]", "saved[i] = carried; del saved"): "saved",
    ("aten_add = torch.ops", "aten_sum = torch.ops"): "aten_add",
    ("carried.clear()", "del carried, z"): "z",
}


def test_a_text_whose_names_have_values() -> None:
    check_defined(TEXT)


@pytest.mark.parametrize("change", FAULTS)
def test_a_name_without_a_value(change: tuple[str, str]) -> None:
    old, new = change
    assert old in TEXT
    with pytest.raises(VerificationError, match=f"^{FAULTS[change]} has no value"):
        check_defined(TEXT.replace(old, new))
