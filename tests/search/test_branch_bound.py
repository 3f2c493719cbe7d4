"""Branch and bound over made-up nodes: which one is next."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from autopar.passes.search.branch_bound import BranchAndBound, Node
from autopar.passes.search.simplicity import Simplicity
from autopar.passes.search.simulator import Solved

SIMPLEST = Simplicity()
ENOUGH = 100


class EnoughError(Exception):
    pass


def solved(step_time_s: float) -> Solved:
    candidate: Any = SimpleNamespace(name=f"{step_time_s} s")
    predicted: Any = SimpleNamespace(step_time_s=step_time_s)
    return Solved(candidate, (), predicted, step_time_s, 0.0)


def node(name: str, bound_s: float, level: str, *parts: Node | Solved) -> Node:
    return Node(name, bound_s, SIMPLEST, level, lambda limit_s: parts)


def endless(k: int) -> Node:
    """A node whose refinement only tells a little more of its bound."""
    made = node(f"endless {k}", 1.0, "shared")
    return replace(made, refine=lambda limit_s: [replace(endless(k), bound_s=made.bound_s + 1e-6)])


def found_after(incumbent_s: float) -> int:
    """Refinements until the plan of 3 seconds is found, beside nodes of lower bounds without end;
    `ENOUGH` if it is not."""
    count = 0

    def before(node: Node, search: BranchAndBound) -> None:
        nonlocal count
        count += 1
        if count > ENOUGH or search.incumbent_s == 3.0:
            raise EnoughError

    search = BranchAndBound(0.01, 0.0, lambda solved: SIMPLEST, before)
    one = node("one", 2.0, "free", node("one", 2.1, "rerun", node("one", 2.2, "solved", solved(3))))
    recipe = replace(node("recipe", 0.0, "recipe", solved(incumbent_s)), recipe="Megatron")
    try:
        search.run([recipe, one, *(endless(k) for k in range(4))])
    except EnoughError:
        return min(count, ENOUGH)
    raise AssertionError("nodes of lower bounds are without end")


def test_a_poor_incumbent_is_worth_a_dive() -> None:
    assert found_after(10.0) < 30


def test_a_good_incumbent_is_not() -> None:
    """Within a twentieth of the least bound, the least bound is always next."""
    assert found_after(1.04) == ENOUGH


def test_what_is_far_waits_unless_its_placements_are_known() -> None:
    """Nodes above the limit come back as they were; the next run refines them."""
    search = BranchAndBound(0.01, 0.0, lambda solved: SIMPLEST)
    far = node("far", 5.0, "free", solved(6))
    placed: Any = SimpleNamespace()
    known = replace(node("known", 5.0, "solved", solved(8)), placed=placed)
    assert search.run([node("near", 2.0, "free", far), known], 3.0) == [far]
    assert (search.incumbent_s, search.nodes) == (8.0, [])
    search.run([far])
    assert search.incumbent_s == 6.0
