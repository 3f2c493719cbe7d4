"""The verifier accepts what lowering makes, and names every planted fault."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import hypothesis
import pytest
from hypothesis import strategies as st

from autopar.errors import VerificationError
from autopar.passes.lowering import lower
from autopar.passes.reshard import moves_from
from autopar.placement import I, P, Placement, R, Spec, Split, TensorType, all_specs
from autopar.program import (
    CallLine,
    GatherLine,
    Line,
    MoveLine,
    StageProgram,
    StoredParameter,
)
from autopar.verifier import GroupCall, check_rendezvous, verify_program
from autopar.verifier.stage import check_move, rank_sequences
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


Wanted = Callable[[StageProgram], object]


def program_with(wanted: Wanted) -> StageProgram:
    """The first drawn program that has what a fault needs."""
    programs = (drawn("gpt2", (2, 2), 1, seed) for seed in range(40))
    found = next((p for p in programs if wanted(p)), None)
    assert found is not None, "no drawn program has it"
    return found


def position(program: StageProgram, kind: type[Line], test: Callable[..., bool]) -> int | None:
    return next((i for i, x in enumerate(program.body) if isinstance(x, kind) and test(x)), None)


def with_line(program: StageProgram, at: int, *lines: Line) -> StageProgram:
    """`program` with the line at `at` replaced."""
    return replace(program, body=(*program.body[:at], *lines, *program.body[at + 1 :]))


def changed_move(
    test: Callable[[MoveLine], bool], change: Callable[[MoveLine], MoveLine]
) -> StageProgram:
    program = program_with(lambda p: position(p, MoveLine, test) is not None)
    at = position(program, MoveLine, test)
    assert at is not None
    line = program.body[at]
    assert isinstance(line, MoveLine)
    return with_line(program, at, change(line))


def refused(program: StageProgram, reason: str) -> None:
    with pytest.raises(VerificationError, match=reason):
        verify_program(program)


def is_named(*names: str) -> Callable[[MoveLine], bool]:
    return lambda line: line.move.name in names


def test_variables_that_are_not_there_or_there_twice() -> None:
    program = drawn("gpt2", (2, 2), 1, 0)
    at = position(program, CallLine, lambda c: c.has_grad)
    assert at is not None
    refused(with_line(program, at), "is read before it is defined")
    refused(with_line(program, at, program.body[at], program.body[at]), "is defined twice")


def with_second_axis(line: MoveLine) -> MoveLine:
    placements = list(line.out.spec.placements)
    placements[1] = R if placements[1] == I else I
    return replace(line, out=replace(line.out, spec=Spec(tuple(placements))))


def with_contiguous_cuts(line: MoveLine) -> MoveLine:
    splits = tuple(Split(s.dim, 1) for s in line.move.splits)
    return replace(line, move=replace(line.move, splits=splits))


# The move that is changed, the change, and the reason.
MOVES: dict[str, tuple[Callable[[MoveLine], bool], Callable[[MoveLine], MoveLine], str]] = {
    "name": (
        is_named("p_to_i"),
        lambda m: replace(m, move=replace(m.move, name="p_to_r")),
        "p_to_r is no move from P to I on axis",
    ),
    "axis": (
        lambda m: m.move.axes == (0,),
        lambda m: replace(m, move=replace(m.move, axes=(1,))),
        "axis|axes",
    ),
    "a second axis": (
        lambda m: m.move.axes == (0,) and m.out.spec.placements[1] in (R, I),
        with_second_axis,
        r"over axes \(0,\) changes axis 1",
    ),
    "a strided cut": (
        lambda m: any(s.outer > 1 for s in m.move.splits),
        with_contiguous_cuts,
        "cuts dim . outer 1",
    ),
    "local shape": (
        lambda m: len(m.out.shape) > 0,
        lambda m: replace(m, out=replace(m.out, shape=(*m.out.shape[:-1], 7))),
        "has local shape",
    ),
    "bytes": (
        is_named("p_to_r", "s_to_r"),
        lambda m: replace(m, forward_bytes=m.forward_bytes + 1),
        "moves .* bytes",
    ),
    "gradient": (
        lambda m: m.has_grad,
        lambda m: replace(m, has_grad=False, backward_bytes=0),
        "has_grad is False",
    ),
}


@pytest.mark.parametrize("what", MOVES)
def test_a_move_that_is_changed(what: str) -> None:
    test, change, reason = MOVES[what]
    with pytest.raises(VerificationError, match=reason) as raised:
        verify_program(changed_move(test, change))
    _, where, hint = str(raised.value).splitlines()
    assert where.startswith("  at line ") and "_to_" in where
    assert hint.startswith("  hint: ")


def test_i_and_r_mixed_in_one_operator() -> None:
    """A layer norm's scale left Invariant beside Replicate activations: the loss stays right."""

    def is_moved(parameter: StoredParameter) -> bool:
        moves = [m for use in parameter.uses for m in use.moves]
        return bool(moves) and {m.move.name for m in moves} == {"i_to_r"}

    program = program_with(lambda p: any(map(is_moved, p.parameters)))
    moved = next(filter(is_moved, program.parameters))
    stored = moved.stored.spec
    uses = (replace(u, moves=(), local=replace(u.local, spec=stored)) for u in moved.uses)
    wrong = replace(moved, uses=tuple(uses))
    parameters = tuple(wrong if p is moved else p for p in program.parameters)
    refused(replace(program, parameters=parameters), r"is I and .* on axis")


