"""Plans as JSON, and plans as text when only the plan file is known."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.planning import Plan
    from autopar.plans import PlanData


def next_commands(command: str) -> str:
    """What to run after `autopar plan ...`, with the same model, mesh and options."""
    report = command.replace("autopar plan", "autopar report", 1)
    return f"next      {command} -v\n          {report} -o plan.html"


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
    from autopar.report import folded_names, headline, matching_names

    several = len(data.stages) > 1
    if name is not None:
        entries = [
            (key, text + (f"  on stage {number}" if several else ""))
            for number, stage in enumerate(data.stages)
            for key, text in (*stage.parameters.items(), *stage.operators.items())
        ]
        meant = matching_names(name, [key for key, _ in entries])
        within = tuple(f"{full}{mark}" for full in meant for mark in "/.")
        found = [(key, text) for key, text in entries if key in meant or key.startswith(within)]
        return "\n".join(f"{key}  {text}" for key, text in folded_names(found))
    tables = []
    for number, stage in enumerate(data.stages):
        rows = folded_names(stage.parameters.items())
        width = max((len(key) for key, _ in rows), default=9)
        tables += [
            "",
            *([f"stage {number}, from {stage.begins_at}"] if several else []),
            f"{'parameter':{width}}  stored (on {' '.join(stage.axes)})",
            *(f"{key:{width}}  {text}" for key, text in rows),
        ]
    note = "costs and collectives need the model: --model MODEL"
    return "\n".join([headline(data), *tables, "", note])
