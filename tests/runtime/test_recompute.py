"""Recomputed blocks on thread ranks: what they compute and communicate; how plans record them."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar import Manual, Plan
from autopar.capture import reference_step
from autopar.errors import NotSupportedError, PlanError, VerificationError
from autopar.manual import Recompute
from autopar.passes.analysis import recomputed_operators
from autopar.passes.backward import differentiate
from autopar.program.communication import Forward, Gather, Start, backward_order, rank_collectives
from autopar.program.graph import Program
from autopar.program.lines import CallLine, GatherLine, MoveLine, Pipeline, Segment, StageProgram
from autopar.runtime.groups import CollectiveCall
from autopar.schedule import forward_only
from autopar.verifier import verify_program
from tests.conftest import Golden
from tests.helpers.harness import OPERATOR_MODES, foretold_calls, generated_code
from tests.helpers.jobs import llama, machine, rows, tokens
from tests.helpers.models.dropout_models import dropped_gpt2, eager_gpt2
from tests.helpers.models.recompute_models import Blocks, recomputing
from tests.helpers.nightly import nightly, one_in, sampled
from tests.helpers.plans import bound_of
from tests.helpers.ranks import (
    TOLERANCE,
    Rank,
    above,
    named_inputs,
    pipeline_step,
    random_parameters,
    relative_error,
    run_ranks,
)

__all__ = ["generated_code"]


# Name -> (mesh, recipe).
HOW: dict[str, tuple[tuple[int, int], Manual]] = {
    "alone": ((1, 1), Manual()),
    "dp": ((1, 2), Manual(dp=2, microbatch_size=4)),
    "tp": ((1, 2), Manual(tp=2)),
    "sp": ((1, 2), Manual(tp=2, sp=True, microbatch_size=8)),
    "zero-2": ((1, 2), Manual(dp=2, zero=2, microbatch_size=4)),
    "zero-3": ((1, 2), Manual(dp=2, zero=3, microbatch_size=4)),
    "1f1b": ((1, 2), Manual(pp=2, microbatch_size=4)),
    "dp, tp, 1f1b": ((2, 4), Manual(dp=2, tp=2, pp=2, microbatch_size=2)),
}
MODELS: dict[str, Callable[[int], nn.Module]] = {"gpt2": dropped_gpt2, "llama": llama}
ATTENTIONS = {**MODELS, "eager gpt2": eager_gpt2}


@lru_cache
def planned(model: str, how: str, mode: Recompute | None = None) -> Plan:
    if mode is not None:
        return recomputing(planned(model, how), mode)
    shape, manual = HOW[how]
    torch.manual_seed(0)
    return autopar.plan(
        ATTENTIONS[model](2), machine(shape), tokens(0), precision="fp64", manual=manual
    )


def pipeline_of(plan: Plan) -> Pipeline:
    return bound_of(plan).pipeline


def program_of(plan: Plan) -> Program:
    return bound_of(plan).analysis.program


def step(plan: Plan, seed: int = 0) -> tuple[dict[str, float], list[Counter[Any]]]:
    """Errors above the tolerance, and every rank's collectives."""
    found, calls = pipeline_step(program_of(plan), pipeline_of(plan), tokens(seed), seed)
    rows = [
        Counter(
            (c.kind, c.phase, c.axes[0] if len(c.axes) == 1 else c.axes, c.size_bytes) for c in made
        )
        for made in calls
    ]
    return above(found), rows


def foretold(plan: Plan, rank: int) -> Counter[Any]:
    rows: Counter[Any] = Counter()
    for c in rank_collectives(pipeline_of(plan), rank):
        rows[c.kind, c.phase, c.axis, c.size_bytes] += c.count
    return rows


CELLS = [
    *itertools.product(OPERATOR_MODES, HOW, MODELS),
    *(("gathers", "sp", model) for model in MODELS),
    *(("attention-core", how, "eager gpt2") for how in HOW),
]
# Each layout once, by turns with each mode and model; and modes that need more of a layout.
BY_DAY: list[tuple[str, str, str]] = [
    ("gathers", "sp", "llama"),
    *zip(itertools.cycle(OPERATOR_MODES), HOW, itertools.cycle(MODELS)),
    ("full", "zero-3", "llama"),
    ("attention-core", "alone", "eager gpt2"),
]


@one_in(6)
@pytest.mark.parametrize(("mode", "how", "model"), sampled(CELLS, BY_DAY))
def test_parity(mode: Recompute, how: str, model: str) -> None:
    plan = planned(model, how, mode)
    assert all(stage.segments for stage in pipeline_of(plan).stages)
    wrong, calls = step(plan)
    assert wrong == {}
    assert calls == [foretold(plan, rank) for rank in range(len(calls))]


