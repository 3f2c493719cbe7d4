"""Vocabularies that the number of ranks does not divide: padded if that is exact.

The reference is always the program without padding, in one process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar import Manual, PlanError
from autopar.capture import capture, reference_step
from autopar.passes.analysis import find_paddings, pad
from autopar.plans import parse_plan
from autopar.program.graph import Program
from autopar.runtime.launch import ThreadWorld, run_threads
from autopar.runtime.lowered import vocab_parallel_cross_entropy, vocab_parallel_embedding
from tests.helpers.captures import captured
from tests.helpers.harness import generated_code  # noqa: F401
from tests.helpers.jobs import error, machine
from tests.helpers.machines import mesh_of
from tests.helpers.models.padding_models import (
    N_ROWS,
    PADDED,
    VOCABULARY,
    WIDTH,
    Model,
    Smoothed,
    Softmax,
    SoftmaxWhenEvaluated,
    batch,
    bert,
    gpt2,
    llama,
)
from tests.helpers.nightly import nightly

# A logit is a dot product of WIDTH terms. Summed in two orders it differs by at most
# 2 WIDTH u sum|x w| (u = eps / 2; Higham, Accuracy and Stability of Numerical Algorithms, 2002,
# section 3.1), and sum|x w| is at most WIDTH times the largest term, which here is about as
# large as the largest logit. Gradients are such sums over rows and classes.
ROUNDING = WIDTH * WIDTH * torch.finfo(torch.float64).eps


def drawn(program: Program) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        p.name: torch.randn(p.shape, dtype=torch.float64, generator=generator).requires_grad_()
        for p in program.parameters.values()
    }


def lengthened(value: Tensor, shape: Sequence[int], last: float) -> Tensor:
    """`value` padded to `shape` with the number `last`."""
    out = value.new_full(tuple(shape), last)
    out[tuple(map(slice, value.shape))] = value.detach()
    return out.requires_grad_()


def gradient(value: Tensor) -> Tensor:
    return torch.zeros_like(value) if value.grad is None else value.grad


@pytest.mark.parametrize("make", PADDED)
def test_results_are_those_without_padding(make: Model) -> None:
    """Up to `ROUNDING`, because matmuls of other widths may use other kernels. They do not depend
    on what padding holds, bitwise, and its own gradient is exactly 0."""
    program = captured(make(), batch(make), precision="fp64")
    shapes = find_paddings(program, 4).shapes
    assert shapes == PADDED[make]
    plain, longer = drawn(program), pad(program, shapes)
    loss, outputs = reference_step(program, plain, batch(make))
    assert loss is not None
    loss.backward()
    results = [loss, outputs["logits"], *map(gradient, plain.values())]
    steps = []
    for last in (7.0, -1e3):
        values = {n: lengthened(v, shapes.get(n, v.shape), last) for n, v in plain.items()}
        loss, outputs = reference_step(longer, values, batch(make))
        assert loss is not None
        loss.backward()
        assert not any(gradient(values[name])[VOCABULARY:].any() for name in shapes)
        steps.append((loss, outputs["logits"], *map(gradient, values.values())))
    for one, other, wanted in zip(*steps, results, strict=True):
        assert torch.equal(one, other)
        assert error(one, lengthened(wanted, one.shape, 0.0)) <= ROUNDING


def test_evaluation_that_reads_all_classes_takes_the_parameter_without_padding() -> None:
    """Training allows padding and evaluation does not, but a plan stores the parameter padded."""
    model = SoftmaxWhenEvaluated()
    shapes = find_paddings(capture(model, batch(SoftmaxWhenEvaluated), precision="fp64"), 4).shapes
    assert shapes == PADDED[Smoothed]
    model.eval()
    program = capture(model, batch(SoftmaxWhenEvaluated), training=False, precision="fp64")
    assert find_paddings(program, 4).shapes == {}
    plain = drawn(program)
    values = {n: lengthened(v, shapes.get(n, v.shape), 7.0) for n, v in plain.items()}
    _, outputs = reference_step(program, plain, batch(SoftmaxWhenEvaluated))
    _, same = reference_step(pad(program, shapes), values, batch(SoftmaxWhenEvaluated))
    assert torch.equal(outputs["logits"], same["logits"])


class OneHot(nn.Module):
    """The dim of classes is also a dim of an input."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x) + bias, labels)


class Grouped(OneHot):
    """Views its 60 classes as 6 groups of 10."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 60)

    def forward(self, x: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
        grouped = self.head(x).view(-1, 6, 10) + bias.view(-1, 1, 1)
        return F.cross_entropy(grouped.view(-1, 60), labels)


class Few(OneHot):
    """Padding 6 classes to 8 adds a third."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 6)


