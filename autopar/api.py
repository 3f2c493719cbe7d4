"""The front door: shard a model, save and load what it learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.errors import OptionError
from autopar.mesh import Mesh
from autopar.module import ParallelModule
from autopar.options import Options
from autopar.passes.binding import ExampleInputs
from autopar.passes.compilation import Compilation
from autopar.passes.facts import Source, Target
from autopar.passes.pipeline import PASSES
from autopar.planning import Plan, planned, settled_heap
from autopar.report import ComparedPlan, Comparison
from autopar.runtime import state


@settled_heap()
def plan(model: nn.Module, mesh: Any, example_inputs: ExampleInputs, **options: Any) -> Plan:
    """Choose how to run `model` on `mesh`; needs no devices and no weights.

    example_inputs: one global batch, a dict of keyword inputs or a tuple of positional ones;
    meta or fake tensors will do. Options: see `autopar.options.Options`.

    Raises `CaptureError`, `MissingRuleError`, `InfeasibleError`, `OptionError`,
    `NotSupportedError`, each with a way out.
    """
    target = Target(Mesh.of(mesh), Options.of(**options))
    return planned(Compilation(PASSES, Source(model, example_inputs), target))


def parallelize(
    model: nn.Module,
    mesh: Any,
    example_inputs: Mapping[str, Any] | Sequence[Any] | None = None,
    *,
    plan: Plan | None = None,
    weights: str = "rank0",
    **options: Any,
) -> ParallelModule:
    """Shard `model` over `mesh`; call it on every rank of a torchrun or `autopar.launch` job.

    example_inputs: one global batch, dict or tuple. Without it and without `plan`, planning
    waits for `pm.prepare(**batch)` or the first step. weights: "rank0" (rank 0's values),
    "init" (a model on meta, initialised shard by shard), or a path. The model object is left
    untouched. Options: `autopar.options.Options`; a `plan` has decided them all but `loss_fn`.

    Raises `MeshError` when the number of processes is not the mesh's, `OptionError` for an
    option that the plan has decided otherwise.
    """
    if plan is not None:
        options = _options_beside(plan, options)
    module = ParallelModule(model, Mesh.of(mesh), Options.of(**options), weights)
    if plan is not None:
        module._use_plan(plan, example_inputs)
    elif example_inputs is not None:
        module._make_plan(example_inputs)
    return module


# What is not part of a plan, because it is code or because it is about planning alone.
_BESIDE_A_PLAN = frozenset({"loss_fn", "progress"})


def _options_beside(plan: Plan, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options for running a plan: the user's code, and the plan's own precision."""
    precision = plan.data.precision
    refused = [
        f"{name}={value!r}"
        for name, value in options.items()
        if name not in _BESIDE_A_PLAN and (name, value) != ("precision", precision)
    ]
    if refused:
        raise OptionError(
            f"{', '.join(refused)} beside a plan, which has decided that",
            hint="leave it out, or plan again with it",
        )
    return {**options, "precision": precision}


def save(
    module: ParallelModule,
    optimizer: torch.optim.Optimizer | None,
    path: str | Path,
    step: int = 0,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint that any mesh and plan can load; every rank calls it."""
    state.save_checkpoint(
        module._placed, module.shards, optimizer, path, step, extra, module.persistent_buffers,
        module.stream,
    )  # fmt: skip


def load(
    module: ParallelModule, optimizer: torch.optim.Optimizer | None, path: str | Path
) -> tuple[int, dict[str, Any]]:
    """Read a checkpoint into the module and its optimizer; returns (step, extra)."""
    return state.load_checkpoint(
        module._placed, module.shards, optimizer, path, module.persistent_buffers, module.stream
    )


def compare(*plans: Plan) -> Comparison:
    """Plans side by side: costs, collectives, and what lies otherwise; `.text()`, `.html()`, JSON.

    Plans that were only loaded are compared without costs. Raises `OptionError` for less than two.
    """
    if len(plans) < 2:
        raise OptionError(
            f"{len(plans)} to compare: give two plans or more",
            hint="plan.explain() lists the alternatives to one",
        )
    compared = tuple(
        ComparedPlan(made.data, made.predicted, tuple(made.collectives()))
        if made.bound
        else ComparedPlan(made.data)
        for made in plans
    )
    return Comparison(tuple(f"plan {k}" for k in range(1, len(plans) + 1)), compared)