def test_calls_are_in_the_order_foretold() -> None:
    """Ranks run recomputed collectives in the order that the verifier checks."""
    cases: list[tuple[str, Recompute]] = [
        ("sp", "full"), ("zero-3", "full"), ("sp", "selective")
    ]  # fmt: skip
    for how, mode in cases:
        plan = planned("llama", how, mode)
        (stage,) = pipeline_of(plan).stages
        _, calls = pipeline_step(program_of(plan), pipeline_of(plan), tokens(0), 0)
        found, wanted = list(calls[0]), list(foretold_calls(stage))
        assert Counter(found) == Counter(wanted)
        # Parameters are gathered ahead, and their gradients reduced behind.
        assert [c for c in found if not of_parameters(c)] == (
            [c for c in wanted if not of_parameters(c)]
        )


def of_parameters(call: CollectiveCall) -> bool:
    return call.phase in ("param_gather", "grad_sync")


@pytest.mark.parametrize("model", ATTENTIONS)
def test_cores_are_attention(model: str) -> None:
    """Fused, with dropout in GPT-2, but for the model that writes the primitives itself."""
    analysis = bound_of(planned(model, "alone")).analysis
    found = recomputed_operators(analysis, "attention-core")
    operators = {o.name: str(o.call.op) for o in analysis.operators}
    for item in found:
        ops = [operators[name] for name in item.operators]
        if model == "llama":
            assert ops == ["aten.scaled_dot_product_attention.default"]
        elif model == "gpt2":
            assert ops == ["autopar.attention_dropout.default"]
        else:
            assert (ops[0], ops[-1]) == ("aten.matmul.default",) * 2
            assert {"aten.softmax.int", "autopar.dropout.default"} < set(ops)
            assert "aten.addmm.default" not in ops
    assert len(found) == 2


def plan_blocks(mode: str, manual: Manual, **options: Any) -> Plan:
    torch.manual_seed(0)
    mesh = machine((1, manual.n_ranks))
    return autopar.plan(
        Blocks(**options), mesh, rows(0, "x"), precision="fp64", manual=manual, recompute=mode
    )


def test_golden_program(golden: Golden) -> None:
    code = plan_blocks("selective", Manual(tp=2)).code()
    golden("recomputed_stage_0.txt", code["stage_0.py"])


def test_statistics_change_once() -> None:
    """A recomputed batch norm reads the same statistics again and changes them only once."""
    for manual in (Manual(dp=2), Manual(pp=2)):
        plan = plan_blocks("full", manual, norm=nn.BatchNorm1d)
        assert all(s.segments for s in pipeline_of(plan).stages)
        found, _ = pipeline_step(program_of(plan), pipeline_of(plan), rows(0, "x"), 0)
        assert any("running_mean" in name for name in found)
        assert above(found) == {}


def test_nothing_to_recompute_is_said() -> None:
    with pytest.raises(NotSupportedError, match="recompute='full': Blocks has no repeated blocks"):
        plan_blocks("full", Manual(), n_blocks=1)
    with pytest.raises(NotSupportedError, match="recompute='attention-core': no attention"):
        plan_blocks("attention-core", Manual())