ROWS = {
    "x": torch.zeros(N_ROWS, WIDTH),
    "bias": torch.zeros(N_ROWS, VOCABULARY),
    "labels": torch.zeros(N_ROWS, dtype=torch.int64),
}
REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor], str]] = {
    "embed.weight": (Softmax, batch(Smoothed), r"dim 0 of 61 .* 8 ranks: aten\.softmax\.int meets"),
    "head.weight": (OneHot, ROWS, "dim 0 of 61 .*: `bias`, which is no parameter, has it"),
    "head.bias": (
        Few,
        ROWS | {"bias": torch.zeros(N_ROWS, 1)},
        r"dim 0 of 6 .*: padding it to 8 adds more than 12\.5%",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_proved_exact_is_left_alone(name: str) -> None:
    make, given, reason = REFUSED[name]
    program = capture(make(), given)
    found = find_paddings(program, 8)
    assert found.shapes == {}
    assert re.search(reason, found.refused[name]), found.refused
    assert pad(program, found.shapes) is program


def test_a_dim_of_several_factors_is_left_alone() -> None:
    given = ROWS | {"bias": torch.zeros(N_ROWS, 1)}
    assert find_paddings(capture(Grouped(), given), 8).shapes == {}


@pytest.mark.parametrize("shape", [(60, WIDTH), (64,)])
def test_a_plan_cannot_shorten_a_parameter(shape: tuple[int, ...]) -> None:
    program = captured(Smoothed(), batch(Smoothed))
    with pytest.raises(PlanError, match=r"embed.weight \[61, 16\] cannot be padded to"):
        pad(program, {"embed.weight": shape})


def test_the_reason_is_in_the_plan() -> None:
    plan = autopar.plan(
        Softmax(), machine((1, 4)), batch(Softmax), microbatches=1, manual=Manual(tp=4)
    )
    reason = "dim 0 of 61 is not sharded over 4 ranks: aten.softmax.int meets it at /softmax.int"
    assert plan.data.padded == {}
    assert f"\nembed.weight: {reason}" in plan.explain()
    assert reason in plan.explain("embed.weight")


RUN: dict[str, tuple[Model, tuple[int, int], dict[str, Any]]] = {
    "gpt2, tensor parallel": (gpt2, (1, 4), {"manual": Manual(tp=4)}),
    "gpt2, stages": (gpt2, (2, 2), {"manual": Manual(pp=2, tp=2)}),
    "llama, ZeRO-3": (llama, (1, 4), {"manual": Manual(dp=4, zero=3)}),
    "bert, both": (bert, (2, 2), {"manual": Manual(dp=2, tp=2)}),
    "smoothed labels": (Smoothed, (1, 4), {"manual": Manual(tp=4)}),
}


@pytest.mark.parametrize(
    "name", [n if n == "bert, both" else pytest.param(n, marks=nightly) for n in RUN]
)
def test_parity(name: str) -> None:
    """On thread ranks. A nonzero gradient of the padding would count as an error."""
    make, shape, options = RUN[name]
    report = autopar.verify(
        make(), machine(shape), batch(make), precision="fp64", microbatches=2, **options
    )
    assert report.ok, report.text()
    assert report.plan.data.padded == PADDED[make]
    sharded = {n for n, placed in report.plan.placements.items() if "S(0)" in placed}
    assert sharded >= set(PADDED[make])


def test_what_a_plan_does_not_shard_is_not_padded() -> None:
    plan = autopar.plan(
        Smoothed(), machine((1, 4)), batch(Smoothed), microbatches=1, manual=Manual(dp=4)
    )
    assert plan.data.padded == {}
    assert plan.data.graph_hash == capture(Smoothed(), batch(Smoothed)).hash()


class TiedHead(nn.Module):
    """GPT-2's embedding, tied to its head, with one linear layer between."""

    def __init__(self, n_classes: int = 50257, width: int = 768) -> None:
        super().__init__()
        self.embed, self.middle = nn.Embedding(n_classes, width), nn.Linear(width, width)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = F.linear(self.middle(self.embed(ids)), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_the_planner_shards_the_vocabulary_of_gpt2() -> None:
    with torch.device("meta"):
        model = TiedHead()
        ids = torch.zeros(8, 128, dtype=torch.int64)
    mesh = autopar.Mesh((1, 8), hardware="a100-80gb")
    plan = autopar.plan(model, mesh, {"ids": ids, "labels": ids}, stages=1, microbatches=1)
    assert plan.data.padded == {"embed.weight": (50264, 768)}
    (loss,) = [text for key, text in plan.data.operators.items() if "cross_entropy" in key]
    assert "S(1)" in loss
    assert plan.explain("embed.weight").startswith(
        "embed.weight [50257, 768], padded to [50264, 768]: stored"
    )
    again = autopar.Plan(parse_plan(plan.data.to_json())).bind(model)
    assert again.predicted == plan.predicted


@pytest.mark.parametrize("wrong", [10, 11])
def test_ids_in_the_padding_fail_as_in_torch(wrong: int) -> None:
    """10 of 12 rows are valid; the other ids do not exist without padding."""
    table, ids = torch.ones(12, 2), torch.tensor([wrong])

    def embedding(world: ThreadWorld) -> None:
        g = world.make_groups(mesh_of(2))[(0,)]
        vocab_parallel_embedding(table[:6], ids, g, -1, 10)

    def cross_entropy(world: ThreadWorld) -> None:
        g = world.make_groups(mesh_of(2))[(0,)]
        vocab_parallel_cross_entropy(torch.ones(1, 6), ids, g, n_valid=10)

    for work in (embedding, cross_entropy):
        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
            run_threads(work, 2)
    with pytest.raises(IndexError, match="out of range"):
        torch.ops.autopar.padded_embedding(table, ids, n_valid=10)
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        torch.ops.autopar.padded_cross_entropy(torch.ones(1, 12), ids, n_valid=10)
