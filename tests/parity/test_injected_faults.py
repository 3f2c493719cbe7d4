"""Faults planted in the placement algebra: random assignments must notice each of them.

A fault is noticed if one of a few fixed assignments, right without it, has an error above the
tolerance with it. Every row of the reshard table is mutated in every way that keeps shapes
(`MUTANTS`). The other faults are mistakes that are easy to make with placements.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from autopar.passes.reshard import costs as reshard
from autopar.passes.reshard import move_graph
from autopar.placement import TABLE, I, PrimitiveKind, R, Spec, Split, TensorType, moves
from autopar.program import Delivered, Strategy, batch_shards
from autopar.runtime.execute import delivery, executor
from tests.helpers.harness import (
    abstract_cost,
    free_problem,
    generated_code,
    model_case,
    random_strategy,
    thread_errors,
)
from tests.helpers.ranks import TOLERANCE

__all__ = ["generated_code"]

# Primitives with equal shapes of input and output; no other has those of all_to_all.
ALIKE: tuple[tuple[PrimitiveKind, ...], ...] = (
    ("identity", "all_reduce", "keep_first"),
    ("all_gather", "zero_pad"),
    ("reduce_scatter", "slice"),
)
NAMED = {
    ("r_to_p", "keep_first", "identity"): "R to P with identity backward",
    ("i_to_p", "identity", "identity"): "bias added n times",
    ("i_to_r", "identity", "identity"): "i_to_r without all_reduce",
    ("s_to_r", "all_gather", "slice"): "s_to_r sliced instead of reduced in backward",
}
Mutant = tuple[str, PrimitiveKind, PrimitiveKind]


def mutants() -> Iterator[Mutant]:
    """Every row of the table with one side replaced."""
    for name, (forward, backward) in TABLE.items():
        for alike in ALIKE:
            for other in alike:
                if forward in alike and other != forward:
                    yield name, other, backward
                if backward in alike and other != backward:
                    yield name, forward, other


MUTANTS = tuple(mutants())


class Assignments:
    """The same few assignments of one model on one mesh, with and without a fault."""

    def __init__(
        self, model: str, sizes: tuple[int, ...], seeds: Sequence[int], n_microbatches: int = 1
    ) -> None:
        self.case, self.cost = model_case(model), abstract_cost(sizes)
        problem = free_problem(model, sizes, n_microbatches)
        self.strategies = {
            seed: random_strategy(self.case.analysis, problem, n_microbatches, random.Random(seed))
            for seed in seeds
        }

    def errors(self, seed: int, strategy: Strategy | None = None) -> Mapping[str, float]:
        batch = self.case.batch(seed)
        chosen = strategy or self.strategies[seed]
        return thread_errors(self.case.analysis, self.cost, chosen, batch, seed)

    def worst(self, seed: int) -> float:
        return max(self.errors(seed).values())

    def are_right(self) -> bool:
        return all(self.worst(seed) <= TOLERANCE for seed in self.strategies)

    def notice(self) -> bool:
        return any(self.worst(seed) > TOLERANCE for seed in self.strategies)


@pytest.fixture(scope="module")
def assignments() -> dict[str, Assignments]:
    """Enough assignments to run every row of the table forward and backward."""
    found = {
        "mlp": Assignments("mlp", (2,), range(6)),
        "bert-view": Assignments("bert-view", (2,), range(6)),
    }
    assert all(some.are_right() for some in found.values())
    return found


@pytest.mark.parametrize(
    "mutant", MUTANTS, ids=[NAMED.get(m, " ".join(m)).replace(" ", "-") for m in MUTANTS]
)
def test_wrong_move(
    mutant: Mutant, assignments: Mapping[str, Assignments], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, forward, backward = mutant
    monkeypatch.setitem(TABLE, name, (forward, backward))
    begins_with = {row[0]: other for other, row in TABLE.items()}
    monkeypatch.setitem(moves._TRANSPOSED, name, begins_with[backward])
    assert any(some.notice() for some in assignments.values())


def test_named_faults_are_mutants() -> None:
    assert set(NAMED) <= set(MUTANTS)


def _invariant_scale(strategy: Strategy, norms: set[str]) -> Strategy:
    """Leave the scale and shift of each norm I where its activations are sharded."""
    changed = dict(strategy.operators)
    for name in norms:
        old = changed[name]
        rows, *affine = old.inputs
        changed[name] = dataclasses.replace(
            old, inputs=(rows, *(_kept_invariant(rows, spec) for spec in affine))
        )
    return dataclasses.replace(strategy, operators=changed)


def _kept_invariant(rows: Spec, spec: Spec) -> Spec:
    pairs = zip(rows.placements, spec.placements, strict=True)
    return Spec(tuple(I if row.is_shard and p == R else p for row, p in pairs))


def test_invariant_mixed_with_shards() -> None:
    """The loss is right and the scale's gradient is wrong: equal losses alone prove nothing."""
    some = Assignments("bert-view", (2,), [3])
    assert some.are_right()
    operators = some.case.analysis.operators
    norms = {o.name for o in operators if str(o.call.op) == "aten.layer_norm.default"}
    errors = dict(some.errors(3, _invariant_scale(some.strategies[3], norms)))
    assert errors.pop("loss") <= TOLERANCE
    wrong = {name for name, error in errors.items() if error > TOLERANCE}
    assert wrong
    assert all("norm" in name for name in wrong)


