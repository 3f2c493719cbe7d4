"""Collective times: the compiled table against the symbols, and the laws planning relies on."""

from __future__ import annotations

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost import formulas
from autopar.cost.collectives import cheapest_algorithm, collective_time_s, explain
from autopar.cost.formulas import FORMULAS, KINDS, algorithms, formula
from autopar.errors import OptionError
from autopar.mesh import Link

links = st.builds(
    Link,
    latency_s=st.floats(0, 1e-2, allow_subnormal=False),
    s_per_byte=st.floats(1e-13, 1e-6),
)
sizes_bytes = st.integers(0, 2**40)
ranks = st.integers(2, 1024)
kinds = st.sampled_from(KINDS)
LINK = Link(latency_s=3e-6, s_per_byte=2e-11)


def symbolic_time_s(kind: str, algorithm: str, size_bytes: int, n_ranks: int) -> float:
    values = (n_ranks, sympy.ceiling(sympy.log(n_ranks, 2)), size_bytes, 3e-6, 2e-11, 0)
    pairs = dict(zip(formulas.SYMBOLS, values, strict=True))
    return float(formula(kind, algorithm).subs(pairs))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_ranks", [2, 3, 4, 6, 8, 24])
def test_time_is_the_least_of_the_symbolic_formulas(kind: str, n_ranks: int) -> None:
    for size_bytes in (0, 1000, 10**6, 10**10):
        times = [
            symbolic_time_s(kind, name, size_bytes, n_ranks) for name in algorithms(kind, n_ranks)
        ]
        assert collective_time_s(kind, size_bytes, n_ranks, LINK) == pytest.approx(
            min(times), rel=1e-12
        )


@pytest.mark.parametrize(
    ("kind", "n_ranks", "expected_s"),
    [
        ("all_reduce", 3, 4 * 3e-6 + 2 * 2 / 3 * 6e6 * 2e-11),
        ("all_gather", 3, 2 * 3e-6 + 2 / 3 * 6e6 * 2e-11),
        ("reduce_scatter", 3, 2 * 3e-6 + 2 / 3 * 6e6 * 2e-11),
        ("all_to_all", 3, 2 * 3e-6 + 2 / 3 * 6e6 * 2e-11),
        ("all_reduce", 8, 2 * 3 * 3e-6 + 2 * 7 / 8 * 6e6 * 2e-11),
        ("all_gather", 8, 3 * 3e-6 + 7 / 8 * 6e6 * 2e-11),
        ("all_to_all", 8, 7 * 3e-6 + 7 / 8 * 6e6 * 2e-11),
        ("scatter", 5, 3 * 3e-6 + 4 / 5 * 6e6 * 2e-11),
        ("gather", 5, 3 * 3e-6 + 4 / 5 * 6e6 * 2e-11),
        ("broadcast", 2, 3e-6 + 6e6 * 2e-11),
        ("send_recv", 2, 3e-6 + 6e6 * 2e-11),
    ],
)
def test_times_worked_out_by_hand(kind: str, n_ranks: int, expected_s: float) -> None:
    assert collective_time_s(kind, 6e6, n_ranks, LINK) == pytest.approx(expected_s, rel=1e-12)


@given(size_bytes=sizes_bytes, n_ranks=ranks, link=links)
def test_all_reduce_is_reduce_scatter_then_all_gather(
    size_bytes: int, n_ranks: int, link: Link
) -> None:
    whole = collective_time_s("all_reduce", size_bytes, n_ranks, link)
    halves = collective_time_s("reduce_scatter", size_bytes, n_ranks, link) + collective_time_s(
        "all_gather", size_bytes, n_ranks, link
    )
    assert whole == pytest.approx(halves, rel=1e-12, abs=0.0)


@pytest.mark.parametrize(
    ("all_reduce", "reduce_scatter", "all_gather"),
    [("ring", "ring", "ring"), ("halving_doubling", "recursive_halving", "recursive_doubling")],
)
def test_the_identity_is_symbolic(all_reduce: str, reduce_scatter: str, all_gather: str) -> None:
    halves = formula("reduce_scatter", reduce_scatter) + formula("all_gather", all_gather)
    assert sympy.simplify(formula("all_reduce", all_reduce) - halves) == 0


@given(kind=kinds, size_bytes=sizes_bytes, more=sizes_bytes, n_ranks=ranks, link=links)
def test_time_grows_with_bytes(
    kind: str, size_bytes: int, more: int, n_ranks: int, link: Link
) -> None:
    less_s = collective_time_s(kind, size_bytes, n_ranks, link)
    assert less_s <= collective_time_s(kind, size_bytes + more, n_ranks, link) * (1 + 1e-12)


