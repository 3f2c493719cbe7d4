"""Laws of plans: textbook layouts where they are cheapest, less memory is never faster, and equal
inputs give equal plans.

`make nightly` plans with less and less memory, on one node and on two, which takes minutes.
"""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar import Mesh, Plan
from autopar.errors import InfeasibleError
from autopar.plans import parse_storage
from autopar.runtime.launch import WorkerPool
from tests.helpers.harness import Mlp
from tests.helpers.jobs import rank
from tests.helpers.machines import A100, cluster
from tests.helpers.models.wide_models import meta_tokens, wide_gpt2
from tests.helpers.nightly import nightly, one_in

REL = 1e-9
UNITS = {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}


# -- layouts -------------------------------------------------------------------------------------


@one_in(2)
@pytest.mark.parametrize(("n_layers", "n_microbatches"), [(2, 2), (3, 1)])
def test_a_block_has_four_all_reduces_per_microbatch(n_layers: int, n_microbatches: int) -> None:
    """Wide blocks and few rows, on eight devices of a node: two forward and two backward per layer,
    and one pair around the embedding and the head."""
    plan = autopar.plan(
        wide_gpt2(n_layers, 4096, 256), Mesh((1, 8), hardware=A100), meta_tokens(2, 256), stages=1,
        mesh_shape="as-given", microbatches=n_microbatches,
        forbid=["zero1", "zero2", "zero3", "sequence"],
    )  # fmt: skip
    expected = (2 * n_layers + 1) * n_microbatches
    residual_bytes = 2 // n_microbatches * 256 * 4096 * torch.bfloat16.itemsize
    found: Counter[str] = Counter()
    for call in plan.collectives():
        if call.kind == "all_reduce" and call.size_bytes == residual_bytes:
            found[call.phase] += call.count
    assert found == {"forward": expected, "backward": expected}
    kinds = {(call.kind, call.phase) for call in plan.collectives()}
    assert kinds == {("all_reduce", "forward"), ("all_reduce", "backward")}


@cache
def within(memory_limit: int | None) -> Plan:
    """Many rows over eight devices of one axis."""
    return autopar.plan(
        wide_gpt2(4, 2048, 256), Mesh((8,), hardware=A100), meta_tokens(256, 256), stages=1,
        mesh_shape="as-given", microbatches=8, memory_limit=memory_limit, recompute="none",
    )  # fmt: skip


@nightly
def test_shards_are_kept_where_the_batch_is_large_and_gathered_at_each_use_where_they_must() -> (
    None
):
    """ZeRO-1 costs nothing over data parallelism. ZeRO-3 is bought when memory forces it, for most
    parameters."""
    periods = []
    for limit in (None, 1_650_000_000):
        plan = within(limit)
        stored = {name: parse_storage(text, name) for name, text in plan.data.parameters.items()}
        is_shard = [storage.spec.placements[0].is_shard for storage in stored.values()]
        assert all(is_shard) or (limit and sum(is_shard) >= 0.75 * len(is_shard))
        used = Counter(str(p[0]) for uses in plan.uses.values() for p in uses.values())
        assert used["R"] >= 0.9 * used.total(), "not by data parallelism"
        periods.append({storage.period for storage in stored.values()})
    assert periods[0] == {"step"}
    assert "use" in periods[1]
    kinds = {(c.kind, c.phase) for c in within(1_650_000_000).collectives()}
    assert {("all_gather", "param_gather"), ("reduce_scatter", "grad_sync")} <= kinds


@nightly
@pytest.mark.parametrize(
    ("n_layers", "n_nodes", "n_rows", "microbatches"),
    [(4, 2, 48, 4), (96, 48, 1536, "auto")],
)
def test_gpt_175b_is_split_inside_nodes_and_has_stages_across(
    n_layers: int, n_nodes: int, n_rows: int, microbatches: int | str
) -> None:
    """As Narayanan et al. (SC 2021, section 5.1) train GPT-3 by hand on nodes of eight A100,
    without ZeRO; and a few blocks of its width."""
    plan = autopar.plan(
        wide_gpt2(n_layers, 12288, 2048, 51200), Mesh((n_nodes, 8), hardware=A100),
        meta_tokens(n_rows, 2048), forbid=["zero1", "zero2", "zero3"], microbatches=microbatches,
        time_limit_s=None,
    )  # fmt: skip
    for stage in plan.stages:
        assert 1 < stage.axes["tp"] <= 8 and 8 % stage.axes["tp"] == 0, stage.axes
        assert len(stage.ranks) % 8 == 0 or 8 % len(stage.ranks) == 0
    for call in plan.collectives():
        if call.phase in ("forward", "backward") and call.size_bytes > 2**20:
            assert call.axis == "tp", call
    assert n_layers == 4 or len(plan.stages) > 1
    assert plan.predicted.peak_bytes <= 80e9


# -- memory --------------------------------------------------------------------------------------

