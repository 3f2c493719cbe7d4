"""The verifier accepts what lowering makes; which moves are legal, and which orders of calls.

That it names wrong words of a program: `unit/pipeline/test_on_text.py`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import hypothesis
import pytest
from hypothesis import strategies as st

from autopar.errors import VerificationError
from autopar.passes.lowering import lower
from autopar.passes.reshard import moves_from
from autopar.placement import Spec, Split, TensorType, all_specs
from autopar.program.lines import StageProgram
from autopar.verifier import GroupCall, check_rendezvous, verify_program
from autopar.verifier.stage import check_move
from tests.helpers.harness import abstract_cost, free_problem, model_case, random_strategy


@lru_cache
def drawn(model: str, sizes: tuple[int, ...], n_microbatches: int, seed: int) -> StageProgram:
    """A lowered random strategy."""
    analysis = model_case(model).analysis
    problem = free_problem(model, sizes, n_microbatches)
    strategy = random_strategy(analysis, problem, n_microbatches, random.Random(seed))
    return lower(analysis, strategy, abstract_cost(sizes), with_outputs=seed % 2 == 1)


@pytest.mark.parametrize("n_microbatches", [1, 2])
@pytest.mark.parametrize("sizes", [(2,), (2, 2), (1, 4)])
@pytest.mark.parametrize("model", ["mlp", "bert-view", "gpt2"])
def test_lowered_programs_pass(model: str, sizes: tuple[int, ...], n_microbatches: int) -> None:
    for seed in range(3):
        verify_program(drawn(model, sizes, n_microbatches, seed))


TENSORS = [
    TensorType(((4,), (8, 4)), 4, True),
    TensorType(((4, 2, 4), (3,)), 4, True),
    TensorType(((16,),), 8, False),
]


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("sizes", [(2,), (2, 2), (1, 4)])
def test_every_edge_of_the_reshard_graph_is_a_legal_move(
    tensor: TensorType, sizes: tuple[int, ...]
) -> None:
    specs = all_specs(tensor, sizes)
    for source in specs:
        for step in moves_from(tensor, source, sizes, frozenset(specs)):
            assert check_move(tensor, source, step.move, step.target, sizes) is None
            for other in specs:
                if other != step.target:
                    assert check_move(tensor, source, step.move, other, sizes) is not None
            cut = tuple(Split(s.dim, s.outer + 1) for s in step.move.splits)
            if cut:
                wrong = replace(step.move, splits=cut)
                assert check_move(tensor, source, wrong, step.target, sizes) is not None


def test_an_outer_axis_may_not_move_while_an_inner_one_shards_the_factor() -> None:
    tensor, sizes = TensorType(((8,),), 4, True), (2, 2)
    both, inner = Spec.parse("S(0) S(0)"), Spec.parse("R S(0)")
    specs = frozenset(all_specs(tensor, sizes))
    moves = [s.move for s in moves_from(tensor, Spec.parse("S(0) R"), sizes, specs)]
    gather = next(m for m in moves if m.name == "s_to_r" and m.axes == (0,))
    assert "innermost" in str(check_move(tensor, both, gather, inner, sizes))


def sequences(
    n_ranks: int, calls: Sequence[tuple[tuple[int, ...], str]]
) -> dict[int, list[GroupCall]]:
    """One global order of calls, as every rank sees it."""
    out: dict[int, list[GroupCall]] = {rank: [] for rank in range(n_ranks)}
    for ranks, what in calls:
        for rank in ranks:
            out[rank].append(GroupCall(ranks, what))
    return out


groups = st.sets(st.integers(0, 4), min_size=2).map(lambda ranks: tuple(sorted(ranks)))
orders = st.lists(st.tuples(groups, st.sampled_from("abc")), max_size=30)


@hypothesis.given(orders)
def test_what_has_one_global_order_never_deadlocks(
    calls: list[tuple[tuple[int, ...], str]],
) -> None:
    check_rendezvous(sequences(5, calls))


@hypothesis.given(orders, st.data())
def test_one_rank_in_another_order_is_noticed(
    calls: list[tuple[tuple[int, ...], str]], data: st.DataObject
) -> None:
    found = sequences(5, calls)
    swaps = [
        (rank, i)
        for rank, own in found.items()
        for i in range(len(own) - 1)
        # Different calls, of one group or of two groups that share another rank.
        if own[i] != own[i + 1] and len(set(own[i].ranks) & set(own[i + 1].ranks)) > 1
    ]
    hypothesis.assume(swaps)
    rank, i = data.draw(st.sampled_from(swaps))
    found[rank][i], found[rank][i + 1] = found[rank][i + 1], found[rank][i]
    with pytest.raises(VerificationError):
        check_rendezvous(found)


def test_a_cycle_of_waits_between_groups_that_agree() -> None:
    calls = sequences(3, [((0, 1), "a"), ((1, 2), "b"), ((0, 2), "c")])
    calls[0].reverse()
    with pytest.raises(VerificationError, match="wait for each other for ever: rank 0 in c of"):
        check_rendezvous(calls)


def test_a_missing_call_names_both_ranks() -> None:
    calls = sequences(2, [((0, 1), "a"), ((0, 1), "b")])
    calls[1].pop()
    with pytest.raises(VerificationError, match="call 1 is b on rank 0, none on rank 1"):
        check_rendezvous(calls)


def test_groups_with_strangers() -> None:
    with pytest.raises(VerificationError, match="a group it is not one of"):
        check_rendezvous({0: [GroupCall((1, 2), "a")], 1: [], 2: []})
    with pytest.raises(VerificationError, match=r"waits for ranks \[7\]"):
        check_rendezvous({0: [GroupCall((0, 7), "a")]})
