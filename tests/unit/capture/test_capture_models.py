"""Captured programs against eager: whole models, losses, outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.rules import has_rule
from tests.helpers.capture_harness import check, dtypes_of_floats, targets
from tests.helpers.harness import random_tokens, tiny_gpt2, tiny_llama
from tests.helpers.models.sequence_models import packed, padded, tiny_bert, with_types
from tests.helpers.nightly import nightly, sampled

Batch = dict[str, Tensor]


# transformers casts norms or rotary tables to float32 even in a float64 model.
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch], float]] = {
    "gpt2": (tiny_gpt2, padded, 2e-6),
    "gpt2, types": (tiny_gpt2, with_types, 2e-6),
    "llama": (tiny_llama, padded, 2e-6),
    "llama, packed": (tiny_llama, packed, 2e-6),
    "bert": (tiny_bert, with_types, 1e-10),
}


def without_cache(model: nn.Module) -> nn.Module:
    """As in capture: with a cache, transformers does not look for packed sequences."""
    config: Any = model.config
    config.use_cache = False
    return model


EVERY = [(case, precision) for case in CASES for precision in ("model", "fp64")]
BY_DAY = [("gpt2, types", "model"), ("llama, packed", "model"), ("llama", "fp64"), ("bert", "fp64")]


@pytest.mark.parametrize(("case", "precision"), sampled(EVERY, BY_DAY))
def test_loss_outputs_and_gradients_are_eagers(case: str, precision: Any) -> None:
    torch.manual_seed(0)
    make, batch, tolerance = CASES[case]
    program = check(without_cache(make()), batch(0), tolerance, precision=precision)
    assert [str(t) for t in targets(program) if not has_rule(str(t))] == []
    if precision == "fp64":
        assert dtypes_of_floats(program) == {torch.float64}


@nightly
def test_models_on_meta_and_in_float64_have_the_same_program() -> None:
    batch = random_tokens(0)
    with torch.device("meta"):
        model = tiny_llama()
    program = capture(model, {k: v.to("meta") for k, v in batch.items()})
    real, high = capture(tiny_llama(), batch), capture(tiny_llama(), batch, precision="fp64")
    assert program.hash() == real.hash()
    assert dict(program.keys) == dict(real.keys)
    assert list(program.keys.values()) == list(high.keys.values())
    assert len(set(program.keys.values())) == len(program.keys)
    assert all(name in program.sources for name in program.keys)
    assert not any(str(v) == "meta" for n in program.graph.nodes for v in n.kwargs.values())
    for name, compute in program.constants.items():  # rotary tables as the model initialises them
        torch.testing.assert_close(compute(), real.constants[name](), rtol=0, atol=0)