@pytest.mark.parametrize("placement", [P, R])
def test_a_trained_parameter_is_stored_invariant_or_sharded(placement: Placement) -> None:
    program = program_with(
        lambda p: (
            all(x.period == "step" for x in p.parameters[:1])
            and p.parameters[0].stored.spec.placements[0] == I
        )
    )
    first = program.parameters[0]
    assert first.stored.has_grad
    spec = Spec((placement, *first.stored.spec.placements[1:]))
    wrong = replace(first, stored=replace(first.stored, spec=spec))
    refused(replace(program, parameters=(wrong, *program.parameters[1:])), "only I and S can be")


def test_a_use_that_does_not_follow_from_storage() -> None:
    program = program_with(lambda p: any(u.moves for x in p.parameters for u in x.uses))
    parameters = list(program.parameters)
    at = next(i for i, p in enumerate(parameters) if any(u.moves for u in p.uses))
    uses = tuple(replace(u, moves=u.moves[:-1]) for u in parameters[at].uses)
    parameters[at] = replace(parameters[at], uses=uses)
    refused(replace(program, parameters=tuple(parameters)), "lead to")


def test_a_gather_of_a_parameter_that_is_not_gathered_at_each_use() -> None:
    program = program_with(lambda p: position(p, GatherLine, lambda g: True) is not None)
    at = position(program, GatherLine, lambda g: True)
    assert at is not None
    line = program.body[at]
    assert isinstance(line, GatherLine)
    refused(with_line(program, at, replace(line, parameter="other")), "is not gathered for each")
    refused(with_line(program, at, replace(line, moves=line.moves[:-1])), "lead to")


def test_a_loss_that_is_not_invariant() -> None:
    def last_move(program: StageProgram) -> MoveLine | None:
        moves = (x for x in program.body[-2:] if isinstance(x, MoveLine))
        return next((x for x in moves if x.out.name == program.loss), None)

    program = program_with(lambda p: last_move(p) is not None)
    last = last_move(program)
    assert last is not None
    body = tuple(x for x in program.body if x is not last)
    refused(replace(program, body=body, loss=last.source), r"ends . on axis \w+, not I")


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


def test_rank_sequences_hold_every_group_of_the_mesh() -> None:
    program = drawn("gpt2", (2, 2), 2, 0)
    found = rank_sequences(program)
    assert set(found) == {0, 1, 2, 3}
    assert len({len(calls) for calls in found.values()}) == 1
    ranks = {call.ranks for call in found[0]}
    assert ranks <= {(0, 1), (0, 2), (0, 1, 2, 3)}
    assert {(0, 1), (0, 2)} <= ranks