class Kernels(TorchDispatchMode):
    """Counts how often each operator runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def kernels(plan: Plan) -> Counter[str]:
    """The counts of a step on rank 0."""
    program = program_of(plan)

    def work(rank: Rank) -> Counter[str]:
        with Kernels() as found:
            rank.executor.step(rank.stored, named_inputs(program, tokens(0)))
        return found.counts

    return run_ranks(program, pipeline_of(plan), random_parameters(program, 0), work)[0]


# Kernels of a layer that recompute adds to a step. The last dropout and the last matmul come after
# all that backward needs, so they do not run again. Kept matmuls and kept attention do not run
# again either. The second matmul of attention by primitives saves only its inputs, so
# attention-core does not run it again; fused attention saves its result.
ADDMM, BMM, DROPOUT = "aten.addmm.default", "aten.bmm.default", "autopar.dropout.default"
NORM, TANH = "aten.native_layer_norm.default", "aten.tanh.default"
FUSED = "autopar.attention_dropout_forward.default"
AGAIN: dict[str, dict[Recompute, dict[str, int]]] = {
    "eager gpt2": {
        "full": {ADDMM: 3, BMM: 2, DROPOUT: 2, FUSED: 0, NORM: 2, TANH: 1},
        "selective": {ADDMM: 0, BMM: 0, DROPOUT: 2, FUSED: 0, NORM: 2, TANH: 1},
        "attention-core": {ADDMM: 0, BMM: 1, DROPOUT: 1, FUSED: 0, NORM: 0, TANH: 0},
    },
    "gpt2": {
        "full": {ADDMM: 3, BMM: 0, DROPOUT: 1, FUSED: 1, NORM: 2, TANH: 1},
        "selective": {ADDMM: 0, BMM: 0, DROPOUT: 1, FUSED: 0, NORM: 2, TANH: 1},
        "attention-core": {ADDMM: 0, BMM: 0, DROPOUT: 0, FUSED: 1, NORM: 0, TANH: 0},
    },
}
# Kernel -> the operator of the program that runs it.
CALLED = {
    BMM: "aten.matmul.default", FUSED: "autopar.attention_dropout.default",
    NORM: "aten.layer_norm.default",
}  # fmt: skip


def test_what_sequence_parallelism_gathers_is_kept_in_shards() -> None:
    """Gathers of a block run again, and no operator does."""
    (stage,) = pipeline_of(planned("gpt2", "sp", "gathers")).stages
    assert stage.segments and not lines_again(stage)
    saved = differentiate(stage).saved
    for segment in stage.segments:
        moves = [stage.body[i] for i in segment.again]
        assert moves and all(isinstance(m, MoveLine) for m in moves)
        for move in moves:
            assert isinstance(move, MoveLine) and move.move.forward == "all_gather"
            assert move.out.name not in saved
    plain, lean = (planned("gpt2", "sp", mode).predicted for mode in (None, "gathers"))
    assert lean.peak_bytes < plain.peak_bytes


@pytest.mark.parametrize("model", AGAIN)
@pytest.mark.parametrize("mode", OPERATOR_MODES)
def test_kernels_that_run_again(mode: Recompute, model: str) -> None:
    plan, wanted = planned(model, "alone", mode), AGAIN[model][mode]
    before, after = kernels(planned(model, "alone")), kernels(plan)
    assert {op: after[op] - before[op] for op in wanted} == {op: 2 * n for op, n in wanted.items()}
    (stage,) = pipeline_of(plan).stages
    again = Counter(line.target for line in lines_again(stage))
    foretold_again = {op: again[CALLED.get(op, op)] for op in wanted}
    assert foretold_again == {op: 2 * n for op, n in wanted.items()}


def lines_again(stage: StageProgram) -> list[CallLine]:
    """The operators that backward runs again."""
    works = (w for w in backward_order(stage) if isinstance(w, Forward))
    lines = (stage.body[w.position] for w in works)
    return [line for line in lines if isinstance(line, CallLine)]


def test_time_is_that_of_the_lines() -> None:
    """At one FLOP per second, recompute adds the time of the lines that run again."""
    for mode in OPERATOR_MODES:
        plan, plain = planned("gpt2", "dp", mode), planned("gpt2", "dp")
        (stage,) = pipeline_of(plan).stages
        again_s = sum(line.forward_s for line in lines_again(stage))
        assert again_s > 0
        longer_s = plan.predicted.compute_time_s - plain.predicted.compute_time_s
        assert longer_s == pytest.approx(stage.n_microbatches * again_s)


def gather_of(stage: StageProgram, i: int) -> str:
    line = stage.body[i]
    assert isinstance(line, GatherLine)
    return line.parameter


def test_gathers_of_a_block_are_done_once_for_its_backward() -> None:
    """ZeRO-3 gathers a block's parameters once more; backward reads what recompute gathered. The
    bias of its last matmul, which does not run again, is not gathered."""
    (stage,) = pipeline_of(planned("gpt2", "zero-3", "full")).stages
    inside = {i for s in stage.segments for i in range(s.start, s.stop)}
    gathers = {i for i in inside if isinstance(stage.body[i], GatherLine)}
    begun = [w.call if isinstance(w, Start) else w for w in backward_order(stage)]
    again = Counter(i for call in begun if isinstance(call, Gather) for i in call.positions)
    assert len(gathers) > 10
    for i in gathers:
        assert again[i] == (not gather_of(stage, i).endswith("mlp.c_proj.bias"))


def test_partial_sums_are_not_kept_besides_what_they_add_up_to() -> None:
    """With sp, the partial sum of a matmul is n times as large as the shard that is kept."""
    (stage,) = pipeline_of(planned("gpt2", "sp", "selective")).stages
    saved = differentiate(stage).saved
    for segment in stage.segments:
        others = {i: stage.body[i] for i in range(segment.start, segment.stop)}
        for i in segment.again:
            del others[i]
        sums = [x for x in others.values() if isinstance(x, MoveLine) and x.move.name == "p_to_s"]
        (product,) = (x for x in others.values() for y in sums if y.source in x.writes)
        assert isinstance(product, CallLine) and product.target == "aten.mm.default"
        assert set(product.writes).isdisjoint(saved)
    plain, found = kernels(planned("gpt2", "tp")), kernels(planned("gpt2", "tp", "selective"))
    assert found["aten.mm.default"] == plain["aten.mm.default"] > 0


@pytest.mark.parametrize(
    "mode", ["full", *(pytest.param(m, marks=nightly) for m in OPERATOR_MODES[1:])]
)
def test_a_saved_plan_runs_the_same_again(mode: Recompute, tmp_path: Path) -> None:
    shape, manual = HOW["1f1b"]
    plan = autopar.plan(
        dropped_gpt2(), machine(shape), tokens(0), precision="fp64", manual=manual, recompute=mode
    )
    assert plan.code() == planned("gpt2", "1f1b", mode).code()
    assert all(f"{mode} until" in text for s in plan.data.stages for text in s.recomputed.values())
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json").bind(dropped_gpt2(2))
    assert again.data == plan.data
    assert again.code() == plan.code()
    assert "# again: transformer.h.1" in "".join(again.code().values())
    assert again.predicted == plan.predicted
    assert f"backward: stage 1, 1 in mode {mode}: block 1 of 2 (transformer.h.*)" in plan.explain()


def test_a_plan_without_the_entry_recomputes_nothing(tmp_path: Path) -> None:
    plan = planned("gpt2", "dp", "full")
    raw = json.loads(plan.data.to_json())
    for stage in raw["stages"]:
        del stage["recomputed"]
    (tmp_path / "plan.json").write_text(json.dumps(raw))
    old = Plan.load(tmp_path / "plan.json").bind(dropped_gpt2(2))
    assert old.code() == planned("gpt2", "dp").code()


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda first, last: {"h.9/add": last}, "'h.9/add', which the captured graph does not"),
        (lambda first, last: {first: "full until h.9/add"}, "the captured graph does not have"),
        (lambda first, last: {first: "most until x"}, "'most until x' is not `MODE until KEY`"),
        (lambda first, last: {first: "full"}, "'full' is not `MODE until KEY`"),
        (lambda first, last: {last[11:]: f"full until {first}"}, "ends before it begins"),
        (lambda first, last: {first: last, last[11:]: last}, "overlaps another range"),
    ],
)
def test_an_edited_plan_is_refused(edit: Callable[[str, str], Any], reason: str) -> None:
    plan = planned("gpt2", "dp", "full")
    (stage,) = plan.data.stages
    first, last = next(iter(stage.recomputed.items()))
    assert last.startswith("full until ")
    data = replace(plan.data, stages=(replace(stage, recomputed=edit(first, last)),))
    with pytest.raises(PlanError, match=reason):
        Plan(data).bind(dropped_gpt2(2))


def test_evaluation_runs_nothing_again() -> None:
    """Without gradients a segment runs once."""
    plan = plan_blocks("full", Manual())
    program, whole = program_of(plan), pipeline_of(plan)

    def work(rank: Rank) -> tuple[Any, ...]:
        return rank.executor.forward(rank.stored, named_inputs(program, rows(0, "x")))

    pipeline = Pipeline.of(whole.stages, whole.meshes, forward_only)
    parameters = random_parameters(program, 0)
    loss, *_ = run_ranks(program, pipeline, parameters, work)[0]
    wanted, _ = reference_step(program, parameters, rows(0, "x"))
    assert wanted is not None
    assert relative_error(loss, wanted.detach()) <= TOLERANCE
    assert not loss.requires_grad


def test_faults_of_segments_are_found() -> None:
    (stage,) = pipeline_of(planned("gpt2", "sp", "selective")).stages
    verify_program(stage)
    first, *others = stage.segments
    lines = range(first.start, first.stop)
    move = next(i for i in lines if isinstance(stage.body[i], MoveLine))
    late = stage.body[move]
    assert isinstance(late, MoveLine)
    body = (*stage.body[:move], replace(late, phase="loss"), *stage.body[move + 1 :])
    every = _with(stage, replace(first, again=tuple(lines)), others)
    faults: list[tuple[StageProgram, str]] = [
        (_with(stage, replace(first, stop=move + 1, again=()), others), "needs nothing"),
        (_with(stage, replace(first, again=(first.stop,)), others), "some are outside of it"),
        (replace(stage, segments=(*others, first)), "no range of the body"),
        (replace(every, body=body), "cannot run again"),
    ]
    for program, reason in faults:
        with pytest.raises(VerificationError, match=reason):
            verify_program(program)


def _with(stage: StageProgram, first: Segment, others: Sequence[Segment]) -> StageProgram:
    return replace(stage, segments=(first, *others))
