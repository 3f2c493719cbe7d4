"""Programs both ways: values are there when they are read, freed once, saved only if needed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import Manual
from autopar.cost.price import overlap_of
from autopar.options import Recompute
from autopar.passes.analysis import MODES
from autopar.passes.backward import differentiate
from autopar.passes.lowering import lower
from autopar.program import (
    Boundary,
    CallLine,
    FreeLine,
    FunctionLine,
    FusedGathers,
    FusedReductions,
    GatherLine,
    GradientMove,
    JointLine,
    JointProgram,
    KernelLine,
    MoveLine,
    ReadyLine,
    StageProgram,
    StartLine,
    WaitLine,
    kept_gathers,
    taken_parameters,
)
from tests.helpers.harness import abstract_cost, free_problem, model_case, random_strategy
from tests.helpers.jobs import llama, machine, tokens
from tests.helpers.models.dropout_models import dropped_gpt2
from tests.helpers.models.recompute_models import recomputing

M = TypeVar("M", bound=JointLine)


def random_stages() -> Iterator[StageProgram]:
    for model, sizes in (("mlp", (2,)), ("bert-view", (2, 2)), ("gpt2", (2, 2))):
        analysis, problem = model_case(model).analysis, free_problem(model, sizes, 1)
        for seed in range(6):
            strategy = random_strategy(analysis, problem, 1, random.Random(seed))
            yield lower(analysis, strategy, abstract_cost(sizes), with_outputs=seed % 2 == 1)


def planned_stages(mode: Recompute | None) -> Iterator[StageProgram]:
    for manual, shape in (
        (Manual(dp=2, zero=3), (1, 2)), (Manual(tp=2, sp=True), (1, 2)), (Manual(pp=2), (1, 2))
    ):  # fmt: skip
        for make in (dropped_gpt2, llama):
            torch.manual_seed(0)
            plan = autopar.plan(make(2), machine(shape), tokens(0), manual=manual)
            plan = plan if mode is None else recomputing(plan, mode)
            assert plan.bound is not None
            yield from plan.bound.pipeline.stages


def check(joint: JointProgram) -> None:
    """Run both functions on names alone."""
    stage = joint.stage
    there = {*taken_parameters(stage), *(d.local.name for d in stage.delivered)}
    there |= {b.local.name for b in stage.received}
    variables = there | {name for line in joint.forward for name in line.writes}
    made = run(joint.forward, there, variables)
    assert set(joint.saved) <= made | there, "what is saved is there at the end"
    assert stage.returned <= made | there
    assert made - stage.returned - set(joint.saved) == set(), "forward frees the rest"

    given = {name for name in joint.cotangents if name is not None}
    variables |= given | {name for line in joint.backward for name in line.writes}
    left = run(joint.backward, {*joint.saved, *given}, variables)
    assert left == set(), "backward frees everything"
    ready = [line.position for line in joint.backward if isinstance(line, ReadyLine)]
    assert len(set(ready)) == len(ready)
    read = {name for line in joint.backward for name in line.reads}
    assert set(joint.saved) <= read, "nothing is saved in vain"


def run(lines: Sequence[JointLine], given: set[str], variables: set[str]) -> set[str]:
    """What the function has defined and not freed at its end."""
    there, defined = set(given), set[str]()
    for line in lines:
        if isinstance(line, FreeLine):
            assert set(line.names) <= there, "freed twice, or never made"
            there.difference_update(line.names)
            defined.difference_update(line.names)
            continue
        assert {name for name in line.reads if name in variables} <= there, line
        there.update(line.writes)
        defined.update(line.writes)
    return defined


def test_random_strategies() -> None:
    for stage in random_stages():
        check(differentiate(stage))


@pytest.mark.parametrize("mode", [None, *MODES])
def test_plans(mode: Recompute | None) -> None:
    for stage in planned_stages(mode):
        check(differentiate(stage))


def members(lines: Sequence[JointLine], kind: type[M]) -> list[M]:
    """The gathers, or reductions of gradients, of a function, whether fused or begun early."""
    found: list[M] = []
    for line in lines:
        call = line.move if isinstance(line, StartLine) else line
        each = call.members if isinstance(call, FusedGathers | FusedReductions) else (call,)
        found += [one for one in each if isinstance(one, kind)]
    return found


def test_a_gathered_parameter_is_not_saved_and_gathered_once_again() -> None:
    for stage in planned_stages(None):
        joint = differentiate(stage)
        gathered = {line.out.name for line in members(joint.forward, GatherLine)}
        assert gathered & {*joint.saved} == kept_gathers(stage)
        again = Counter(line.out.name for line in members(joint.backward, GatherLine))
        wanted = {x.out.name: x.regathers for x in stage.body if isinstance(x, GatherLine)}
        assert again == Counter(wanted)


def test_the_last_block_stays_gathered_where_one_microbatch_is_in_flight() -> None:
    """Backward begins with it."""
    one, *_ = zero_3()
    kept = kept_gathers(one.stage)
    calls = [x for x in one.forward if members([x], GatherLine)]
    assert kept and kept <= {x.out.name for x in members(calls[-1:], GatherLine)}
    sent = Boundary(one.stage.local(one.stage.loss or ""), "loss", "loss")
    assert kept_gathers(replace(one.stage, sent=(sent,))) == frozenset()


def test_a_program_that_does_not_train_saves_nothing() -> None:
    stage = next(random_stages())
    joint = differentiate(replace(stage, trains=False))
    assert (joint.saved, joint.backward, joint.cotangents) == ((), (), ())
    check(joint)


class Shared(nn.Module):
    """The gradient of `c` is that of a matmul, too; `y` and `b` have two."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(4, 4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.a + self.c + self.b
        return (y * y + (y + self.b).tanh()).sum()