SMALL = (wide_gpt2(4, 1024, 128, 16384), meta_tokens(64, 128))


def small(shape: tuple[int, ...], **options: Any) -> Plan:
    model, batch = SMALL
    return autopar.plan(model, Mesh(shape, hardware=A100), batch, microbatches=4, **options)


def least_bytes(error: InfeasibleError) -> float:
    """The bytes that the message asks for, rounded up."""
    said = re.search(
        r"leanest plan seen needs ([\d.]+) ([KMG]?i?B), ([\d.]+) [KMG]?i?B more", str(error)
    )
    assert said is not None, error
    assert "hint: use more microbatches or devices" in str(error)
    digits = len(said[1].partition(".")[2])
    return (float(said[1]) + 10.0**-digits) * UNITS[said[2]]


AS_GIVEN: dict[str, Any] = {"stages": 1, "mesh_shape": "as-given"}


@nightly
@pytest.mark.parametrize(
    ("shape", "limits", "options"),
    [
        ((1, 4), [440_000_000], AS_GIVEN),
        ((1, 4), [530_000_000, 440_000_000], AS_GIVEN),
        ((1, 4), [440_000_000, 360_000_000], {"stages": 1}),
        ((2, 4), [328_934_718, 255_838_113, 182_741_510], {}),
    ],
)
def test_less_memory_is_never_faster(
    shape: tuple[int, ...], limits: list[int], options: dict[str, Any]
) -> None:
    """A plan that fits in less memory fits in more, so the optimum rises as memory falls, and is
    never below a bound that was proven with more."""
    plans = [small(shape, memory_limit=limit, **options) for limit in (None, *limits)]
    bound_s = 0.0
    for limit, plan in zip((None, *limits), plans, strict=True):
        assert plan.objective_s >= bound_s * (1 - REL), f"{limit} bytes"
        assert plan.data.bound_s is not None
        bound_s = max(bound_s, plan.data.bound_s)
    free_s = plans[0].objective_s
    n_slower = sum(plan.objective_s > free_s * (1 + REL) for plan in plans)
    assert n_slower >= max(1, len(limits) - 1), "memory does not bind"


@nightly
@pytest.mark.parametrize("options", [AS_GIVEN, {"stages": 1}])
def test_the_bytes_that_are_said_to_be_missing_are_enough(options: dict[str, Any]) -> None:
    with pytest.raises(InfeasibleError, match="no plan fits in") as caught:
        small((1, 4), memory_limit=236_000_000, **options)
    enough = least_bytes(caught.value)
    assert small((1, 4), memory_limit=int(enough) + 1, **options).objective_s > 0


def test_a_plan_is_predicted_to_keep_the_memory_limit() -> None:
    limit = 1_650_000_000
    assert within(limit).predicted.peak_bytes <= limit


# -- determinism ---------------------------------------------------------------------------------


def plan_stages() -> Plan:
    torch.manual_seed(0)
    batch = {name: torch.zeros(16, 64) for name in ("x", "y")}
    return autopar.plan(Mlp(width=64, n_layers=4), cluster(2, 2), batch, microbatches=4)


def plan_within_a_budget() -> Plan:
    return small((1, 4), memory_limit=440_000_000, **AS_GIVEN)


def save_plan(make: Callable[[], Plan], path: str) -> int:
    """The job of rank 0 plans; all ranks return what their process hashes a word to."""
    if rank() == 0:
        make().save(path)
    return hash("seed")


@nightly
@pytest.mark.parametrize("make", [plan_stages, plan_within_a_budget])
def test_another_hash_seed_gives_the_same_bytes(
    make: Callable[[], Plan], tmp_path: Path, workers: Callable[[int], WorkerPool]
) -> None:
    """Every process draws a seed of its own, unless PYTHONHASHSEED is set (`make` empties it)."""
    here, there = (tmp_path / name for name in ("here.json", "there.json"))
    hashed = workers(2).run(save_plan, make, str(there))[0]
    assert hashed != save_plan(make, str(here)), "the seeds are the same: unset PYTHONHASHSEED"
    first, second = here.read_bytes(), there.read_bytes()
    assert len(first) > 1000
    assert first == second


@one_in(2)
@pytest.mark.parametrize("memory_limit", [None, 80_000])
def test_planning_leaves_no_cycle(memory_limit: int | None) -> None:
    """What a search made is freed with its plan, without the garbage collector; also where some
    candidates do not fit."""
    batch = {name: torch.zeros(16, 64) for name in ("x", "y")}
    mesh = autopar.Mesh((1, 2), hardware="a100-80gb")
    gc.collect()
    gc.disable()
    try:
        autopar.plan(Mlp(width=64, n_layers=1), mesh, batch, memory_limit=memory_limit)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kept = {
            type(o).__qualname__ for o in gc.garbage if type(o).__module__.startswith("autopar")
        }
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert kept == set()
