"""Bad input: one clear error each, with a hint, and no process left behind."""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar import Manual, Plan
from autopar.errors import (
    AutoparError,
    BatchError,
    CaptureError,
    InfeasibleError,
    MeshError,
    MissingRuleError,
    NotPlannedError,
    NotSupportedError,
    OptionError,
)
from autopar.runtime.launch import WorkerPool
from tests.helpers.jobs import machine
from tests.helpers.models.tiny_model import Tiny, batch
from tests.helpers.nightly import nightly

MESH = machine((1, 2))
Pool = Callable[[int], WorkerPool]


def plan(model: nn.Module | None = None, n_rows: int = 16, **options: Any) -> Plan:
    return autopar.plan(model or Tiny(), MESH, batch(0, n_rows), **options)


@torch.library.custom_op("autopar_tests::halve", mutates_args=())
def halve(x: Tensor) -> Tensor:
    return x / 2


@halve.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


halve.register_autograd(lambda ctx, grad: grad / 2)


class Halving(Tiny):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return super().forward(halve(self.down.bias.sum() * x), labels)


def test_an_operator_without_a_rule(registry: None) -> None:
    """The message names the operator, the user's line and the call to add, which then works."""
    lines, first = inspect.getsourcelines(Halving.forward)
    (at,) = [first + i for i, line in enumerate(lines) if "halve(" in line]
    with pytest.raises(MissingRuleError) as refusal:
        plan(Halving())
    message = str(refusal.value)
    assert "operator autopar_tests.halve.default has no sharding rule" in message
    assert f"{__file__}:{at}" in message
    assert 'autopar.register_rule("autopar_tests::halve", "a! b! -> a b")' in message

    autopar.register_rule("autopar_tests::halve", "b i -> b i")
    report = autopar.verify(
        Halving(), MESH, batch(), precision="fp64", manual=Manual(dp=2), microbatches=1
    )
    report.raise_if_wrong()
    assert report.tolerance == 1e-10


INDIVISIBLE: dict[str, tuple[int, dict[str, Any], str]] = {
    "dp": (15, {"manual": Manual(dp=2)}, "15 rows does not divide over dp=2 ranks"),
    "ZeRO": (15, {"manual": Manual(dp=2, zero=3)}, "15 rows does not divide over dp=2 ranks"),
    "microbatches": (15, {"microbatches": 4}, "15 rows does not divide into 4 microbatches"),
    "both": (
        12,
        {"manual": Manual(dp=2), "microbatches": 4},
        "12 rows .* dp=2 .* x 4 microbatches",
    ),
}


@pytest.mark.parametrize("name", INDIVISIBLE)
def test_a_batch_that_does_not_divide(name: str) -> None:
    n_rows, options, message = INDIVISIBLE[name]
    with pytest.raises(BatchError, match=rf"{message}[\s\S]*drop_last=True"):
        plan(n_rows=n_rows, **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"manual": Manual(dp=2)}, pytest.param({"solver": "ilp", "stages": 1}, marks=nightly)],
    ids=str,
)
def test_a_memory_limit_that_nothing_fits(options: dict[str, Any]) -> None:
    limit_bytes = 2048  # the state alone needs 1,696
    with pytest.raises(InfeasibleError) as refusal:
        plan(memory_limit=limit_bytes, **options)
    message = str(refusal.value)
    assert "no plan fits in 2.0 KiB per device" in message
    needs = re.search(r"leanest plan seen needs ([\d.]+) KiB, ([\d.]+) (B|KiB) more", message)
    assert needs is not None
    more_kib = float(needs[2]) / (1024 if needs[3] == "B" else 1)
    assert float(needs[1]) - limit_bytes / 1024 == pytest.approx(more_kib, abs=0.11)
    assert "raise memory_limit" in message