def of_shared() -> JointProgram:
    plan = autopar.plan(Shared(), (1, 1), {"x": torch.ones(4, 4)}, manual=Manual())
    assert plan.bound is not None
    return differentiate(plan.bound.pipeline.stages[0])


def test_a_gradient_that_is_read_later_is_copied_when_it_is_handed_over() -> None:
    """Whoever gets it may write to it while its sync is under way."""
    joint = of_shared()
    for i, line in enumerate(joint.backward):
        if isinstance(line, ReadyLine):
            later = {name for other in joint.backward[i + 1 :] for name in other.reads}
            assert line.is_shared == (line.source in later)
    assert {x.is_shared for x in joint.backward if isinstance(x, ReadyLine)} == {True, False}


def test_sums_of_gradients_take_the_memory_of_what_nobody_reads_again() -> None:
    joint = of_shared()
    sums = [x for x in joint.backward if isinstance(x, KernelLine) and not x.key]
    assert {x.target for x in sums} >= {"aten.add_.Tensor"}
    for line in sums:
        if line.target == "aten.add_.Tensor":
            at = joint.backward.index(line)
            first = line.reads[0]
            later = {name for other in joint.backward[at + 1 :] for name in other.reads}
            assert first not in later


def test_reshards_of_gradients_are_those_of_the_table() -> None:
    """One for each differentiated move that has a backward, but for unread ones."""
    for stage in random_stages():
        joint = differentiate(stage)
        found = Counter(x.move.value for x in members(joint.backward, GradientMove))
        wanted: Counter[str] = Counter()
        for i in stage.differentiated:
            line = stage.body[i]
            moves = line.moves if isinstance(line, GatherLine) else (line,)
            for move in moves:
                if isinstance(move, MoveLine) and move.move.backward != "identity":
                    wanted[move.value] += move.has_grad
        assert found == wanted


def test_reductions_run_beside_matmuls_of_weight_gradients() -> None:
    """Each is begun and waited for once, and nothing that communicates is between the two."""
    n_begun = 0
    for stage in (*random_stages(), *planned_stages(None)):
        lines = differentiate(stage).backward
        for i, line in enumerate(lines):
            if isinstance(line, StartLine) and is_of_activations(line):
                n_begun += 1
                waits = [
                    k
                    for k, other in enumerate(lines)
                    if isinstance(other, WaitLine) and other.pending == line.pending
                ]
                assert len(waits) == 1 and waits[0] > i
                between = lines[i + 1 : waits[0]]
                assert all(isinstance(x, KernelLine | ReadyLine | FreeLine) for x in between)
                assert any(isinstance(x, KernelLine) and "mm" in x.target for x in between)
                assert line.reads[0] not in {n for x in between for n in x.writes}
    assert n_begun > 0


def is_of_activations(line: StartLine) -> bool:
    return isinstance(line.move, GradientMove) and line.move.phase == "backward"


def zero_3() -> list[JointProgram]:
    stages = [s for s in planned_stages(None) if any(isinstance(x, GatherLine) for x in s.body)]
    assert stages
    return [differentiate(stage) for stage in stages]


def test_parameters_are_gathered_one_block_ahead() -> None:
    """A call for a block, begun when the one before is there; only the first is waited for."""
    for joint in zero_3():
        for lines in (joint.forward, joint.backward):
            calls = [x for x in lines if members([x], GatherLine)]
            assert len(calls) >= 3
            assert all(isinstance(x, StartLine) for x in calls[1:])
            assert isinstance(calls[0], StartLine) or lines[0] is calls[0]
            arrivals = [i for i, x in enumerate(lines) if is_arrival(x)]
            begins = [i for i, x in enumerate(lines) if x in calls[1:]]
            for here, begun, following in zip(arrivals, begins, arrivals[1:], strict=False):
                assert here < begun < following
                between = lines[here + 1 : begun]
                assert all(isinstance(x, FreeLine | StartLine) for x in between)
                assert any(isinstance(x, CallLine | KernelLine) for x in lines[begun:following])


