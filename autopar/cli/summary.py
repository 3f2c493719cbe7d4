"""Plans as JSON, and plans as text when only the plan file is known."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from autopar.errors import OptionError

if TYPE_CHECKING:
    from autopar.planning import Plan
    from autopar.plans import PlanData


def plan_json(plan: Plan) -> dict[str, Any]:
    """A bound plan: its decisions, its collectives and its predicted cost."""
    return data_json(plan.data) | {
        "predicted": asdict(plan.predicted),
        "collectives": [asdict(collective) for collective in plan.collectives()],
    }


def data_json(data: PlanData) -> dict[str, Any]:
    """The decisions of a plan; a plan that is loaded but not bound has nothing else."""
    return {
        "model": data.model,
        "mesh": list(data.mesh.shape),
        "hardware": data.mesh.hardware,
        "schedule": data.schedule,
        "stages": _stages_json(data),
        "microbatches": data.microbatches,
        "precision": data.precision,
        "optimizer": data.optimizer,
        "chosen": data.chosen,
        "objective_s": data.objective_s,
        "stage_gap": data.stage_gap,
        "parameters": dict(data.parameters),
        "alternatives": [asdict(alternative) for alternative in data.alternatives],
    }


def _stages_json(data: PlanData) -> list[dict[str, Any]]:
    """Every stage: its ranks, its modules and parameters, and how values cross its boundaries."""
    from autopar.planning import Plan

    return [
        {
            "mesh_shape": list(stage.mesh_shape), "ranks": list(stage.ranks),
            "axes": dict(stage.axes), "begins_at": record.begins_at,
            "modules": list(stage.modules), "parameters": dict(record.parameters),
            "received": dict(record.received), "sent": dict(record.sent),
        }
        for stage, record in zip(Plan(data).stages, data.stages, strict=True)
    ]  # fmt: skip


def data_text(data: PlanData, name: str | None = None) -> str:
    """A plan without its model: how its parameters are stored.

    With `name`, only that parameter, operator or module. Raises `OptionError` for a name that
    the plan does not have.
    """
    if name is not None:
        several = len(data.stages) > 1
        found = [
            f"{key}  {text}" + (f"  on stage {number}" if several else "")
            for number, stage in enumerate(data.stages)
            for key, text in (*stage.parameters.items(), *stage.operators.items())
            if key == name or key.startswith(f"{name}/")
        ]
        if not found:
            raise OptionError(
                f"the plan has no parameter, operator or module {name!r}",
                hint="names are the keys of `parameters` and `operators` in the plan file",
            )
        return "\n".join(found)
    from autopar.report import headline

    tables = []
    for number, stage in enumerate(data.stages):
        width = max((len(key) for key in stage.parameters), default=9)
        tables += [
            "",
            *([f"stage {number}, from {stage.begins_at}"] if len(data.stages) > 1 else []),
            f"{'parameter':{width}}  stored (on {' '.join(stage.axes)})",
            *(f"{key:{width}}  {text}" for key, text in stage.parameters.items()),
        ]
    note = "costs and collectives need the model: --model MODEL"
    return "\n".join([headline(data), *tables, "", note])