class LossFirst(Tiny):
    """Computes its second output after the loss."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        hidden = self.up(x)
        loss = nn.functional.cross_entropy(hidden, labels)
        return {"loss": loss, "scores": self.down(hidden)}


def staged(*stages: Any, shape: tuple[int, int] = (1, 4), **options: Any) -> Plan:
    """A plan of `Tiny` with these stages; a single integer is the number of stages."""
    wanted = stages[0] if isinstance(stages[0], int) else list(stages)
    return autopar.plan(Tiny(), machine(shape), batch(0, 16), stages=wanted, **options)


STAGES: dict[str, tuple[Callable[[], Any], type[AutoparError], str]] = {
    "a module that there is not": (
        lambda: staged(("up", 2), ("side", 2)), OptionError,
        r"stages= names 'side', which is no module of the model[\s\S]*such as up, down",
    ),
    "modules out of order": (
        lambda: staged(("down", 2), ("up", 2)), OptionError,
        r"down/linear#0 \(.*tiny_model\.py:20\) belongs to stage 0, but runs after stage 1 has "
        r"begun[\s\S]*in running order",
    ),
    "submeshes that are too small": (
        lambda: staged(("up", 1), ("down", 2)), MeshError, r"stages= hold 3 ranks, the mesh has 4",
    ),
    "submeshes that are too large": (
        lambda: staged(("up", (1, 4)), ("down", (1, 1))), MeshError,
        r"stages= hold 5 ranks, the mesh has 4[\s\S]*add up to the mesh",
    ),
    "a submesh across nodes": (
        lambda: staged(("up", (2, 1)), ("down", (2, 1)), shape=(2, 2)), MeshError,
        r"a submesh \(2, 1\) for up; ranks 0 to 1 of the mesh \(2, 2\) are \(1, 2\)"
        r"[\s\S]*consecutive ranks",
    ),
    "a submesh of parts of two nodes": (
        lambda: staged(("up", (1, 3)), ("down", (1, 1)), shape=(2, 2)), MeshError,
        r"ranks 0 to 2 of the mesh \(2, 2\) are neither in one node nor whole nodes",
    ),
    "more stages than ranks": (lambda: staged(5), MeshError, r"stages=5 cannot share 4 ranks"),
    "more stages than operators": (
        lambda: staged(16, shape=(1, 16)), OptionError, r"16 stages of \d operators",
    ),
    "a recipe that is not the mesh": (
        lambda: plan(manual=Manual(pp=3)), MeshError, r"Manual\(dp=1, tp=1, pp=3\) places 3 ranks",
    ),
    "more stages of a recipe than cuts": (
        lambda: autopar.plan(Tiny(), machine((1, 16)), batch(), manual=Manual(pp=16)), OptionError,
        r"Manual\(pp=16\): the model can be cut into \d stages",
    ),
    "microbatches of a recipe": (
        lambda: autopar.plan(
            Tiny(), machine((1, 4)), batch(0, 6), manual=Manual(pp=2, dp=2), microbatches=2
        ),
        BatchError, r"6 rows does not divide over dp=2 ranks x 2 microbatches",
    ),
    "a microbatch size of a recipe": (
        lambda: plan(n_rows=15, manual=Manual(pp=2, microbatch_size=4)), OptionError,
        r"microbatch_size=4 does not divide the 15 rows",
    ),
    "a memory limit that no stage fits": (
        lambda: staged(2, memory_limit=900), InfeasibleError,
        r"no plan of 2 stages fits in 900 B per device",
    ),
    "a memory limit below the state": (
        lambda: staged(2, memory_limit=100), InfeasibleError,
        r"100 B per device; .* alone, divided over 4 ranks, need at least 848 B\n",
    ),
    "a pin on an axis that no stage has": (
        lambda: staged(2, force={"up.weight": "S(0)@node"}), OptionError,
        r"no axis node: the logical mesh has 0 \(dp\), 1 \(tp\)",
    ),
    "a loss before the last stage": (
        lambda: autopar.plan(
            LossFirst(), MESH, batch(), stages=[("up", 1), ("down", 1)]
        ),
        OptionError, r"the loss is made on stage 0 of 2[\s\S]*begin before the loss",
    ),
}  # fmt: skip


def test_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(MeshError, match=r"torchrun --nproc-per-node[\s\S]*autopar\.launch\(fn, N"):
        autopar.parallelize(Tiny(), MESH, batch())


def test_a_world_of_another_size() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    words = r"4 ranks, this job runs 1[\s\S]*--nproc-per-node 4[\s\S]*autopar\.launch\(fn, 4\)"
    try:
        with pytest.raises(MeshError, match=words):
            autopar.parallelize(Tiny(), machine((1, 4)), batch())
    finally:
        dist.destroy_process_group()


def ready(shape: tuple[int, int] = (1, 1), **options: Any) -> autopar.ParallelModule:
    return autopar.parallelize(Tiny(), machine(shape), batch(), **options)


def unplanned() -> autopar.ParallelModule:
    return autopar.parallelize(Tiny(), machine((1, 1)))


def class_weights() -> dict[str, Any]:
    given = batch(0, 16)
    return {"input": given["x"], "y": given["labels"]}


def weighted(outputs: Tensor, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(outputs, batch["y"], weight=batch["w"])


WRONG_USE: dict[str, tuple[Callable[[], Any], type[AutoparError], str]] = {
    "a batch that does not divide into microbatches": (
        lambda: ready(microbatches=4).step(**batch(0, 17)), BatchError, r"17 rows[\s\S]*drop_last",
    ),
    "an input is missing": (
        lambda: ready().step(x=batch()["x"]), BatchError, r"lacks \['labels'\]",
    ),
    "a step in evaluation mode": (
        lambda: ready().eval().step(**batch()), AutoparError, r"evaluation mode[\s\S]*pm\.",
    ),
    "a call in training mode": (
        lambda: ready()(**batch()), NotSupportedError, r"training mode[\s\S]*pm\.step",
    ),
    "no plan yet": (
        lambda: list(unplanned().parameters()), NotPlannedError, r"no plan yet[\s\S]*pm\.prepare",
    ),
    "a local batch before the plan": (
        lambda: unplanned().step(batch="local", **batch()), NotPlannedError, r"pm\.prepare",
    ),
    "backward of pm.loss": (
        lambda: ready().loss(**batch()).backward(), NotSupportedError,
        r"have no grad[\s\S]*pm\.step",
    ),
    "backward of evaluation": (
        lambda: torch.autograd.backward(ready().eval()(**batch())), NotSupportedError,
        r"backward of the loss of pm\.loss[\s\S]*pm\.step",
    ),
    "verify under inference_mode": (
        lambda: torch.inference_mode()(autopar.verify)(Tiny(), MESH, batch()), OptionError,
        r"inference_mode[\s\S]*outside",
    ),
    "class weights with as many entries as rows": (
        lambda: autopar.plan(
            nn.Linear(8, 16), MESH, {**class_weights(), "w": torch.ones(16)}, microbatches=2,
            loss_fn=weighted,
        ),
        CaptureError,
        r"with 8 of 16 rows; cut were .*dim 0 of `w`[\s\S]*batch_dims=\{'w': None\} .*fewer micro",
    ),
    "a function as the model": (
        lambda: autopar.parallelize(cast(Any, len), machine((1, 1)), batch()), OptionError,
        r"is a builtin_function_or_method, not a torch\.nn\.Module",
    ),
    "a class as the model": (
        lambda: autopar.plan(cast(Any, Tiny), MESH, batch()), OptionError,
        r"pass an instance: Tiny\(",
    ),
    "a parallel module as the model": (
        lambda: autopar.parallelize(ready(), machine((1, 1)), batch()), NotSupportedError,
        r"is a parallel module already[\s\S]*full_state_dict",
    ),
    "backward of a sum with the loss": (
        lambda: (ready().step(**batch()) + 1.0).backward(), NotSupportedError,
        r"penalty\.backward\(\) adds its gradients",
    ),
    "generate": (
        lambda: ready().generate(), NotSupportedError, r"pm\.unsharded\(\) on every rank",
    ),
    "weights of a model on meta": (
        lambda: autopar.parallelize(Tiny().to("meta"), machine((1, 1)), batch()), AutoparError,
        r'on meta[\s\S]*weights="init"',
    ),
    "a slice of an unknown input": (
        lambda: ready().local_slice("mask"), AutoparError, r"no input 'mask'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*STAGES, *WRONG_USE])
def test_stages_that_cannot_be_and_wrong_use_of_a_module(name: str) -> None:
    use, kind, message = (STAGES | WRONG_USE)[name]
    with pytest.raises(kind, match=message):
        use()


JOBS: dict[str, tuple[Callable[[], Any], str]] = {
    "a batch that does not divide": (
        lambda: ready((1, 2), manual=Manual(dp=2)).step(**batch(0, 17)), r"17 rows[\s\S]*drop_last",
    ),
    "planning fails on rank 0": (
        lambda: ready((1, 2), memory_limit=10), r"no plan fits in 10 B[\s\S]*at least \d+ nodes",
    ),
}  # fmt: skip


def caught(name: str) -> tuple[str, str]:
    """(class, message) of the error that a rank raises. It is caught, so the job goes on."""
    try:
        JOBS[name][0]()
    except AutoparError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


@nightly
@pytest.mark.parametrize("name", JOBS)
def test_every_rank_raises_the_same(name: str, workers: Pool) -> None:
    (kind, first), *others = workers(2).run(caught, name)
    # An error that only rank 0 can see reaches the others as "rank 0 failed: ...".
    assert all(other == kind and first in message for other, message in others)
    assert re.search(JOBS[name][1], first), first


def test_losses_without_gradients_may_be_used() -> None:
    pm, factor = ready(), torch.ones((), requires_grad=True)
    loss = pm.loss(**batch())
    (loss * factor).backward()
    torch.autograd.backward(loss * factor)
    assert factor.grad is not None and torch.equal(factor.grad, 2 * loss)
    assert type(pickle.loads(pickle.dumps(loss))) is Tensor


def test_verify_without_gradients_around_it() -> None:
    with torch.no_grad():
        autopar.verify(Tiny(), MESH, batch(), manual=Manual(dp=2)).raise_if_wrong()
