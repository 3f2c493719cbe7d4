"""The public functions: plan, shard, save, load and compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from autopar.capture import check_kind
from autopar.cost.hardware import load_profile
from autopar.errors import OptionError
from autopar.mesh import Mesh
from autopar.module import ParallelModule
from autopar.options import BESIDE_A_PLAN, PRICED, Options
from autopar.passes.binding import ExampleInputs
from autopar.passes.compilation import Compilation
from autopar.passes.facts import Source, Target
from autopar.passes.pipeline import PASSES
from autopar.planning import MeshLike, Plan, PlanOptions, planned, settled_heap
from autopar.report import ComparedPlan, Comparison
from autopar.runtime import checkpoints, state
from autopar.runtime.groups import together_in


@settled_heap()
def plan(
    model: nn.Module, mesh: MeshLike, example_inputs: ExampleInputs, **options: Unpack[PlanOptions]
) -> Plan:
    """Choose how to run `model` on `mesh`; needs no devices and no weights.

    example_inputs: one global batch, a dict of keyword inputs or a tuple of positional ones; meta
    or fake tensors are enough. Options: `autopar.options.Options`.

    Raises `CaptureError`, `MissingRuleError`, `InfeasibleError`, `OptionError` or
    `NotSupportedError`, each with a hint.
    """
    check_kind(model)
    target = Target(_machine(mesh), Options.of(**options))
    return planned(Compilation(PASSES, Source(model, example_inputs), target))


def parallelize(
    model: nn.Module,
    mesh: MeshLike,
    example_inputs: Mapping[str, Any] | Sequence[Any] | None = None,
    *,
    plan: Plan | None = None,
    weights: str = "rank0",
    **options: Unpack[PlanOptions],
) -> ParallelModule:
    """Shard `model` over `mesh`; call it on every rank of a torchrun or `autopar.launch` job.

    example_inputs: one global batch, dict or tuple. Without it and without `plan`, planning waits
    for `pm.prepare(**batch)` or the first step. weights: "rank0" (rank 0's values), "init" (a model
    on meta, initialised shard by shard), or a path. The model object does not change. Options:
    `autopar.options.Options`; with a `plan`, only `loss_fn`, `optimizer_gather`, `progress`
    and `check_every`.

    Raises `MeshError` if the number of processes is not that of the mesh's ranks, `OptionError` for
    an option that conflicts with the plan, `DivergenceError` if ranks call it differently.
    """
    machine = Mesh.of(mesh) if plan is not None else _machine(mesh)
    chosen = Options.of(**options if plan is None else _options_beside(plan, options))
    given = {"example_inputs": example_inputs is not None, "plan": plan is not None}
    brings = " and ".join(name for name, is_given in given.items() if is_given) or "neither"
    module = ParallelModule(model, machine, chosen, weights, brings)
    if plan is not None:
        module._use_plan(plan, example_inputs)
    elif example_inputs is not None:
        module._make_plan(example_inputs)
    return module


def _machine(mesh: MeshLike) -> Mesh:
    """The mesh to plan for; a wrong name of its hardware is told before the model is traced."""
    machine = Mesh.of(mesh)
    if machine.hardware is not None and machine.links is None:
        load_profile(machine.hardware)
    return machine


_ABSENT = object()


def _options_beside(plan: Plan, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options for running a plan: those of `BESIDE_A_PLAN`, its dtypes and prices."""
    data = plan.data
    of_plan = {
        "precision": data.precision,
        "reduce_dtype": data.dtypes.reduce_dtype,
        "master_weights": data.master_weights,
    }
    refused = [
        f"{name}={value!r}"
        for name, value in options.items()
        if name not in BESIDE_A_PLAN and of_plan.get(name, _ABSENT) != value
    ]
    if refused:
        raise OptionError(
            f"{', '.join(refused)} beside a plan, which has decided that",
            hint="leave it out, or plan again with it",
        )
    return {**{name: getattr(data, name) for name in PRICED}, **options, **of_plan}


def save(
    module: ParallelModule,
    optimizer: checkpoints.Optimizers,
    path: str | Path,
    step: int = 0,
    extra: Mapping[str, Any] | None = None,
    states: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint that any mesh and plan can load.

    optimizer: one, a list or dict of several with different parameters, or None. `extra` is JSON.
    `states` are objects with `state_dict` and `load_state_dict` (a scheduler, a loader), by name.
    The generators of Python, numpy and torch are saved, too.

    Every rank must call it; raises `AbsentRanksError`, which names those that do not.
    """
    held = module.checkpointed()
    with together_in("autopar.save(...)"):
        checkpoints.save(held, optimizer, path, step, extra, states)


def load(
    module: ParallelModule,
    optimizer: checkpoints.Optimizers,
    path: str | Path,
    states: Mapping[str, Any] | None = None,
    verify: bool = True,
) -> tuple[int, dict[str, Any]]:
    """Read a checkpoint into module, optimizer and `states`; returns (step, extra).

    optimizer: as for `save`; several may share out the parameters in another way.

    A path with several steps (`AsyncSaver`) stands for the newest that is whole. The generators of
    Python, numpy and torch continue as well. `verify=False` leaves out the checksums of the data.

    Every rank must call it; raises `AbsentRanksError`, which names those that do not, and
    `StateError`, with nothing changed on any rank, if the checkpoint is damaged or does not fit.
    """
    held = module.checkpointed()
    with together_in("autopar.load(...)"):
        loaded = checkpoints.load(held, optimizer, path, states, verify)
    module.note_seed()
    return loaded


def export_weights(
    module: ParallelModule, path: str | Path, max_shard_bytes: int = 5_000_000_000
) -> None:
    """Write whole weights as Hugging Face's safetensors, without a whole model on any rank.

    `weights=path`, `from_pretrained` and `safetensors` read them: a model that has a `config` of
    transformers gets its `config.json` beside them. Every rank must call it; raises
    `AbsentRanksError`, which names those that do not, and `StateError` for a folder that is there.
    """
    held = module.checkpointed()
    with together_in("autopar.export_weights(...)"):
        state.export_weights(
            held.place, module.shards, path, max_shard_bytes, module.persistent_buffers,
            module.write_configs,
        )  # fmt: skip


def compare(*plans: Plan) -> Comparison:
    """Compare plans: costs, collectives and placements; as `.text()`, `.html()` or JSON.

    Unbound plans are compared without costs. Raises `OptionError` for less than two plans.
    """
    if len(plans) < 2:
        raise OptionError(
            f"{len(plans)} to compare: give two plans or more",
            hint="plan.explain() lists the alternatives to one",
        )
    compared = tuple(
        ComparedPlan(made.data, made.predicted, made.bound.collectives, made.bound.bars())
        if made.bound
        else ComparedPlan(made.data)
        for made in plans
    )
    return Comparison(tuple(f"plan {k}" for k in range(1, len(plans) + 1)), compared)