def test_storage_order_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters are sharded in axis order, whatever order their storage has."""
    some = Assignments("mlp", (2, 2), range(3))
    assert some.are_right()
    right = delivery.shard

    def in_axis_order(
        whole: Tensor,
        dims: Sequence[Sequence[int]],
        spec: Spec,
        sizes: Sequence[int],
        coordinate: Sequence[int],
        skip: tuple[int, int] | None = None,
    ) -> Tensor:
        return right(whole, dims, Spec(spec.placements), sizes, coordinate, skip)

    monkeypatch.setattr(delivery, "shard", in_axis_order)
    assert some.notice()


def test_outer_axis_moved_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """An outer axis moves while an inner one splits the same factor."""
    some = Assignments("mlp", (2, 2), range(3))
    assert some.are_right()
    with monkeypatch.context() as faulty, fresh_tables():
        faulty.setattr(move_graph, "_is_innermost", lambda spec, axes: True)
        assert some.notice()


def test_strided_factor_taken_as_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of a fused QKV are cut as if they were contiguous rows."""
    some = Assignments("bert-view", (2,), range(3))
    assert some.are_right()

    def contiguous(
        tensor: TensorType, spec: Spec, sizes: Sequence[int], cell: tuple[int, int]
    ) -> Split:
        return Split(cell[0])

    with monkeypatch.context() as faulty, fresh_tables():
        faulty.setattr(move_graph, "_split", contiguous)
        assert some.notice()


@contextmanager
def fresh_tables() -> Iterator[None]:
    """Empty the shared reshard tables before and after, so that no fault stays in them."""
    reshard.clear_tables()
    try:
        yield
    finally:
        reshard.clear_tables()


def test_local_divisor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank divides by the number of labels of its own rows: a mean of means."""
    some = Assignments("gpt2", (2,), range(3))
    assert some.are_right()
    right = executor.Executor._divisors

    def of_own_rows(
        self: executor.Executor, inputs: Mapping[str, Tensor], is_local: bool
    ) -> dict[str, Tensor]:
        (n_ranks,), (at,) = self.program.axis_sizes, self.coordinate
        labels = {name: inputs[name] for name in self.program.prologue_inputs}
        own = {name: torch.full_like(value, -100) for name, value in labels.items()}
        for name, value in labels.items():
            own[name].chunk(n_ranks)[at].copy_(value.chunk(n_ranks)[at])
        return {name: count * n_ranks for name, count in right(self, own, is_local).items()}

    monkeypatch.setattr(executor.Executor, "_divisors", of_own_rows)
    assert some.notice()


def test_rows_dealt_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    """Microbatches of a replicated input take other rows than those of a sharded input."""
    some = Assignments("mlp", (2,), (2, 5, 9), n_microbatches=2)
    assert some.are_right()
    right = delivery.deliver

    def each_its_own_way(
        value: Tensor, item: Delivered, index: int, n_microbatches: int, n_blocks: int,
        sizes: Sequence[int], coordinate: Sequence[int], is_local: bool,
    ) -> Tensor:  # fmt: skip
        own = batch_shards(item, sizes)
        return right(value, item, index, n_microbatches, own, sizes, coordinate, is_local)

    monkeypatch.setattr(executor, "deliver", each_its_own_way)
    assert some.notice()