def is_arrival(line: JointLine) -> bool:
    call = line.move if isinstance(line, WaitLine) else line
    return isinstance(call, FusedGathers | GatherLine)


def test_gradients_are_reduced_one_block_behind() -> None:
    """A call for a block, waited for when the next one's begins, or at the end."""
    for joint in zero_3():
        lines = joint.backward
        starts = [i for i, x in enumerate(lines) if members([x], GradientMove) and is_start(x)]
        assert len(starts) >= 4
        for i, following in zip(starts, [*starts[1:], len(lines)], strict=True):
            (start, at) = lines[i], wait_of(lines, i)
            assert isinstance(start, StartLine)
            assert i < at < following
            late = lines[at + 1 : following]
            sums = [x for x in late if isinstance(x, KernelLine)]
            assert not any(x.key for x in sums), "waited for in time"


def test_no_gradient_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is never reduced, as once happened where its last parameter was frozen."""
    stage = zero_3()[0].stage
    monkeypatch.setattr("autopar.passes.backward.joint.reduced_runs", lambda stage: {})
    with pytest.raises(AssertionError, match=r"no line takes the gradients of .*_gathered"):
        differentiate(stage)


def test_a_run_is_reduced_where_its_last_parameter_is_frozen() -> None:
    torch.manual_seed(0)
    model = llama(2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("down_proj" not in name and "layernorm" not in name)
    plan = autopar.plan(model, machine((1, 2)), tokens(0), manual=Manual(dp=2, zero=3))
    assert plan.bound is not None
    joint = differentiate(plan.bound.pipeline.stages[0])
    reduced = Counter(x.move.value for x in members(joint.backward, GradientMove))
    trained = [p.name for p in joint.stage.parameters if p.requires_grad]
    assert reduced.total() == len(trained)


def is_start(line: JointLine) -> bool:
    return isinstance(line, StartLine)


def wait_of(lines: Sequence[JointLine], i: int) -> int:
    start = lines[i]
    assert isinstance(start, StartLine)
    (at,) = (
        k for k, x in enumerate(lines) if isinstance(x, WaitLine) and x.pending == start.pending
    )
    return at


def test_lowered_operators_hand_on_what_their_backward_needs() -> None:
    kinds = set()
    for stage in random_stages():
        joint = differentiate(stage)
        for line in joint.forward:
            if isinstance(line, FunctionLine):
                assert line.kept in joint.saved
                kinds.add(line.call.lowered)
            elif isinstance(line, CallLine):
                assert not (line.lowered and line.has_grad)
    assert len(kinds) >= 2


def begun_early(lines: Sequence[JointLine]) -> Counter[str]:
    """The names of parameters of each call that gathers, and begins early."""
    calls = [members([line], GatherLine) for line in lines if isinstance(line, StartLine)]
    return Counter(", ".join(one.parameter for one in call) for call in calls if call)


def test_predictions_hide_no_gather_that_does_not_begin_early() -> None:
    """Those of several moves do not, nor the first; a tied embedding for the head does."""
    n_in_place = 0
    for stage in (*random_stages(), *planned_stages(None)):
        joint, calls = differentiate(stage), overlap_of(stage)
        for lines, apart in ((joint.forward, calls.forward), (joint.backward, calls.backward)):
            hidden = Counter(c.tensor for c in apart.overlapped if c.phase == "param_gather")
            assert hidden <= begun_early(lines)
            n_in_place += sum(call.in_place for call in apart.waited)
    assert n_in_place > 0, "some need several moves"


def test_all_gathers_but_the_first_are_hidden() -> None:
    plan = autopar.plan(
        dropped_gpt2(4), machine((1, 4)), tokens(0), manual=Manual(dp=2, tp=2, zero=3)
    )
    assert plan.bound is not None
    (stage,) = plan.bound.pipeline.stages
    calls = overlap_of(stage).forward
    assert [c.tensor for c in calls.waited if c.phase == "param_gather"] == [
        "transformer.wte.weight"
    ]
    assert begun_early(differentiate(stage).forward) == Counter(
        c.tensor for c in calls.overlapped if c.phase == "param_gather"
    )
    assert begun_early(differentiate(stage).forward)["transformer.wte.weight"] == 1, "for the head"
