"""A parallel module beyond training on one shape: batches, outputs and state, on two processes.

Jobs return plain values. Tests compare them with one process, in float64 to 1e-10.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import Manual, NotPlannedError, VerificationError
from autopar.capture import reference_step
from autopar.runtime.execute import Environment, Executor, load_code
from autopar.runtime.launch import ThreadWorld, WorkerPool, run_threads
from tests.helpers.captures import captured
from tests.helpers.jobs import CASES, Batch, error, gpt2, gradient, machine, rows, tokens
from tests.parity.table import TOLERANCE

MESH = machine((1, 2))
DP, TP = Manual(dp=2), Manual(tp=2)
Pool = Callable[[int], WorkerPool]


def model() -> nn.Module:
    return CASES["gpt2"].model()


def ready(manual: Manual = TP, **options: Any) -> autopar.ParallelModule:
    options = {"microbatches": 1} | options
    return autopar.parallelize(model(), MESH, tokens(0), precision="fp64", manual=manual, **options)


def reference(batch: Batch, training: bool = True) -> tuple[Tensor, Any, dict[str, Tensor]]:
    """(loss, outputs, parameters with gradient) of the captured program on one process."""
    own = model()
    program = captured(own, batch, training=training, precision="fp64")
    values = {n: p.detach().double().requires_grad_() for n, p in own.named_parameters()}
    loss, outputs = reference_step(program, values, batch)
    assert loss is not None
    loss.backward()
    return loss.detach(), outputs, values


@lru_cache
def reference_of(seed: int) -> tuple[Tensor, Any, dict[str, Tensor]]:
    """`reference` of a batch of `tokens`."""
    return reference(tokens(seed))


def off(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    assert found.keys() == wanted.keys()
    errors = {name: error(tensor, wanted[name]) for name, tensor in found.items()}
    return {name: e for name, e in errors.items() if not e <= TOLERANCE}


SHAPES = {"fewer, shorter rows": (8, 4), "more rows": (32, 8)}


def reshaped(name: str) -> Batch:
    n_rows, length = SHAPES[name]
    return {k: v[:, :length] for k, v in tokens(3, n_rows).items()}


def step_on_other_shapes() -> list[tuple[Tensor, dict[str, Tensor]]]:
    module = ready(DP, microbatches=2)
    module.step(**tokens(0))
    out = []
    for name in SHAPES:
        module.zero_grad()
        out.append((module.step(**reshaped(name)), module.full_gradients()))
    return out


def test_another_shape_runs_the_same_plan(workers: Pool) -> None:
    found = workers(2).run(step_on_other_shapes)
    for i, name in enumerate(SHAPES):
        loss, _, values = reference(reshaped(name))
        assert all(error(of_rank[i][0], loss) <= TOLERANCE for of_rank in found)
        assert off(found[0][i][1], {n: gradient(v) for n, v in values.items()}) == {}


def step_locally(microbatches: int) -> dict[str, Any]:
    module = ready(DP, microbatches=microbatches)
    batch, parts = tokens(0), {name: module.local_slice(name) for name in tokens(0)}
    whole, gradients = module.step(**batch), module.full_gradients()
    module.zero_grad()
    mine = {name: value[parts[name]] for name, value in batch.items()}
    local = module.step(batch="local", **mine)
    return {
        "parts": parts, "losses": (whole, local), "gradients": (gradients, module.full_gradients()),
    }  # fmt: skip


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_local_batch_is_the_global_one(microbatches: int, workers: Pool) -> None:
    """This holds even if one rank's rows have fewer labels than the other's."""
    found = workers(2).run(step_locally, microbatches)
    for rank, of_rank in enumerate(found):
        mine = slice(8 * rank, 8 * rank + 8)
        assert of_rank["parts"] == {"input_ids": mine, "labels": mine}
        assert error(*of_rank["losses"]) <= TOLERANCE
    assert off(*found[0]["gradients"]) == {}
    assert error(found[0]["losses"][0], reference_of(0)[0]) <= TOLERANCE


def replicated_rows() -> Any:
    return ready(TP).local_slice("input_ids")


def test_a_replicated_batch_is_read_whole(workers: Pool) -> None:
    assert workers(2).run(replicated_rows) == [slice(0, 16), slice(0, 16)]


def rows_by_stage() -> dict[str, slice | None]:
    module = ready(Manual(pp=2))
    return {name: module.local_slice(name) for name in tokens(0)}


def test_a_stage_has_no_slice_of_what_it_does_not_read(workers: Pool) -> None:
    """The first stage reads ids, the last one labels."""
    first, last = workers(2).run(rows_by_stage)
    assert first == {"input_ids": slice(0, 16), "labels": None}
    assert last == {"input_ids": None, "labels": slice(0, 16)}


def accumulate() -> dict[str, Tensor]:
    module = ready(Manual(dp=2, zero=2), microbatches=2)
    module.step(**tokens(0))
    module.step(**tokens(1))
    return module.full_gradients()


def test_gradients_add_up_over_steps(workers: Pool) -> None:
    first, second = reference_of(0)[2], reference_of(1)[2]
    wanted = {name: gradient(p) + gradient(second[name]) for name, p in first.items()}
    assert off(workers(2).run(accumulate)[0], wanted) == {}


def plan_late() -> tuple[str, Tensor, bool]:
    module = autopar.parallelize(model(), MESH, precision="fp64", manual=TP)
    try:
        module.parameters().__next__()
        message = ""
    except NotPlannedError as raised:
        message = str(raised)
    loss = module.step(**tokens(0))
    same = module.prepare(**tokens(0)) is module
    return message, loss, same and len(list(module.parameters())) > 0


def test_planning_waits_for_the_first_step(workers: Pool) -> None:
    for message, loss, is_ready in workers(2).run(plan_late):
        assert "pm.prepare(**batch)" in message
        assert error(loss, reference_of(0)[0]) <= TOLERANCE
        assert is_ready


def evaluate(manual: Manual, gather: str) -> dict[str, Any]:
    module = ready(manual)
    module.eval()
    output = module(gather=gather, **tokens(1))
    alone = module(input_ids=tokens(1)["input_ids"])
    module.train()
    return {
        "type": type(output).__name__, "keys": list(output.keys()), "loss": output.loss,
        "logits": output.logits, "without labels": alone.logits, "keys alone": list(alone.keys()),
        "requires_grad": output.logits.requires_grad, "after": module.step(**tokens(0)),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("manual", "gather"),
    [(DP, "last"), (Manual(dp=2, zero=3), "all"), (Manual(tp=2, sp=True), "last")],
    ids=["data parallel", "ZeRO-3", "sequence parallel"],
)
def test_evaluation_returns_the_models_own_output(
    manual: Manual, gather: str, workers: Pool
) -> None:
    """Logits are whole on every rank, and training continues afterwards."""
    loss, output, _ = reference(tokens(1), training=False)
    for found in workers(2).run(evaluate, manual, gather):
        assert found["type"] == type(output).__name__ == "CausalLMOutputWithCrossAttentions"
        assert found["keys"] == ["loss", "logits"]
        assert found["keys alone"] == ["logits"]
        assert error(found["loss"], loss) <= TOLERANCE
        assert found["logits"].shape == output.logits.shape
        assert error(found["logits"], output.logits.detach()) <= TOLERANCE
        assert error(found["without labels"], output.logits.detach()) <= TOLERANCE
        assert not found["requires_grad"]
        assert error(found["after"], reference_of(0)[0]) <= TOLERANCE


def see_outputs(manual: Manual) -> tuple[list[Tensor], list[Tensor], Tensor]:
    module = ready(manual, microbatches=2)
    seen: list[Any] = []
    loss = module.step(outputs=seen.append, **tokens(0))
    return [o.logits for o in seen], [o.loss for o in seen], loss


@pytest.mark.parametrize("manual", [DP, TP], ids=["data parallel", "tensor parallel"])
def test_outputs_of_each_microbatch(manual: Manual, workers: Pool) -> None:
    """Rows of a microbatch: a contiguous part of the batch, or one part of each rank's rows."""
    whole = reference_of(0)[1].logits.detach()
    n_blocks = manual.dp
    parts = whole.view(n_blocks, 2, -1, *whole.shape[1:]).transpose(0, 1).flatten(1, 2)
    for logits, losses, loss in workers(2).run(see_outputs, manual):
        assert len(logits) == 2
        for found, wanted in zip(logits, parts, strict=True):
            assert error(found, wanted) <= TOLERANCE
        assert error(sum(losses, torch.zeros(())) / 2, loss) <= TOLERANCE


