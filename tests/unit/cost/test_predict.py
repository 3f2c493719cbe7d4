"""Predictions: every collective as it is recorded in a real step, buckets, and step times."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from autopar.codegen import emit
from autopar.cost.laws import CostModel
from autopar.cost.memory import peak_memory
from autopar.cost.price import collectives_of, predict
from autopar.errors import NotSupportedError
from autopar.mesh import LogicalMesh
from autopar.passes.analysis import Analysis
from autopar.passes.backward import differentiate
from autopar.passes.intra import Constraints, PlacementRequest, choose
from autopar.passes.lowering import lower
from autopar.plans import Predicted
from autopar.program import (
    BUCKET_BYTES,
    Pipeline,
    StageProgram,
    Strategy,
    batch_shards,
    buckets,
    primitive_bytes,
    regathered,
    step_calls,
)
from autopar.runtime.execute import Environment, Executor, delivery, load_code
from autopar.runtime.groups import Recorder
from autopar.runtime.launch import ThreadWorld, run_threads
from tests.helpers.harness import (
    abstract_cost,
    free_problem,
    generated_code,
    model_case,
    random_strategy,
    zero_strategy_of,
)

__all__ = ["generated_code"]

Row = tuple[str, str, str | tuple[str, ...], int]


def recorded(
    analysis: Analysis, program: StageProgram, cost: CostModel, batch: Mapping[str, Tensor],
    local_rows: bool = False,
) -> list[Counter[Row]]:  # fmt: skip
    """The collectives that each thread rank records in one step."""
    code, _ = load_code("stage_0.py", emit(differentiate(program)))
    captured = analysis.program
    inputs = {name: batch[info.path] for name, info in captured.inputs.items()}
    constants = {name: compute() for name, compute in captured.constants.items()}
    sizes = cost.mesh.sizes

    def work(world: ThreadWorld) -> Counter[Row]:
        at = cost.mesh.coordinate(world.rank)
        stored = {p.name: _shard(p.shape, p.stored.shape) for p in program.parameters}
        environment = Environment(torch.device("cpu"), world.make_groups(cost.mesh))
        executor = Executor(
            Pipeline.single(program, cost.mesh), world.rank, code, environment, constants
        )
        mine = inputs
        if local_rows:
            mine = {name: _own_rows(program, name, x, sizes, at) for name, x in inputs.items()}
        with Recorder() as recorder:
            executor.step(stored, mine, is_local=local_rows)
        return Counter(
            (c.kind, c.phase, c.axes[0] if len(c.axes) == 1 else c.axes, c.size_bytes)
            for c in recorder.calls
        )

    found: list[Counter[Row]] = run_threads(work, cost.mesh.n_ranks)
    return found


def _shard(shape: tuple[int, ...], local: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(math.prod(shape))
    values = torch.randn(local, dtype=torch.float64, generator=generator) * 0.3
    return values.requires_grad_()


def _own_rows(
    program: StageProgram, name: str, whole: Tensor, sizes: tuple[int, ...], at: tuple[int, ...]
) -> Tensor:
    """The contiguous block of rows that a rank is given."""
    item = next(d for d in program.delivered if d.source == name)
    n_blocks = batch_shards(item, sizes)
    return whole.chunk(n_blocks)[delivery.batch_index(item, sizes, at)]


def mesh_of(program: StageProgram) -> LogicalMesh:
    return abstract_cost(program.axis_sizes).mesh


def predicted_rows(program: StageProgram, local_inputs: bool = False) -> Counter[Row]:
    rows: Counter[Row] = Counter()
    pipeline = Pipeline.single(program, mesh_of(program))
    for c in collectives_of(pipeline, local_inputs=local_inputs):
        rows[c.kind, c.phase, c.axis, c.size_bytes] += c.count
    return rows


@pytest.mark.parametrize("n_microbatches", [1, 4])
@pytest.mark.parametrize("sizes", [(2,), (2, 2)])
@pytest.mark.parametrize("model", ["mlp", "gpt2"])
def test_recorded_collectives_are_the_predicted_ones(
    model: str, sizes: tuple[int, ...], n_microbatches: int
) -> None:
    case, cost = model_case(model), abstract_cost(sizes)
    problem = free_problem(model, sizes, n_microbatches)
    for seed in range(4):
        rng = random.Random(seed)
        strategy = random_strategy(case.analysis, problem, n_microbatches, rng)
        program = lower(case.analysis, strategy, cost)
        wanted = predicted_rows(program)
        assert recorded(case.analysis, program, cost, case.batch(seed)) == (
            [wanted] * cost.mesh.n_ranks
        )


@lru_cache
def zero_strategy(model: str, stage: int, n_microbatches: int, n_ranks: int = 2) -> Strategy:
    """Data parallelism with ZeRO `stage` for every parameter that can be sharded."""
    analysis, cost = model_case(model).analysis, abstract_cost((n_ranks,))
    return zero_strategy_of(analysis, cost, stage, n_microbatches)


@pytest.mark.parametrize("n_microbatches", [1, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("model", ["mlp", "gpt2"])
def test_recorded_collectives_of_zero(model: str, stage: int, n_microbatches: int) -> None:
    case, cost = model_case(model), abstract_cost((2,))
    strategy = zero_strategy(model, stage, n_microbatches)
    program = lower(case.analysis, strategy, cost)
    wanted = predicted_rows(program)
    assert recorded(case.analysis, program, cost, case.batch(0)) == [wanted] * 2
    kinds: Counter[tuple[str, str]] = Counter()
    for (kind, phase, _, _), count in wanted.items():
        kinds[kind, phase] += count
    gathers, scatters = kinds["all_gather", "param_gather"], kinds["reduce_scatter", "grad_sync"]
    # Small parameters of one dtype share a bucket; ZeRO-3 gathers those of a block together.
    if stage < 3:
        assert kinds["all_reduce", "grad_sync"] == (stage == 0)
        assert gathers == (stage > 0)
        assert scatters == {0: 0, 1: 1, 2: n_microbatches}[stage]
    else:
        # Three numbered layers; the two embeddings, a block, the last norm, and the head.
        n_runs = {"mlp": 3, "gpt2": 5}[model]
        n_again = sum(map(len, regathered(program).values()))
        assert scatters == n_microbatches * n_runs
        assert gathers == n_microbatches * (n_runs + n_again)
        assert 0 < n_again < n_runs


def test_own_rows_add_up_the_divisors() -> None:
    case, cost = model_case("gpt2"), abstract_cost((2,))
    program = lower(case.analysis, zero_strategy("gpt2", 0, 2), cost)
    wanted = predicted_rows(program, local_inputs=True)
    found = recorded(case.analysis, program, cost, case.batch(0), local_rows=True)
    assert found == [wanted] * 2
    extra = wanted - predicted_rows(program)
    assert [(kind, phase, count) for (kind, phase, _, _), count in extra.items()] == (
        [("all_reduce", "loss", 1)]
    )


def test_collectives_name_tensors_axes_and_the_stage() -> None:
    case, cost = model_case("mlp"), abstract_cost((2, 2))
    problem = free_problem("mlp", (2, 2), 1)
    strategy = random_strategy(case.analysis, problem, 1, random.Random(3))
    program = lower(case.analysis, strategy, cost)
    rows = collectives_of(Pipeline.single(program, cost.mesh))
    parameters = {p.name for p in program.parameters}
    assert rows
    for row in rows:
        assert row.stage == 0
        assert row.count >= 1
        assert row.axis in ("dp", "tp", ("dp", "tp"))
        if row.phase in ("param_gather", "grad_sync"):
            assert set(row.tensor.split(", ")) <= parameters
    assert sum(row.count for row in rows) == len(list(step_calls(program)))


def test_an_optimizer_with_collectives_of_its_own_is_refused() -> None:
    program = lower(model_case("mlp").analysis, zero_strategy("mlp", 0, 1), abstract_cost((2,)))
    with pytest.raises(NotSupportedError, match="adafactor"):
        collectives_of(Pipeline.single(program, mesh_of(program)), "adafactor")


def test_buckets_keep_order_keys_apart_and_the_bound() -> None:
    steps = [[("a", 4)], [("b", 1)], [("a", 5)], [("a", 3)], [], [("a", 99)], [("a", 1)]]
    found = [(b.key, b.members, b.size_bytes) for b in buckets(steps, 9)]
    assert found == [
        ("a", (0, 2), 9), ("a", (3,), 3), ("a", (5,), 99), ("a", (6,), 1), ("b", (1,), 1)
    ]  # fmt: skip


def test_later_steps_wait_for_the_next_round() -> None:
    steps = [[("a", 1), ("b", 2)], [("b", 3)]]
    assert [(b.key, b.members) for b in buckets(steps, 99)] == [
        ("a", (0,)), ("b", (1,)), ("b", (0,))
    ]  # fmt: skip


def test_sizes_of_primitives() -> None:
    assert primitive_bytes("all_gather", 8, 4) == (32, 32)
    assert primitive_bytes("reduce_scatter", 8, 4) == (8, 2)
    assert primitive_bytes("all_to_all", 8, 4) == (8, 8)
    assert primitive_bytes("zero_pad", 8, 4) == (8, 32)


def one_stage(program: StageProgram, cost: CostModel, optimizer: str) -> Predicted:
    return predict(Pipeline.single(program, cost.mesh), [cost], optimizer)


def test_a_step_is_compute_then_collectives_then_the_update() -> None:
    """Plain data parallelism of the MLP, by hand: unit links and 1 FLOP/s."""
    case, cost = model_case("mlp"), abstract_cost((2,))
    program = lower(case.analysis, zero_strategy("mlp", 0, 1), cost)
    pipeline = Pipeline.single(program, cost.mesh)
    found = predict(pipeline, [cost], "sgd", n_samples=16, n_tokens=64)
    gradient_bytes = 8 * sum(math.prod(p.shape) for p in program.parameters)
    sync_s = cost.primitive_time_s("all_reduce", gradient_bytes, (0,))
    loss_s = cost.primitive_time_s("all_reduce", 8, (0,))
    assert gradient_bytes < BUCKET_BYTES
    assert found.comm_time_s == pytest.approx(sync_s + loss_s)
    # 3 layers of 2 * rows * 16 * 16 FLOPs; the input of the first one has no gradient.
    rows = case.batch(0)["x"].shape[0]
    flops = (3 + 3 + 2) * 2 * rows * 16 * 16
    assert found.compute_time_s == pytest.approx(flops / 2, rel=1e-6)
    assert found.step_time_s == pytest.approx(
        found.compute_time_s + found.comm_time_s + found.optimizer_time_s
    )
    assert found.exposed_comm_s == found.comm_time_s
    assert found.bubble == 0.0
    assert found.samples_per_s == pytest.approx(16 / found.step_time_s)
    assert found.tokens_per_s == pytest.approx(64 / found.step_time_s)
    assert found.mfu == pytest.approx(flops / (2 * found.step_time_s))
    halved = predict(pipeline, [cost], "sgd", peak_flops_per_s=2.0)
    assert halved.mfu == pytest.approx(found.mfu / 2)
    assert halved.samples_per_s is None


def test_replicated_work_does_not_count_as_model_flops() -> None:
    case, cost = model_case("mlp"), abstract_cost((2,))
    everywhere = Constraints(frozenset({"data", "tensor", "sequence", "zero1", "zero2", "zero3"}))
    replicated = choose(case.analysis, PlacementRequest(cost, 1, everywhere), "sgd", None).strategy
    twice = one_stage(lower(case.analysis, replicated, cost), cost, "sgd")
    shared = one_stage(lower(case.analysis, zero_strategy("mlp", 0, 1), cost), cost, "sgd")
    assert twice.compute_time_s == pytest.approx(2 * shared.compute_time_s, rel=1e-6)
    assert twice.mfu <= 0.5 + 1e-9


def test_more_zero_is_less_memory_and_more_communication() -> None:
    case, cost = model_case("gpt2"), abstract_cost((2,))
    programs = [lower(case.analysis, zero_strategy("gpt2", s, 4), cost) for s in range(4)]
    comm_s = [one_stage(p, cost, "adamw").comm_time_s for p in programs]
    # all_reduce = reduce_scatter + all_gather: ZeRO-1 adds no communication.
    assert comm_s[0] == pytest.approx(comm_s[1])
    assert comm_s[1] < comm_s[2] < comm_s[3]
    plain, *zeros = (peak_memory(p, "adamw") for p in programs)
    for zero in zeros:
        assert zero.parts["optimizer"] == plain.parts["optimizer"] / 2
        assert zero.parts["parameters"] == plain.parts["parameters"] / 2
    assert zeros[-1].peak_bytes < plain.peak_bytes
    assert "converted" not in zeros[-1].parts
