"""The cost of each alternative of one decision equals that of planning with it forced."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import Manual, Plan, PlanError
from autopar.passes.explain import decisions, next_best
from autopar.passes.intra import Constraints, IntraOpProblem, intra_op_problem
from autopar.passes.solvers.choice import solve
from autopar.passes.solvers.eliminate import TableLimits
from autopar.passes.solvers.problem import Solution
from autopar.placement import Spec
from autopar.plans import Choice, Option, parse_storage
from autopar.program.lines import OperatorStrategy, Storage
from autopar.report.words import storage_words
from tests.helpers import jobs
from tests.helpers.jobs import machine
from tests.helpers.models.blocks import Block as ResidualBlock
from tests.helpers.models.blocks import Chain, SharedBlock
from tests.helpers.nightly import nightly
from tests.helpers.plans import bound_of

WIDTH, ROWS, EVERY = 16, 16, 1000
REL = 1e-7
Keep = Callable[[int], bool]
Strategies = Mapping[str, OperatorStrategy]


class Net(nn.Module):
    """Two matmuls whose shapes differ."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).square().mean()


def plan_of(
    model: nn.Module | None = None, shape: tuple[int, int] = (2, 2), **options: Any
) -> Plan:
    """One stage and one microbatch, unless `options` say otherwise."""
    given: dict[str, Any] = {"stages": 1, "microbatches": 1, "mesh_shape": "as-given"} | options
    return autopar.plan(model or Net(), machine(shape), {"x": torch.zeros(ROWS, WIDTH)}, **given)


planned = cache(plan_of)


def forced(name: str, placements: tuple[str, ...]) -> Plan:
    return plan_of(force={name: [f"{placement}@{a}" for a, placement in enumerate(placements)]})


def choice_of(plan: Plan, name: str, limits: TableLimits = next_best.LIMITS) -> Choice:
    (decision,) = decisions(bound_of(plan).stages, plan.data, name, limits, EVERY)
    assert decision.choice is not None
    return decision.choice


def options_of(choice: Choice) -> tuple[Option, ...]:
    assert choice.chosen is not None and len(choice.others) == choice.n_options - 1
    return (choice.chosen, *choice.others)


def problem_of(plan: Plan) -> IntraOpProblem:
    """The planner's problem of the only stage, without constraints."""
    (stage,) = bound_of(plan).stages
    return intra_op_problem(stage.analysis, stage.cost, 1, Constraints(), "adamw")


def only(choice: int) -> Keep:
    return lambda c: c == choice


def strategies_of(problem: IntraOpProblem, v: int, wanted: Strategies) -> Keep:
    """Keeps the choices of variable `v` that give its operators the `wanted` strategies."""
    placed = problem.candidates[v].strategies
    return lambda c: all(placed(c)[name] == strategy for name, strategy in wanted.items())


def least_s(problem: IntraOpProblem, keep: dict[int, Keep]) -> float:
    """The ILP's optimum, where each variable in `keep` has only the choices that are kept."""
    numbers = problem.numbers
    masks = [
        np.array([keep.get(v, lambda c: True)(c) for c in range(k)])
        for v, k in enumerate(numbers.sizes)
    ]
    found = solve(numbers.restrict(masks), "ilp")
    return found.totals.cost_s if isinstance(found, Solution) else math.inf


@pytest.mark.usefixtures("nothing_hidden")
@pytest.mark.parametrize("name", ["up.weight", "down.bias"])
def test_a_storage_costs_what_planning_with_it_forced_does(name: str) -> None:
    plan = planned()
    least: dict[tuple[str, ...], float] = {}
    for option in options_of(choice_of(plan, name)):
        assert option.storage is not None and option.extra_s >= 0
        key = tuple(map(str, option.storage.spec.placements))
        least[key] = min(least.get(key, math.inf), option.extra_s)
    assert len(least) > 3 and max(least.values()) > 1e-4 * plan.objective_s
    for placements, extra_s in least.items():
        wanted_s = forced(name, placements).objective_s
        assert plan.objective_s + extra_s == pytest.approx(wanted_s, rel=REL), placements


@nightly
def test_a_storage_costs_what_the_ilp_says_period_by_period() -> None:
    plan, name = planned(), "up.weight"
    problem = problem_of(plan)
    (node,) = (n for n in problem.storages if "up" in n and "weight" in n)
    v = problem.parameter_variables[node]
    options = {option.storage: option for option in options_of(choice_of(plan, name))}
    assert {s.period for s in options if s} == {"step", "micro", "use"}
    for i, storage in list(enumerate(problem.storages[node]))[::3]:
        found_s = least_s(problem, {v: only(i)})
        if math.isinf(found_s):
            assert storage not in options
        else:
            assert plan.objective_s + options[storage].extra_s == pytest.approx(found_s, rel=REL)


