"""Batches that differ by rank, or of other sizes: exact, or refused before anything runs."""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar import BatchError, Manual
from autopar.runtime.execute import Executor
from tests.helpers.jobs import machine, rank
from tests.helpers.models.tiny_model import Tiny, batch
from tests.helpers.nightly import nightly, one_in
from tests.helpers.pools import Pool

MESH = machine((1, 2))
PLANS = {"dp": Manual(dp=2), "tp": Manual(tp=2), "pp": Manual(pp=2), "parts": Manual(dp=2)}
WAYS_OUT = r'same global batch on every rank.*\n?.*batch="local"'


def ready(plan: str) -> autopar.ParallelModule:
    torch.manual_seed(0)
    return autopar.parallelize(
        Tiny(), MESH, batch(), manual=PLANS[plan], precision="fp64",
        microbatches=2 if plan == "parts" else "auto",
    )  # fmt: skip


def with_own(name: str) -> dict[str, Any]:
    """A batch of which rank 1 has another input `name`."""
    mine = batch()
    if rank() == 1:
        mine[name] = batch(1)[name]
    return mine


def own_nan() -> dict[str, Any]:
    mine = batch()
    mine["x"][7, 7] = float("nan") if rank() else 0.0
    return mine


def own_step(module: autopar.ParallelModule, given: dict[str, Any]) -> None:
    module.step(**given)


def own_call(module: autopar.ParallelModule, given: dict[str, Any]) -> None:
    module.eval()
    module(**given)


def other_calls(module: autopar.ParallelModule, given: dict[str, Any]) -> None:
    own_call(module, given) if rank() else own_step(module, given)


def local_step(module: autopar.ParallelModule, given: dict[str, Any]) -> None:
    module.step(batch="local", **given)


def own_slices(module: autopar.ParallelModule, given: dict[str, Any]) -> None:
    parts = {name: module.local_slice(name) for name in given}
    local_step(module, {name: given[name][part] for name, part in parts.items() if part})


Call = Callable[[autopar.ParallelModule, dict[str, Any]], None]
CASES: dict[str, tuple[tuple[str, ...], Callable[[], dict[str, Any]], Call, str]] = {
    "rows of its own": (
        ("dp", "tp", "pp"), lambda: batch(rank()), own_step,
        r"`labels` on rank 1 is not rank 0's: both are int64 \(8,\), with other values\n"
        r"  `x` on rank 1 is not rank 0's: both are float32 \(8, 8\), with other values\n" ".*"
        + WAYS_OUT,
    ),
    "labels of its own": (
        ("tp",), lambda: with_own("labels"), own_step, "differs between ranks:\n  `labels` on rank",
    ),
    "one value": (("tp",), own_nan, own_step, "differs between ranks:\n  `x` on rank 1"),
    "more rows": (
        ("tp",), lambda: batch(0, 8 + rank()), own_step,
        r"`labels` on rank 1 is not rank 0's: int64 \(9,\), where rank 0 has int64 \(8,\)",
    ),
    "another dtype": (
        ("tp",), lambda: batch() | {"x": batch()["x"].to(torch.float64 if rank() else None)},
        own_step, r"float64 \(8, 8\), where rank 0 has float32 \(8, 8\)",
    ),
    "another key": (
        ("tp",), lambda: batch() | ({"mask": torch.ones(8)} if rank() else {}), own_step,
        "`mask` on rank 1 is not rank 0's: rank 0 has none",
    ),
    "in evaluation": (("dp",), lambda: batch(rank()), own_call, r"pm\(\.\.\.\): the batch differs"),
    "another call": (
        ("tp",), batch, other_calls,
        r"different things: pm\.step\(\.\.\.\) on rank 0, pm\(\.\.\.\) on rank 1",
    ),
    "no rows": (
        ("dp",), lambda: {name: value[:0] for name, value in batch().items()}, own_step,
        r"^`x` is empty: its shape is \(0, 8\)\n  hint: leave empty",
    ),
    "rows that do not divide": (
        ("parts",), lambda: batch(0, 6), own_step,
        r"6 rows does not divide by 4: 2 microbatches x 2 ranks[\s\S]*4 and 8 would"
        r"[\s\S]*drop_last=True",
    ),
    "local: all rows": (
        ("dp",), batch, local_step,
        r"`x` on rank 1: 8 rows, where pm\.local_slice\('x'\) says rows 4 to 8, which are 4",
    ),
    "local: other rows for one slice": (
        ("tp",), lambda: batch(rank()), own_slices,
        r"`x`, rows 0 to 8: rank 1 has other ones than rank 0 \(both are float32 \(8, 8\)",
    ),
}  # fmt: skip