def verify_in_job() -> tuple[bool, str, set[str]]:
    report = autopar.verify(model(), MESH, tokens(0), precision="fp64", manual=TP)
    return report.ok, report.text(), set(report.errors)


def test_verifying_in_a_job(workers: Pool) -> None:
    """Every rank has the report; a tied parameter is in it once."""
    names = {"loss", *(n for n, _ in model().named_parameters())}
    for is_ok, text, found in workers(2).run(verify_in_job):
        assert is_ok, text
        assert found == names


def start_on_meta(manual: Manual) -> tuple[dict[str, Tensor], Tensor]:
    torch.manual_seed(5)
    with torch.device("meta"):
        empty = gpt2()
    module = autopar.parallelize(empty, MESH, tokens(0), weights="init", manual=manual)
    assert all(p.is_meta for p in empty.parameters())
    return module.full_state_dict(), module.step(**tokens(0))


def test_weights_of_a_model_on_meta(workers: Pool) -> None:
    """Weights are initialised shard by shard, to the same values under every plan."""
    (first, loss), (_, other_loss) = workers(2).run(start_on_meta, TP)
    (second, _), _ = workers(2).run(start_on_meta, Manual(dp=2, zero=3))
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert first.keys() == model().state_dict().keys()
    assert torch.equal(loss, other_loss)
    deviation = first["transformer.wte.weight"].std().item()
    assert deviation == pytest.approx(0.02, rel=0.1)  # GPT2Config.initializer_range
    assert torch.equal(first["transformer.ln_f.weight"], torch.ones(32))
    assert abs(loss.item() - torch.tensor(32.0).log().item()) < 0.1