@pytest.mark.parametrize("key", ["up/linear#0", "/relu#0", "down/linear#0"])
def test_a_strategy_costs_what_the_ilp_says_with_it_alone(key: str) -> None:
    plan = planned()
    problem = problem_of(plan)
    keys = bound_of(plan).analysis.program.keys
    key = next(k for k in keys.values() if key.split("#")[0].split(".")[0] in k)
    node = next(n for n, k in keys.items() if k == key)
    v = next(
        v
        for v, c in enumerate(problem.candidates)
        if any(member.name == node for member in c.group.members)
    )
    options = options_of(choice_of(plan, key))
    assert len(options) > 3 and options[-1].extra_s > 1e-3 * plan.objective_s
    assert options[0].strategy == bound_of(plan).stages[0].strategy.operators[node]
    for option in (options[0], options[1], options[len(options) // 2], options[-1]):
        assert option.strategy is not None
        found_s = least_s(problem, {v: strategies_of(problem, v, {node: option.strategy})})
        assert plan.objective_s + option.extra_s == pytest.approx(found_s, rel=REL)


def test_options_are_counted_ordered_and_shown_with_one_that_is_slower() -> None:
    plan = planned()
    every = choice_of(plan, "up.weight")
    times = [option.extra_s for option in every.others]
    assert times == pytest.approx(sorted(times), rel=REL)
    assert every.chosen is not None and every.chosen.extra_s == 0 == every.chosen.extra_bytes
    assert every.n_as_fast == 1 + sum(t == 0 for t in times)
    (decision,) = decisions(bound_of(plan).stages, plan.data, "up.weight", n_shown=1)
    assert decision.choice is not None and len(decision.choice.others) == 1
    assert decision.choice.others[0].extra_s == min(t for t in times if t > 0)
    assert decision.choice.n_options == every.n_options


def test_where_tables_are_too_large_all_else_stays() -> None:
    plan, name = planned(), "up.weight"
    (stage,) = bound_of(plan).stages
    anew = {o.storage: o for o in options_of(choice_of(plan, name))}
    choice = choice_of(plan, name, TableLimits(table_entries=1))
    assert (choice.rest, choice_of(plan, name).rest) == ("kept", "anew")
    problem = problem_of(plan)
    (node,) = (n for n in problem.storages if "up" in n and "weight" in n)
    v = problem.parameter_variables[node]
    fixed = {}
    for u, of in enumerate(problem.candidates):
        own = {m.name: stage.strategy.operators[m.name] for m in of.group.members}
        fixed[u] = strategies_of(problem, u, own)
    for parameter, u in problem.parameter_variables.items():
        fixed[u] = only(problem.storages[parameter].index(stage.strategy.storage[parameter]))
    dearer = 0
    for option in options_of(choice):
        assert option.storage is not None
        i = problem.storages[node].index(option.storage)
        found_s = least_s(problem, fixed | {v: only(i)})
        assert plan.objective_s + option.extra_s == pytest.approx(found_s, rel=REL)
        dearer += option.extra_s > anew[option.storage].extra_s * (1 + REL)
    assert dearer, "nothing is gained by choosing the rest anew: the test says nothing"


def test_memory_is_that_of_the_storage() -> None:
    options = {o.storage: o for o in options_of(choice_of(planned(), "down.weight")) if o.storage}
    whole = options[Storage(Spec.parse("I I"))]
    quarter = options[Storage(Spec.parse("S(0) S(1)"), "use")]
    assert whole.extra_bytes > quarter.extra_bytes


def test_a_forced_storage_is_not_called_the_fastest() -> None:
    slowest = max(options_of(choice_of(planned(), "up.weight")), key=lambda o: o.extra_s)
    assert slowest.storage is not None
    plan = forced("up.weight", tuple(map(str, slowest.storage.spec.placements)))
    choice = choice_of(plan, "up.weight")
    assert choice.chosen is not None and choice.chosen.extra_s > 0
    assert choice.others[0].extra_s == 0
    assert "for its memory, a tie or force: the fastest takes" in plan.explain("up.weight")


@pytest.mark.usefixtures("nothing_hidden")
def test_few_blocks_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a plan that gathers at each use; how many buckets gradients fill depends on all blocks."""
    model = Chain([ResidualBlock(WIDTH) for _ in range(6)])
    plan = plan_of(model, forbid=("zero1", "zero2"))
    keys = bound_of(plan).analysis.program.keys.values()
    names = ["blocks.3.up.weight", "blocks.0.down.bias", "blocks.5.down.weight"]
    names += [next(k for k in keys if k.startswith(f"blocks.{i}/relu")) for i in (2, 3)]
    whole = [choice_of(plan, name) for name in names]
    monkeypatch.setattr(next_best, "WHOLE_OPERATORS", 0)
    few = [choice_of(plan, name) for name in names]
    assert {c.blocks for c in whole} == {None}
    assert all(c.blocks is not None and c.blocks[0] == 3 < c.blocks[1] for c in few)
    for a, b in zip(whole, few, strict=True):
        assert costs_of(a) == pytest.approx(costs_of(b), rel=1e-6, abs=plan.objective_s * 1e-9)
        assert max(costs_of(a).values()) > 1e-4 * plan.objective_s
    assert "computed on 3 of " in plan.explain(names[0])


def costs_of(choice: Choice) -> dict[object, float]:
    """Extra seconds of every option, by its storage or strategy."""
    return {repr(o.storage or o.strategy): o.extra_s for o in options_of(choice)}


def test_what_all_blocks_read_is_weighed_in_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(SharedBlock(), (1, 2))
    monkeypatch.setattr(next_best, "WHOLE_OPERATORS", 0)
    assert choice_of(plan, "blocks.0.up.weight").blocks is None


HERE = Path(__file__).name


def line_of(text: str) -> str:
    """file:line of the first line of this file that contains `text`."""
    lines = Path(__file__).read_text().splitlines()
    return f"{HERE}:{next(i for i, line in enumerate(lines, 1) if text in line)}"


def test_a_parameter_says_why_what_is_next_and_where() -> None:
    lines = planned().explain("up.weight").splitlines()
    source = line_of("self.down(self.up(x)")
    assert any(line.startswith("  read by up/") and f"{source})" in line for line in lines)
    assert any(line.startswith("  chosen: the fastest of ") for line in lines)
    (best,) = (line for line in lines if line.startswith("  next best: "))
    assert "as fast" in best or " a step (+" in best
    rest = "costs if all that can hide is hidden, after re-optimizing all else"
    assert lines[-1] == f"  ({rest}, without a memory limit)"


def test_an_operator_says_why_what_is_next_and_where() -> None:
    plan = planned()
    keys = bound_of(plan).analysis.program.keys.values()
    text = plan.explain(next(k for k in keys if "relu" in k))
    assert text.count(line_of("self.down(self.up(x)")) == 1
    assert "chosen: the fastest of " in text and " strategies" in text and "next best: " in text


def test_a_recipe_was_weighed_against_nothing() -> None:
    text = planned(manual=Manual(dp=4, zero=3)).explain("up.weight")
    assert "no alternatives: the recipe decides it (manual=Manual(...))" in text
    assert "next best" not in text and line_of("self.down(self.up(x)") in text


def test_a_stage_speaks_for_itself() -> None:
    stages = [(["up"], (1, 2)), (["down"], (1, 2))]
    plan = plan_of(shape=(1, 4), stages=stages, microbatches=4, mesh_shape="auto")
    text = plan.explain("down.weight")
    assert " a step of stage 1, " in text and "re-optimizing all else of stage 1, without" in text
    assert "%" not in text


def test_what_runs_again_is_not_weighed() -> None:
    plan = plan_of(Chain([ResidualBlock(WIDTH) for _ in range(4)]), (1, 2), recompute="full")
    assert "; recompute is not counted)" in plan.explain("blocks.1.up.weight")


def test_a_module_of_several_operators_has_no_one_decision() -> None:
    plan = autopar.plan(jobs.gpt2(1), machine((1, 2)), jobs.tokens(0), stages=1)
    assert "next best" not in plan.explain("transformer.h.0.mlp.c_fc")
    fused = plan.explain("transformer.h.0.mlp.c_fc/add.Tensor#0")
    assert "inside the matmul" in fused and "  at " in fused and "pytorch_utils.py:" in fused


def test_one_rank_leaves_no_choice() -> None:
    text = plan_of(shape=(1, 1)).explain("up.weight")
    assert text.endswith("no alternatives: no other storages are possible")


def test_a_plan_without_its_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    planned().save(path)
    with pytest.raises(PlanError, match="needs the model"):
        Plan.load(path).explain("up.weight")
    bound = Plan.load(path).bind(Net())
    assert bound.explain("up.weight") == planned().explain("up.weight")


@pytest.mark.parametrize(
    ("storage", "used", "words"),
    [
        ("I I", "I I", "whole"),
        ("I I", "R I", "whole gradients all_reduced over dp"),
        ("S(0) I", "R I", "S(0)@dp gathered once a step (ZeRO-1)"),
        ("S(0) I; each use", "R I", "S(0)@dp gathered at use (ZeRO-3)"),
        ("S(0) S(1)", "R S(1)", "S(0)@dp S(1)@tp gathered once a step (ZeRO-1)"),
        ("S(0) S(0)", "S(0) S(1)", "S(0)@dp S(0)@tp used S(1)@tp"),
        ("S(0) S(0)", "S(1) S(1)", "S(0)@dp S(0)@tp used S(1)@dp S(1)@tp"),
        ("I I", "R S(1)", "whole gradients all_reduced over dp, cut at use to S(1)@tp"),
    ],
)
def test_storages_in_words(storage: str, used: str, words: str) -> None:
    uses = (Spec.parse(used),)
    assert storage_words(parse_storage(storage, "w"), uses, ("dp", "tp"), (2, 2)) == words
    assert "@tp" not in storage_words(parse_storage(storage, "w"), uses, ("dp", "tp"), (2, 1))
