"""The solver's bytes against simulated peaks: what the loss needs, gradients, shared storages."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from autopar.options import Options
from autopar.passes.analysis import Analysis
from autopar.passes.search import Proposal
from tests.helpers.captures import captured
from tests.helpers.every_plan import Choices
from tests.helpers.machines import cluster
from tests.helpers.models.wide_models import meta_tokens, wide_gpt2, wide_llama
from tests.helpers.nightly import one_in

MODELS = {
    "gpt2": lambda: (wide_gpt2(4, 256, 128, 8192), meta_tokens(32, 128)),
    "llama": lambda: (wide_llama(2, 32000), meta_tokens(32, 4096)),
}


@cache
def analysis_of(model: str) -> Analysis:
    return Analysis.of(captured(*MODELS[model]()))


@cache
def choices_of(model: str, m: int) -> Choices:
    options = Options.of(stages=1, recompute="none", microbatches=m)
    return Choices(analysis_of(model), cluster(4), options)


def every_placed(choices: Choices) -> Iterator[Proposal]:
    """The fastest placements on every view, leaner ones, and those that store parameters alike."""
    evaluator = choices.evaluator
    for candidate in choices.candidates():
        least_bytes = evaluator.least_bytes(candidate)
        for words in ((), ("zero3",), ("zero1", "zero2"), ("zero1", "zero2", "zero3")):
            yield evaluator.placed(candidate.restrict(*words), None)
        for factor in (1.0, 1.1):
            yield evaluator.placed(candidate, factor * least_bytes)


@one_in(2)
@pytest.mark.parametrize("m", [1, 8])
@pytest.mark.parametrize("model", MODELS)
def test_bytes_are_near_the_peak(model: str, m: int) -> None:
    """And hardly above it: else plans that fit would be left out."""
    choices, nearest = choices_of(model, m), []
    for placed in every_placed(choices):
        peak_bytes = choices.simulator.simulate_once(placed).peak_bytes
        share = placed.size_bytes / peak_bytes
        assert share < 1.01, (placed.candidate.name, placed.size_bytes, peak_bytes)
        nearest.append(share)
    assert sorted(nearest)[len(nearest) // 2] > 0.95, "those of most placements"


def test_the_neediest_operator_is_the_loss() -> None:
    for model in MODELS:
        analysis = analysis_of(model)
        neediest, tensors = analysis.neediest, analysis.types.tensors
        assert neediest.operator.startswith("cross_entropy_loss")
        (logits,) = (
            tensors[o.inputs[0]] for o in analysis.operators if o.name == neediest.operator
        )
        assert neediest.made_bytes == logits.size_bytes
        assert neediest.total_bytes >= neediest.least_bytes > 0.99 * logits.size_bytes