def keys_and_values() -> dict[str, Any]:
    module = ready()
    whole, held = module.full_state_dict(), module.state_dict()
    tied = ("lm_head.weight", "transformer.wte.weight")
    return {
        "whole": {n: v for n, v in whole.items() if n in tied}, "names": list(whole),
        "held": {n: (type(v).__name__, tuple(v.shape)) for n, v in held.items()},
        "n_parameters": len(list(module.parameters())),
    }  # fmt: skip


def test_tied_weights_keep_both_names(workers: Pool) -> None:
    own = model()
    first, second = workers(2).run(keys_and_values)
    assert set(first["names"]) == set(own.state_dict())
    assert second["names"] == []
    embedding, head = first["whole"].values()
    assert torch.equal(embedding, head)
    for found in (first, second):
        assert found["held"].keys() == own.state_dict().keys()
        for name, (kind, shape) in found["held"].items():
            assert (kind, shape) == ("DTensor", tuple(own.state_dict()[name].shape))
        assert found["n_parameters"] == len(list(own.parameters()))


def clip(manual: Manual, max_norm: float) -> tuple[Tensor, dict[str, Tensor]]:
    module = ready(manual)
    module.step(**tokens(0))
    return module.clip_grad_norm_(max_norm), module.full_gradients()


@pytest.mark.parametrize(
    ("manual", "max_norm"),
    [(TP, 0.1), (Manual(dp=2, zero=1), 0.1), (DP, 1e6)],
    ids=["tensor parallel", "ZeRO-1", "nothing to clip"],
)
def test_clipping_is_torchs(manual: Manual, max_norm: float, workers: Pool) -> None:
    values = {n: v.detach().clone().requires_grad_() for n, v in reference_of(0)[2].items()}
    for name, value in values.items():
        value.grad = gradient(reference_of(0)[2][name]).clone()
    norm = torch.nn.utils.clip_grad_norm_(values.values(), max_norm)
    found = workers(2).run(clip, manual, max_norm)
    assert all(error(of_rank, norm) <= TOLERANCE for of_rank, _ in found)
    assert off(found[0][1], {n: gradient(v) for n, v in values.items()}) == {}