def refused(plan: str, name: str) -> tuple[str, list[torch.Tensor | None]]:
    _, make, call, _ = CASES[name]
    module = ready(plan)
    # What captures a batch says so.
    with warnings.catch_warnings(action="error"), pytest.raises(BatchError) as refusal:
        call(module, make())
    return str(refusal.value), [p.grad for p in module.parameters()]


@one_in(3)
@pytest.mark.parametrize(("name", "plan"), [(n, p) for n, case in CASES.items() for p in case[0]])
def test_every_rank_refuses(name: str, plan: str, workers: Pool) -> None:
    """Nothing was captured and no gradient was made."""
    for message, gradients in workers(2).run(refused, plan, name):
        assert re.search(CASES[name][3], message), message
        assert gradients == [None] * len(gradients)


def plan_of_own() -> str:
    with pytest.raises(BatchError) as refusal:
        autopar.parallelize(Tiny(), MESH, batch(0, 8 + 8 * rank()))
    with pytest.raises(BatchError, match=r"pm\.step\(\.\.\.\): the batch differs"):
        autopar.parallelize(Tiny(), MESH).step(**batch(rank()))
    return str(refusal.value)


def test_examples_of_other_shapes(workers: Pool) -> None:
    for message in workers(2).run(plan_of_own):
        assert "planning: the batch differs between ranks" in message
        assert "int64 (16,), where rank 0 has int64 (8,)" in message


def longer_local(n_rows: int) -> tuple[torch.Tensor, torch.Tensor, str]:
    module = ready("dp")
    whole = module.step(**batch(3, n_rows))
    mine = {k: v[module.local_slice(k, n_rows)] for k, v in batch(3, n_rows).items()}
    local = module.step(batch="local", global_rows=n_rows, **mine)
    with pytest.raises(BatchError, match="7 rows of `x` do not divide over 2 ranks") as refusal:
        module.local_slice("x", 7)
    return whole, local, str(refusal.value)


def test_a_local_batch_of_another_length(workers: Pool) -> None:
    for whole, local, message in workers(2).run(longer_local, 12):
        assert (whole - local).abs() < 1e-12
        assert "drop_last" in message


SIZES: dict[str, tuple[Manual, int, tuple[int, ...]]] = {
    "dp": (Manual(dp=2), 1, (8, 6, 2)),
    "dp, microbatches": (Manual(dp=2), 2, (8, 12, 4)),
    "tp": (Manual(tp=2), 1, (8, 6, 5, 1)),
    "zero-3": (Manual(dp=2, zero=3), 2, (8, 4)),
    "pp": (Manual(pp=2), 2, (8, 6, 2)),
}
Epoch = list[tuple[Tensor, dict[str, Tensor]]]


def doubled(seed: int, n_rows: int) -> dict[str, Any]:
    drawn = batch(seed, n_rows)
    drawn["labels"][0] = seed % 4 if n_rows == 1 else -100
    return drawn | {"x": drawn["x"].double()}


