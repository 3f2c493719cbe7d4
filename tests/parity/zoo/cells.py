"""Cells of the parity table for the zoo: family x mesh x plan.

    auto      the search
    tensor    the search without data parallelism, so that weights are sharded
    zero3     the ZeRO-3 recipe

The machine has slow devices and fast links (slower between nodes than inside), so sharding pays.
A plan that repeats everything on every rank does not pass: at least the fraction `LEAST` of the
matmul FLOPs must be sharded. Under `tensor`, at least `LEAST` of the FLOPs of matmuls with weights
must also go through sharded weights (`shortfall`).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import autopar
from autopar import Device, Link, Manual, Mesh, Plan
from autopar.report import Division, division, headline
from autopar.runtime.launch import WorkerPool
from tests.helpers.jobs import Case, Trained, errors, train_alone, train_module
from tests.parity.zoo import FAMILIES
from tests.parity.zoo.entries import Entry

LEAST = 0.8
# Microbatches of a step of two stages: each of a stage's two ranks has one row of a microbatch.
PIPELINE_MICROBATCHES = 4
INSIDE, BETWEEN = Link(1.0, 0.01), Link(4.0, 0.04)  # seconds, seconds per byte
SLOW = Device(flops_per_s=1.0, bytes_per_s=1e30, memory_bytes=1e15)


class Place(NamedTuple):
    mesh: tuple[int, int]
    n_stages: int = 1


PLACES = {
    "1x2": Place((1, 2)),
    "1x4": Place((1, 4)),
    "2x2": Place((2, 2)),
    "2-stages": Place((2, 2), 2),  # each (1, 2)
}


class ZooCell(NamedTuple):
    """One family on one mesh by one plan."""

    family: str
    place: str
    plan: str

    def __str__(self) -> str:
        return f"zoo {self.family} {self.place} {self.plan}"

    @property
    def entry(self) -> Entry:
        return FAMILIES[self.family]

    @property
    def case(self) -> Case:
        return self.entry.case

    @property
    def shape(self) -> tuple[int, ...]:
        return PLACES[self.place].mesh

    @property
    def n_ranks(self) -> int:
        return self.machine.n_ranks

    @property
    def machine(self) -> Mesh:
        return Mesh(self.shape, links=[BETWEEN, INSIDE], device=SLOW)

    def options(self) -> dict[str, Any]:
        n_stages = PLACES[self.place].n_stages
        several = n_stages > 1 and self.entry.microbatches > 1
        options: dict[str, Any] = {
            "precision": "fp64",
            "microbatches": PIPELINE_MICROBATCHES if several else self.entry.microbatches,
            **self.entry.options,
        }
        if self.plan == "zero3":
            return options | {"manual": Manual(pp=n_stages, dp=self.n_ranks // n_stages, zero=3)}
        options |= {"stages": n_stages, "mesh_shape": "as-given"}
        forbid = ["data", "zero3"]  # gathers that compute hides cost less than sharded products
        return options | ({"forbid": forbid} if self.plan == "tensor" else {})


def zoo_cells() -> list[ZooCell]:
    """Every family on every mesh by every plan that applies, two ranks first."""
    return [
        ZooCell(family, place, plan)
        for place in PLACES
        for family, entry in FAMILIES.items()
        for plan in entry.plans
    ]


class Outcome(NamedTuple):
    """`errors` by name; `shown` is the plan; `lacks` says what is not sharded enough."""

    errors: dict[str, float]
    shown: str
    lacks: str | None


def run(cell: ZooCell, pool: WorkerPool) -> Outcome:
    """Plan here, train on the pool by the plan file, compare with one process."""
    case = cell.case
    plan = autopar.plan(case.model(), cell.machine, case.batch(0), **cell.options())
    assert plan.bound is not None
    divided = division(plan.bound.pipeline)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        plan.save(path)
        found = pool.run(train, cell, str(path))
    shown = f"{headline(plan.data)}; {divided}"
    return Outcome(errors(found, train_alone(case)), shown, shortfall(cell.plan, divided))


def train(cell: ZooCell, path: str) -> Trained:
    """The job of one rank."""
    case, plan = cell.case, Plan.load(path)
    module = autopar.parallelize(case.model(), cell.machine, case.batch(0), plan=plan)
    return train_module(module, case.batch)


def shortfall(plan: str, divided: Division) -> str | None:
    """What a plan does not shard enough; None if it shards enough."""
    if divided.products < LEAST:
        return f"only {divided.products:.0%} of the matmul FLOPs are sharded"
    if plan == "tensor" and divided.by_weights < LEAST:
        return f"only {divided.by_weights:.0%} of the FLOPs go through sharded weights"
    return None