@given(
    kind=kinds,
    size_bytes=st.integers(1, 2**40),
    n_ranks=ranks,
    link=links,
    faster=st.floats(1, 1e3),
)
def test_time_falls_with_bandwidth(
    kind: str, size_bytes: int, n_ranks: int, link: Link, faster: float
) -> None:
    quick = Link(link.latency_s, link.s_per_byte / faster)
    quick_s = collective_time_s(kind, size_bytes, n_ranks, quick)
    slow_s = collective_time_s(kind, size_bytes, n_ranks, link)
    assert quick_s <= slow_s * (1 + 1e-12)
    assert slow_s <= quick_s * faster * (1 + 1e-12)


@given(kind=kinds, size_bytes=st.integers(1, 2**40), n_ranks=ranks, s_per_byte=st.floats(1e-13, 1))
def test_time_without_latency_is_inverse_in_bandwidth(
    kind: str, size_bytes: int, n_ranks: int, s_per_byte: float
) -> None:
    one_s = collective_time_s(kind, size_bytes, n_ranks, Link(0.0, s_per_byte))
    two_s = collective_time_s(kind, size_bytes, n_ranks, Link(0.0, 2 * s_per_byte))
    assert two_s == pytest.approx(2 * one_s, rel=1e-12)


@given(size_bytes=sizes_bytes, n_ranks=ranks, link=links)
def test_all_to_all_is_no_dearer_than_gathering_everything(
    size_bytes: int, n_ranks: int, link: Link
) -> None:
    swap_s = collective_time_s("all_to_all", size_bytes, n_ranks, link)
    gather_s = collective_time_s("all_gather", size_bytes * n_ranks, n_ranks, link)
    assert swap_s <= gather_s * (1 + 1e-12)


@given(kind=kinds, size_bytes=sizes_bytes, link=links)
def test_one_rank_costs_nothing(kind: str, size_bytes: int, link: Link) -> None:
    assert collective_time_s(kind, size_bytes, 1, link) == 0.0


def test_summing_costs_gamma_where_something_is_summed() -> None:
    for kind, share in (("all_reduce", 2 / 3), ("reduce_scatter", 2 / 3), ("all_gather", 0.0)):
        free_s = collective_time_s(kind, 10**6, 3, LINK)
        summed_s = collective_time_s(kind, 10**6, 3, LINK, gamma_s_per_byte=1e-9)
        assert summed_s - free_s == pytest.approx(share * 1e-3, rel=1e-9, abs=1e-18)


def test_powers_of_two_get_the_logarithmic_algorithms() -> None:
    assert algorithms("all_reduce", 6) == ("ring",)
    assert algorithms("all_reduce", 8) == ("ring", "halving_doubling")
    assert cheapest_algorithm("all_reduce", 1024, 8, LINK) == "halving_doubling"
    assert cheapest_algorithm("all_to_all", 8, 8, LINK) == "bruck"
    assert cheapest_algorithm("all_to_all", 1e9, 8, LINK) == "pairwise"


def test_every_collective_has_formulas_and_every_formula_a_source() -> None:
    assert {kind for kind, _ in FORMULAS} == set(KINDS)
    assert all(entry.source for entry in FORMULAS.values())
    assert all(algorithms(kind, n_ranks) for kind in KINDS for n_ranks in (1, 2, 3, 7, 8))


def test_explain_shows_formulas_sources_times_and_what_is_left_out() -> None:
    text = explain("all_reduce", 6, 10**6, LINK)
    assert text.startswith("all_reduce over 6 ranks: the least of ring\n")
    assert "ring: alpha*(2*p - 2) + 2*beta*n*(p - 1)/p + gamma*n*(p - 1)/p = 63.3 µs" in text
    assert "not in the minimum: 6 is not a power of two" in text
    assert "not in the minimum: it is no reduce_scatter followed by an all_gather" in text
    assert "Thakur" in text
    assert "Träff" in text


def test_unknown_names_are_refused() -> None:
    with pytest.raises(OptionError, match="unknown collective 'all_sum'"):
        collective_time_s("all_sum", 1, 1, LINK)
    with pytest.raises(OptionError, match="no algorithm 'tree'\n  hint: it has ring, halving"):
        formula("all_reduce", "tree")
