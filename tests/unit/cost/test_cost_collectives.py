"""Collective times: the table against the symbolic formulas, and laws planning relies on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost.hardware import LinkGroup, even_group, flat_group
from autopar.cost.hardware.topology import group_of
from autopar.cost.laws import (
    KINDS,
    LEGEND,
    algorithms,
    bus_bytes_per_s,
    cheapest_algorithm,
    collective_time_s,
    explain,
    formulas,
)
from autopar.cost.laws.formulas import FORMULAS, SYMBOLS, formula
from autopar.errors import OptionError
from autopar.mesh import Link

sizes_bytes = st.integers(0, 2**40)
kinds = st.sampled_from(KINDS)
LINK = Link(latency_s=3e-6, s_per_byte=2e-11)
SWITCHED = Link(latency_s=3e-6, s_per_byte=2e-11, in_switch_s_per_byte=2.4e-11)
ACROSS = Link(latency_s=9e-6, s_per_byte=2e-10)
# One node; nodes with one rank each; with several each; with unequal numbers of ranks.
GROUPS = (
    *(flat_group(n_ranks, SWITCHED) for n_ranks in (2, 3, 4, 6, 8, 24)),
    even_group(6, 1, SWITCHED, ACROSS),
    even_group(24, 8, LINK, ACROSS),
    even_group(24, 8, SWITCHED, ACROSS),
    group_of(range(5), 3, SWITCHED, ACROSS),
)


@st.composite
def placed_links(draw: st.DrawFn, in_switch: bool = True) -> tuple[Link, Link]:
    """A link inside nodes, with or without a summing switch, and one across that is no faster."""
    latency_s = draw(st.floats(0, 1e-2, allow_subnormal=False))
    s_per_byte = draw(st.floats(1e-13, 1e-6))
    switch = draw(st.none() | st.floats(1e-13, 1e-6)) if in_switch else None
    more_s, slower = draw(st.floats(0, 1e-2, allow_subnormal=False)), draw(st.floats(1, 1e3))
    inside = Link(latency_s, s_per_byte, switch)
    return inside, Link(latency_s + more_s, s_per_byte * slower)


@st.composite
def groups(draw: st.DrawFn) -> LinkGroup:
    """Ranks at a stride, from any first rank: nodes may hold unequal numbers of them."""
    ranks_per_node, first = draw(st.integers(1, 16)), draw(st.integers(0, 16))
    stride, n_ranks = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.integers(2, 256))
    members = range(first, first + n_ranks * stride, stride)
    return group_of(members, ranks_per_node, *draw(placed_links()))


def algorithms_of(kind: str, group: LinkGroup) -> list[str]:
    """The algorithms that a group can run."""
    return [one.algorithm for one in explain(kind, group) if not one.left_out]


def symbolic_time_s(kind: str, algorithm: str, size_bytes: int, group: LinkGroup) -> float:
    log2 = (sympy.ceiling(sympy.log(k, 2)) for k in (group.n_ranks, group.n_nodes, group.per_node))
    across = group.inside if group.n_nodes == 1 else group.across
    ports = (across.latency_s, across.s_per_byte, group.inside.latency_s, group.inside.s_per_byte)
    sizes = (group.n_ranks, group.n_nodes, group.per_node)
    values = (size_bytes, *sizes, *log2, *ports, group.inside.in_switch_s_per_byte or 0, 0)
    return float(formula(kind, algorithm).subs(dict(zip(SYMBOLS, values, strict=True))))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", GROUPS, ids=lambda g: f"{g.n_ranks} on {g.n_nodes}")
def test_time_is_the_least_of_the_symbolic_formulas(kind: str, group: LinkGroup) -> None:
    for size_bytes in (0, 1000, 10**6, 10**10):
        times = {
            name: symbolic_time_s(kind, name, size_bytes, group)
            for name in algorithms_of(kind, group)
        }
        found_s = collective_time_s(kind, size_bytes, group)
        assert found_s == pytest.approx(min(times.values()), rel=1e-12)
        chosen = cheapest_algorithm(kind, size_bytes, group)
        assert times[chosen] == pytest.approx(found_s, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "n_ranks", "expected_s"),
    [
        ("all_reduce", 3, 4 * 3e-6 + 2 * 2 / 3 * 6e6 * 2e-11),
        ("all_gather", 3, 2 * 3e-6 + 2 / 3 * 6e6 * 2e-11),
        ("reduce_scatter", 5, 3 * 3e-6 + 4 / 5 * 6e6 * 2e-11),
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
def test_times_in_one_node_worked_out_by_hand(kind: str, n_ranks: int, expected_s: float) -> None:
    found_s = collective_time_s(kind, 6e6, flat_group(n_ranks, LINK))
    assert found_s == pytest.approx(expected_s, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "size_bytes", "expected_s"),
    [
        # Ring: 3 steps to other nodes and 28 inside; 8 ports share 2e-10 s per byte.
        ("all_gather", 10**10, 28 * 3e-6 + 3 * 9e-6 + 31 / 32 * 10**10 * 2.5e-11),
        ("all_reduce", 10**10, 2 * (28 * 3e-6 + 3 * 9e-6 + 31 / 32 * 10**10 * 2.5e-11)),
        # Hierarchical: 3 rounds inside with 7/8 of the bytes, 2 across with 3/4 of an eighth.
        ("all_gather", 10**4, 3 * 3e-6 + 2 * 9e-6 + 7 / 8 * 2e-7 + 3 / 32 * 2e-6),
        # 7 blocks of 1/32 to ranks of the node, 24 to other nodes, through the rank's own port.
        ("all_to_all", 10**9, 7 * 3e-6 + 24 * 9e-6 + 7 / 32 * 2e-2 + 24 / 32 * 2e-1),
        ("send_recv", 10**6, 9e-6 + 2e-4),
    ],
)
def test_times_over_nodes_worked_out_by_hand(kind: str, size_bytes: int, expected_s: float) -> None:
    found_s = collective_time_s(kind, size_bytes, even_group(32, 8, LINK, ACROSS))
    assert found_s == pytest.approx(expected_s, rel=1e-12)


@pytest.mark.parametrize(
    ("n_ranks", "algorithm_bytes_per_s"), [(5, 258e9), (6, 265e9), (7, 270e9), (8, 273e9)]
)
def test_the_switch_sums_as_fast_as_measured(n_ranks: int, algorithm_bytes_per_s: float) -> None:
    """NVIDIA/nccl issue 1455: 8 H100s, 4 GiB, NVLS; a ring has 370 GB/s for any number of ranks."""
    group = flat_group(n_ranks, Link(3.4e-6, 1 / 370e9, 1 / 307e9))
    time_s = collective_time_s("all_reduce", 2**32, group)
    assert cheapest_algorithm("all_reduce", 2**32, group) == "in_switch"
    assert 2**32 / time_s == pytest.approx(algorithm_bytes_per_s, rel=0.01)


@given(size_bytes=sizes_bytes, group=groups())
def test_all_reduce_is_reduce_scatter_then_all_gather(size_bytes: int, group: LinkGroup) -> None:
    whole = collective_time_s("all_reduce", size_bytes, group)
    halves = [collective_time_s(k, size_bytes, group) for k in ("reduce_scatter", "all_gather")]
    if group.in_switch_s_per_byte is None:
        assert whole == pytest.approx(sum(halves), rel=1e-12, abs=0.0)
    else:
        assert whole <= sum(halves) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("kind", "flat"),
    [
        ("all_reduce", "halving_doubling"),
        ("all_gather", "recursive_doubling"),
        ("reduce_scatter", "recursive_halving"),
        ("all_to_all", "pairwise"),
    ],
)
def test_hierarchical_is_flat_in_one_node_and_with_one_rank_in_each(kind: str, flat: str) -> None:
    hierarchical = formula(kind, "hierarchical")
    alike = {formulas.alpha_in: formulas.alpha, formulas.beta_in: formulas.beta}
    expected = formulas.simplify_one_level(formula(kind, flat)).subs(alike)
    one_node = {formulas.N: 1, formulas.L_N: 0, formulas.g: formulas.p, formulas.L_g: formulas.L}
    one_each = {formulas.N: formulas.p, formulas.L_N: formulas.L, formulas.g: 1, formulas.L_g: 0}
    for place in (one_node, one_each):
        assert sympy.simplify(hierarchical.subs(place).subs(alike) - expected) == 0


@given(
    kind=kinds,
    size_bytes=sizes_bytes,
    pair=placed_links(),
    counts=st.tuples(st.integers(1, 16), st.integers(1, 64)),
    more=st.integers(1, 512),
)
def test_time_grows_with_bytes_nodes_and_ranks_of_a_node(
    kind: str, size_bytes: int, pair: tuple[Link, Link], counts: tuple[int, int], more: int
) -> None:
    (per_node, n_nodes), inside = counts, pair[0]
    group = even_group(n_nodes * per_node, per_node, *pair)
    on_more_nodes = even_group((n_nodes + more) * per_node, per_node, *pair)
    least_s = collective_time_s(kind, size_bytes, group)
    assert least_s <= collective_time_s(kind, size_bytes * more, group) * (1 + 1e-12)
    assert least_s <= collective_time_s(kind, size_bytes, on_more_nodes) * (1 + 1e-12)
    if inside.in_switch_s_per_byte is None:  # more ranks are faster with a summing switch
        few, many = flat_group(per_node, inside), flat_group(per_node + more, inside)
        few_s, many_s = (collective_time_s(kind, size_bytes, one) for one in (few, many))
        assert few_s <= many_s * (1 + 1e-12)
    assert collective_time_s(kind, size_bytes, even_group(1, 1, *pair)) == 0.0


@given(kind=kinds, size_bytes=st.integers(1, 2**40), group=groups(), faster=st.floats(1, 1e3))
def test_time_without_latency_is_inverse_in_bandwidth(
    kind: str, size_bytes: int, group: LinkGroup, faster: float
) -> None:
    free = sped_up(group, 1.0, latency=0.0)
    one_s = collective_time_s(kind, size_bytes, sped_up(free, faster))
    assert collective_time_s(kind, size_bytes, free) == pytest.approx(faster * one_s, rel=1e-12)


def sped_up(group: LinkGroup, faster: float, latency: float = 1.0) -> LinkGroup:
    """The same group on links of `faster` times the bandwidth."""

    def quick(link: Link) -> Link:
        switch = link.in_switch_s_per_byte
        summing = None if switch is None else switch / faster
        return Link(link.latency_s * latency, link.s_per_byte / faster, summing)

    links = quick(group.inside), quick(group.across)
    return LinkGroup(group.n_ranks, group.n_nodes, group.per_node, *links)


@given(
    size_bytes=sizes_bytes,
    pair=placed_links(in_switch=False),
    per_node=st.integers(1, 16),
    n_nodes=st.integers(1, 64),
)
def test_all_to_all_is_no_dearer_than_gathering_everything(
    size_bytes: int, pair: tuple[Link, Link], per_node: int, n_nodes: int
) -> None:
    group = even_group(n_nodes * per_node, per_node, *pair)
    swap_s = collective_time_s("all_to_all", size_bytes, group)
    gather_s = collective_time_s("all_gather", size_bytes * group.n_ranks, group)
    assert swap_s <= gather_s * (1 + 1e-12)


def test_summing_costs_gamma_where_something_is_summed() -> None:
    group = flat_group(3, LINK)
    for kind, share in (("all_reduce", 2 / 3), ("reduce_scatter", 2 / 3), ("all_gather", 0.0)):
        free_s = collective_time_s(kind, 10**6, group)
        summed_s = collective_time_s(kind, 10**6, group, gamma_s_per_byte=1e-9)
        assert summed_s - free_s == pytest.approx(share * 1e-3, rel=1e-9, abs=1e-18)


def test_a_group_runs_the_algorithms_of_its_placement() -> None:
    def found(group: LinkGroup) -> str:
        return " ".join(algorithms_of("all_reduce", group))

    assert found(flat_group(8, LINK)) == "ring halving_doubling"
    assert found(flat_group(6, SWITCHED)) == "ring halving_doubling in_switch"
    assert found(even_group(6, 1, SWITCHED, ACROSS)) == "ring halving_doubling"
    assert found(even_group(16, 8, LINK, ACROSS)) == "ring hierarchical"
    assert found(even_group(9, 3, SWITCHED, ACROSS)) == "ring hierarchical hierarchical_in_switch"
    assert found(group_of(range(5), 3, SWITCHED, ACROSS)) == "ring"
    assert cheapest_algorithm("all_reduce", 1024, flat_group(8, LINK)) == "halving_doubling"
    assert cheapest_algorithm("all_to_all", 8, flat_group(8, LINK)) == "bruck"
    assert cheapest_algorithm("all_to_all", 1e9, flat_group(8, LINK)) == "pairwise"


def test_every_collective_has_formulas_and_every_formula_a_source() -> None:
    assert {kind for kind, _ in FORMULAS} == set(KINDS)
    assert all(entry.source for entry in FORMULAS.values())
    assert all(algorithms_of(kind, group) for kind in KINDS for group in GROUPS)
    named = {name.strip() for names in LEGEND for name in names.split(",")}
    assert named == {str(symbol) for symbol in SYMBOLS}


def test_explain_shows_formulas_sources_and_what_is_left_out() -> None:
    rows = {row.algorithm: row for row in explain("all_reduce", flat_group(6, LINK))}
    assert tuple(rows) == algorithms("all_reduce")
    ring = rows["ring"]
    assert ring.formula == "2*alpha*(p - 1) + 2*beta*n*(p - 1)/p + gamma*n*(p - 1)/p"
    assert "Thakur" in ring.source
    assert ring.left_out == ""
    assert rows["in_switch"].left_out == "no switch that sums links these ranks"
    assert rows["hierarchical"].left_out.startswith("it needs several nodes with equally many")
    assert rows["double_tree"].left_out.startswith("it is no reduce_scatter followed by")
    over_nodes = {r.algorithm: r for r in explain("all_gather", even_group(8, 4, LINK, ACROSS))}
    assert "Max(beta_in, beta/g)" in over_nodes["ring"].formula
    assert over_nodes["recursive_doubling"].left_out.startswith("the ranks are linked in two ways")
    assert "alone, it fills one direction" in over_nodes["in_switch"].note


def test_bus_bandwidth_is_that_of_a_link_in_a_ring() -> None:
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        for n_ranks in (2, 5, 8):
            group = flat_group(n_ranks, Link(0.0, 2e-11))
            time_s = collective_time_s(kind, 10**9, group)
            assert bus_bytes_per_s(kind, 10**9, n_ranks, time_s) == pytest.approx(1 / 2e-11)
    assert bus_bytes_per_s("send_recv", 10**9, 2, 0.5) == 2e9


def test_unknown_names_are_refused() -> None:
    with pytest.raises(OptionError, match="unknown collective 'all_sum'"):
        collective_time_s("all_sum", 1, flat_group(1, LINK))
    with pytest.raises(OptionError, match="no algorithm 'tree'\n  hint: it has ring, halving"):
        formula("all_reduce", "tree")


def test_a_backend_may_do_a_collective_otherwise() -> None:
    """A link's ratio for one kind changes only that kind."""
    plain, link = Link(1e-5, 1e-9), Link(1e-5, 1e-9, ratios=(("reduce_scatter", 2.0),))
    for kind in KINDS:
        slower = collective_time_s(kind, 1e6, flat_group(4, link))
        times = 2.0 if kind == "reduce_scatter" else 1.0
        assert slower == times * collective_time_s(kind, 1e6, flat_group(4, plain))
    assert Link(1e-5, 1e-9, ratios=(("send_recv", 0.5),)).message_s(1e4) == pytest.approx(1e-5)


@pytest.mark.parametrize("in_switch", [None, 1e-11])
def test_chunks_reach_the_bandwidth_slowly(in_switch: float | None) -> None:
    """A collective whose chunks follow each other is never faster than whole buffers, slower at
    sizes between, and at last as fast. An all_reduce is still both of its halves."""
    link = Link(5e-6, 1e-11, in_switch, chunk_s=5e-7)
    whole, chunks = (flat_group(8, of) for of in (replace(link, chunk_s=None), link))
    sizes = [2.0**i for i in range(10, 36)]
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        slower = [
            collective_time_s(kind, n, chunks) / collective_time_s(kind, n, whole) for n in sizes
        ]
        assert min(slower) >= 1.0 - 1e-9
        assert slower[0] == pytest.approx(1.0, abs=0.1)
        assert max(slower) > 1.2
        assert slower[-1] < 1.02
    assert collective_time_s("all_to_all", 1e6, chunks) == collective_time_s(
        "all_to_all", 1e6, whole
    )
    if in_switch is None:
        halves = sum(collective_time_s(k, 1e7, chunks) for k in ("all_gather", "reduce_scatter"))
        assert collective_time_s("all_reduce", 1e7, chunks) == pytest.approx(halves)
