"""Every family of rules on random shapes and arguments: shards against the whole.

`AUTOPAR_EXAMPLES=N` draws N new calls of every family and checks every placement of each.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.oracle import MESHES, OracleCase, check_strategy, combinations
from autopar.rules import find_operator, rule_for
from tests.helpers.nightly import one_in
from tests.helpers.samples.drawn_calls import FAMILIES as GENERAL
from tests.helpers.samples.drawn_calls import Call
from tests.helpers.samples.drawn_place_calls import FAMILIES as PLACES
from tests.helpers.samples.drawn_product_calls import FAMILIES as PRODUCTS
from tests.helpers.samples.drawn_view_calls import FAMILIES as VIEWS
from tests.helpers.samples.drawn_vision_calls import FAMILIES as VISION

FAMILIES = {**GENERAL, **VIEWS, **PRODUCTS, **PLACES, **VISION}
EXTRA = os.environ.get("AUTOPAR_EXAMPLES")
N_EXAMPLES = int(EXTRA) if EXTRA else 30
N_PLACEMENTS = 3


def case_of(drawn: Call, refine: bool) -> OracleCase:
    op, (args, kwargs) = drawn
    return OracleCase.of(rule_for(op), find_operator(op), args, kwargs, refine=refine)


@one_in(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str) -> None:
    @settings(
        max_examples=N_EXAMPLES,
        derandomize=not EXTRA,
        database=None,
        suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
    )
    @given(FAMILIES[family], st.booleans(), st.sampled_from(MESHES), st.data())
    def check(drawn: Call, refine: bool, sizes: tuple[int, ...], data: st.DataObject) -> None:
        case = case_of(drawn, refine)
        legal = list(combinations(case, sizes))
        if not EXTRA:
            legal = [data.draw(st.sampled_from(legal)) for _ in range(N_PLACEMENTS)]
        for strategies in legal:
            check_strategy(case, strategies, sizes)

    check()
