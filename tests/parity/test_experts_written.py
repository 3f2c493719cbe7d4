"""Experts as users write them, in Megatron's recipes: `Manual(ep=, etp=)` against one process."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import autopar
from autopar import Manual
from tests.helpers.jobs import machine
from tests.helpers.models.expert_models import (
    MIXTURES,
    N_TOKENS,
    WIDTH,
    Biased,
    Deep,
    Halves,
    Loop,
    Mixture,
)
from tests.helpers.nightly import nightly

RECIPES = (
    Manual(dp=2, ep=2),
    Manual(dp=4, ep=4, zero=3),
    Manual(dp=4, ep=2, zero=1),
    Manual(dp=2, ep=2, tp=2, zero=1),
    Manual(tp=2, ep=2, etp=1),
    Manual(dp=2, ep=4, tp=2, etp=1, zero=3, sp=True),
    Manual(pp=2, dp=2, ep=2),
)


def check_recipe(mixture: type[Mixture], manual: Manual) -> None:
    """A step is that of one process. Each mixture has one exchange there and one back, both ways,
    where ranks have rows of their own."""
    torch.manual_seed(0)
    model = Deep(mixture, 2) if manual.pp > 1 else mixture()
    report = autopar.verify(
        model, machine((1, manual.n_ranks)), (torch.randn(N_TOKENS, WIDTH),), precision="fp64",
        microbatches=1, manual=manual,
    )  # fmt: skip
    assert report.ok and report.tolerance <= 1e-10, report.text()
    counts = Counter[str]()
    for call in report.plan.collectives():
        if "autopar.expert" in call.tensor:
            counts[f"{call.kind} {call.phase}"] += call.count
    n, exchanges = manual.pp, manual.expert_axes != ("tp",)
    of_rows = {"all_gather forward": n, "all_to_all forward": 2 * n, "all_to_all backward": 2 * n}
    if mixture is Biased:  # the bias of the results is added behind, perhaps elsewhere
        assert all(counts[kind] >= least for kind, least in of_rows.items() if exchanges)
    else:
        assert counts == (of_rows if exchanges else {})


@nightly
@pytest.mark.parametrize("manual", RECIPES, ids=str)
@pytest.mark.parametrize("mixture", MIXTURES)
def test_a_step_is_that_of_one_process(mixture: type[Mixture], manual: Manual) -> None:
    check_recipe(mixture, manual)


def test_experts_are_exchanged() -> None:
    check_recipe(Halves, Manual(dp=2, ep=2))


@nightly
def test_three_matrices_are_divided_by_features_and_by_experts_in_a_search() -> None:
    """All placements that the search may take are those of two matrices."""
    for mixture in (Loop, MIXTURES[0]):
        report = autopar.verify(
            mixture(), machine((1, 4)), (torch.randn(N_TOKENS, WIDTH),), precision="fp64",
            forbid=("data", "zero1", "zero2", "zero3"),
        )  # fmt: skip
        assert report.ok and report.tolerance <= 1e-10, report.text()
