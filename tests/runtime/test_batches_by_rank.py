"""Ranks that pass other batches: refused on every rank, by name, before anything runs."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import autopar
from autopar import BatchError, Manual
from tests.helpers.jobs import machine, rank
from tests.helpers.models.tiny_model import Tiny, batch
from tests.helpers.pools import Pool

MESH = machine((1, 2))
PLANS = {"dp": Manual(dp=2), "tp": Manual(tp=2), "pp": Manual(pp=2)}
WAYS_OUT = r'same global batch on every rank.*\n?.*batch="local"'


def ready(plan: str) -> autopar.ParallelModule:
    torch.manual_seed(0)
    return autopar.parallelize(Tiny(), MESH, batch(), manual=PLANS[plan], precision="fp64")


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
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what captures a batch says so
        with pytest.raises(BatchError) as refusal:
            call(module, make())
    return str(refusal.value), [p.grad for p in module.parameters()]


@pytest.mark.parametrize(("name", "plan"), [(n, p) for n, case in CASES.items() for p in case[0]])
def test_every_rank_refuses(name: str, plan: str, workers: Pool) -> None:
    """Nothing was captured and no gradient was made."""
    for message, gradients in workers(2).run(refused, plan, name):
        assert re.search(CASES[name][3], message), message
        assert gradients == [None] * len(gradients)


def empty() -> str:
    module = ready("dp")
    with pytest.raises(BatchError) as refusal:
        module.step(**{name: value[:0] for name, value in batch().items()})
    return str(refusal.value)


def test_an_empty_batch_is_refused(workers: Pool) -> None:
    for message in workers(2).run(empty):
        assert message.startswith("`x` is empty: its shape is (0, 8)\n  hint: leave empty")


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