def train_beside_the_model() -> bool:
    own = model()
    before = {n: v.clone() for n, v in own.state_dict().items()}
    held, modules = dict(own.named_parameters()), list(own.modules())
    module = autopar.parallelize(own, MESH, tokens(0), manual=TP)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.step(**tokens(0))
    optimizer.step()
    module.eval()
    module(**tokens(0))
    return (
        all(torch.equal(v, before[n]) for n, v in own.state_dict().items())
        and all(p is held[n] and p.grad is None for n, p in own.named_parameters())
        and list(own.modules()) == modules
        and own.training
    )


def test_the_users_model_is_left_untouched(workers: Pool) -> None:
    assert workers(2).run(train_beside_the_model) == [True, True]


class TwoBranches(nn.Module):
    """Two all_reduces of different sizes that do not depend on each other."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        self.b = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.a(x).relu().sum() + self.b(y).relu().sum()


def run_with(change: Callable[[str], str]) -> None:
    """One step on two thread ranks; the second runs changed code."""
    batch = rows(0, "x", "y")
    plan = autopar.plan(TwoBranches(), MESH, batch, manual=TP, microbatches=1)
    assert plan.bound is not None
    pipeline, program = plan.bound.pipeline, plan.bound.analysis.program
    (stage,), (mesh,) = pipeline.stages, pipeline.meshes
    (source,) = plan.code().values()
    constants = {name: make() for name, make in program.constants.items()}

    def run(world: ThreadWorld) -> Tensor:
        code, _ = load_code("stage_0.py", change(source) if world.rank == 1 else source)
        environment = Environment(torch.device("cpu"), world.make_groups(mesh))
        stored = {p.name: torch.zeros(p.stored.shape, requires_grad=True) for p in stage.parameters}
        executor = Executor(pipeline, world.rank, code, environment, constants)
        return executor.step(stored, {n: batch[i.path] for n, i in program.inputs.items()})

    run_threads(run, 2)


def swapped(source: str) -> str:
    """The code with the second branch computed first."""
    lines = source.splitlines()
    (start,) = [i for i, line in enumerate(lines) if line.startswith("    # a.0  ")]
    (middle,) = [i for i, line in enumerate(lines) if line.startswith("    # b.0  ")]
    (last,) = [i for i, line in enumerate(lines) if " add" in line and "sum" in line]
    end = max(i for i in range(last) if not lines[i].strip())
    order = lines[:start] + lines[middle:end] + [""] + lines[start:middle] + lines[end:]
    return "\n".join(order)


def without_one(source: str) -> str:
    """The code without its first all_reduce."""
    lines = source.splitlines()
    at = next(i for i, line in enumerate(lines) if "= p_to_i(" in line)
    lines[at] = lines[at].replace("p_to_i(", "(lambda x, group: x)(")
    return "\n".join(lines)


def test_equal_ranks_agree() -> None:
    run_with(lambda source: source)


@pytest.mark.parametrize(
    ("change", "message"),
    [(swapped, "ranks of one group call different collectives"), (without_one, "ranks|rank")],
    ids=["another order", "one call less"],
)
def test_ranks_that_disagree_are_noticed(change: Callable[[str], str], message: str) -> None:
    with pytest.raises(VerificationError, match=rf"{message}[\s\S]*same order"):
        run_with(change)
