"""Live bytes of a backward in two actions: what each action leaves and needs, and whole steps."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch

from autopar import Manual
from autopar.cost.memory import StageMemory, gradients_under_way, peak_of_row, stage_memory
from autopar.cost.price import peak_of_stage
from autopar.manual import Recompute
from autopar.measured import LiveBytes
from autopar.planning import Bound
from autopar.program.lines import Pipeline
from autopar.runtime.execute.stage_runner import StepInputs
from autopar.schedule import ORDERS
from tests.helpers.harness import generated_code
from tests.helpers.nightly import nightly, sampled
from tests.helpers.pools import Pool
from tests.helpers.ranks import Rank, named_inputs, random_parameters, run_ranks
from tests.helpers.recompute_plans import batch
from tests.helpers.whole_steps import WholeStep, bytes_of_each
from tests.runtime.test_recompute_memory import bound

__all__ = ["generated_code"]

CLOSE, EXACT = 0.03, 0.01
MODES: tuple[Recompute | None, ...] = (None, "full", "selective", "attention-core")
# Action -> of each microbatch, the bytes that it adds, and its peak above what was held.
Course = dict[str, list[tuple[int, int]]]


def course(of: Bound, rank: Rank) -> Course:
    """All forwards, then all first parts of backward, then all second ones."""
    (runner,), inputs = rank.executor.stages.values(), named_inputs(of.analysis.program, batch())
    rank.executor.step(rank.stored, inputs)  # makes constants
    for parameter in rank.stored.values():
        parameter.grad = None
    found: Course = {}
    with torch.no_grad(), LiveBytes([*rank.stored.values(), *inputs.values()]) as live:
        runner.begin(StepInputs(rank.stored, inputs, {}, 3, False))
        for name, act in (
            ("forward", lambda k: runner.forward(k, {})),
            ("backward", lambda k: runner.backward_input(k, {})),
            ("weights", runner.backward_weight),
        ):
            found[name] = []
            for k in range(runner.program.n_microbatches):
                before_bytes = live.live_bytes
                live.reset_peak()
                act(k)
                added_bytes = live.live_bytes - before_bytes
                found[name].append((added_bytes, live.peak_bytes - before_bytes))
    return found


def foretold(memory: StageMemory, n_microbatches: int) -> Course:
    """The same of a prediction."""
    kept, waiting = memory.kept_bytes, memory.waiting_bytes
    added = {"forward": kept, "backward": waiting - kept, "weights": -waiting}
    found = {
        name: [(added_bytes, (memory.first, memory.later)[k > 0][name]) for k in range(n)]
        for n in (n_microbatches,)
        for name, added_bytes in added.items()
    }
    (first_bytes, peak_bytes), *later = found["weights"]
    found["weights"] = [(first_bytes + memory.gradient_bytes, peak_bytes), *later]
    return found  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("kind", "mode"),
    sampled(
        [*itertools.product(("plain", "dropped", "eager"), MODES)],
        [("plain", None), ("dropped", "selective"), ("eager", "full")],
    ),
)
def test_each_action_leaves_and_needs_as_much_as_is_predicted(
    kind: str, mode: Recompute | None
) -> None:
    of = bound(kind, mode, Manual(microbatch_size=4))
    (stage,) = (stage.split_backward() for stage in of.pipeline.stages)
    pipeline, program = replace(of.pipeline, stages=(stage,)), of.analysis.program
    parameters = {n: p.detach().float() for n, p in random_parameters(program, 0).items()}
    (measured,) = run_ranks(program, pipeline, parameters, partial(course, of))
    predicted = foretold(stage_memory(stage, "adamw"), stage.n_microbatches)
    for name in predicted:
        for (added, peak), expected in zip(measured[name], predicted[name], strict=True):
            assert expected == pytest.approx((added, peak), rel=EXACT), name
    between = stage_memory(stage, "adamw").waiting_bytes
    assert between > 0, "what gradients of weights need is kept"


def predicted_peak(pipeline: Pipeline, device: int) -> float:
    schedule = pipeline.schedule
    stages = schedule.stages_on(device)
    memories = {k: stage_memory(pipeline.stages[k], "adamw") for k in stages}
    under_way = {k: gradients_under_way(schedule, k) for k in stages}
    return peak_of_row(schedule.rows[device], memories, under_way).peak_bytes


LAYOUTS = [
    Manual(microbatch_size=4),
    Manual(),
    Manual(pp=2, microbatch_size=4),
    Manual(dp=2, zero=2, microbatch_size=4),
    Manual(dp=2, zero=3, microbatch_size=4),
]


@pytest.mark.parametrize(
    ("manual", "mode"),
    sampled(
        [*itertools.product(LAYOUTS, (None, "full"))],
        [(LAYOUTS[0], None), (LAYOUTS[2], "full"), (LAYOUTS[4], None)],
    ),
)
def test_the_peak_of_a_step_is_that_of_its_actions(manual: Manual, mode: Recompute | None) -> None:
    """Without a split backward, where both laws hold."""
    pipeline = bound("dropped", mode, manual).pipeline
    for k in range(pipeline.n_stages):
        expected = peak_of_stage(pipeline, k, "adamw")
        assert predicted_peak(pipeline, k) == pytest.approx(expected, rel=1e-12)


@nightly
def test_peaks_of_two_processes(workers: Pool) -> None:
    """Zero-bubble schedules, in which several microbatches wait for the gradients of weights."""
    pipelines, steps = [], []
    for kind, mode in itertools.product(("plain", "eager"), MODES):
        of = bound(kind, mode, Manual(pp=2, microbatch_size=4))
        pipelines.append(Pipeline.of(of.pipeline.stages, of.pipeline.meshes, ORDERS["zero-bubble"]))
        steps.append(WholeStep.of(of.analysis.program, pipelines[-1], batch()))
    for rank, sizes in enumerate(workers(2).run(bytes_of_each, steps)):
        for pipeline, (measured, _) in zip(pipelines, sizes, strict=True):
            assert predicted_peak(pipeline, rank) == pytest.approx(measured, rel=CLOSE)