def train(plan: str) -> Epoch:
    """One step of every size, without an optimizer."""
    torch.manual_seed(0)
    manual, microbatches, sizes = SIZES[plan]
    module = autopar.parallelize(
        Tiny().double(), machine((1, 2)), doubled(0, 8), manual=manual, microbatches=microbatches
    )
    found: Epoch = []
    for k, n_rows in enumerate(sizes):
        module.zero_grad()
        found.append((module.step(**doubled(k, n_rows)), module.full_gradients()))
    return found


@one_in(3)
@pytest.mark.parametrize("plan", SIZES)
def test_a_shorter_last_batch(plan: str, workers: Pool) -> None:
    torch.manual_seed(0)
    model = Tiny().double()
    of_ranks = workers(2).run(train, plan)
    for k, n_rows in enumerate(SIZES[plan][2]):
        model.zero_grad()
        wanted = model(**doubled(k, n_rows))
        wanted.backward()
        for found in of_ranks:
            torch.testing.assert_close(found[k][0], wanted.detach(), rtol=0, atol=1e-12)
        for name, gradient in of_ranks[0][k][1].items():
            right = model.get_parameter(name).grad
            torch.testing.assert_close(gradient, right, rtol=0, atol=1e-12)


class Table(nn.Module):
    """Takes a table that has no rows of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor, table: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x) @ table.T, y)


def rows_and_table(n_rows: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(n_rows)
    return {
        "x": torch.randn(n_rows, 4, dtype=torch.float64, generator=generator),
        "table": torch.randn(6, 4, dtype=torch.float64, generator=generator),
        "y": torch.randint(0, 6, (n_rows,), generator=generator),
    }


@pytest.mark.filterwarnings("ignore:captured a batch")
def test_as_many_rows_as_a_table_has() -> None:
    """What has rows is decided by the planned batch, not by sizes that happen to be equal."""
    model = Table().double()
    module = autopar.parallelize(
        model, machine((1, 1)), rows_and_table(8), microbatches=2, manual=Manual()
    )
    for n_rows in (8, 6, 4):
        given = rows_and_table(n_rows)
        torch.testing.assert_close(module.step(**given), model(**given).detach())


def alone() -> autopar.ParallelModule:
    return autopar.parallelize(Tiny(), machine((1, 1)), batch())


def test_a_new_shape_is_announced_once() -> None:
    module = alone()
    with warnings.catch_warnings(action="error"):
        module.step(**batch())
        module.step(outputs=lambda _: None, **batch())
        module.eval()
        module(**batch())
        module.train()
    with pytest.warns(UserWarning, match=r"x float32 \(6, 8\), labels int64 \(6,\).* 1 so far"):
        module.step(**batch(0, 6))
    with pytest.warns(UserWarning, match=r"x float32 \(4, 8\), labels int64 \(4,\).* 2 so far"):
        module.loss(**batch(0, 4))
    with warnings.catch_warnings(action="error"):
        module.step(**batch(1, 6))
        module.step(**batch(1, 4))


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).square().mean()


def n_executors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), Executor) for thing in gc.get_objects())


@nightly
def test_programs_are_dropped_and_freed() -> None:
    """The planned one and the last 16 used stay. A dropped one is captured again."""
    before = n_executors()
    module = autopar.parallelize(One(), machine((1, 1)), {"x": torch.ones(40, 4)})

    def train_on(*sizes: int) -> list[str]:
        with warnings.catch_warnings(record=True, action="always") as told:
            for n_rows in sizes:
                module.step(x=torch.ones(n_rows, 4))
        return [str(w.message) for w in told]

    texts = train_on(*range(1, 17))
    assert ["buckets" in text for text in texts] == [False] * 5 + [True] * 11
    assert train_on(40, 1) == []
    assert len(train_on(17)) == 1  # drops that of 2 rows: 1 row was used later
    assert train_on(1, *range(3, 18), 40) == []
    assert n_executors() == before + 17
    (again,) = train_on(2)
    assert "18 so far, at most 16 are kept (1 of them again): if shapes keep changing" in again
    assert n_executors() == before + 17
