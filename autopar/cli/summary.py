"""Plans for programs and for people: as JSON, and as text where only the file is known."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from autopar.errors import OptionError

if TYPE_CHECKING:
    from autopar.plan_data import PlanData
    from autopar.planning import Plan


def plan_json(plan: Plan) -> dict[str, Any]:
    """A bound plan: what it decided, what it communicates, what it should cost."""
    return data_json(plan.data) | {
        "predicted": asdict(plan.predicted),
        "collectives": [asdict(collective) for collective in plan.collectives()],
    }


def data_json(data: PlanData) -> dict[str, Any]:
    """The decisions of a plan; all there is of one that was only loaded."""
    return {
        "model": data.model,
        "mesh": list(data.mesh.shape),
        "hardware": data.mesh.hardware,
        "axes": dict(data.axes),
        "microbatches": data.microbatches,
        "precision": data.precision,
        "optimizer": data.optimizer,
        "chosen": data.chosen,
        "objective_s": data.objective_s,
        "gap": data.gap,
        "parameters": dict(data.parameters),
        "alternatives": [asdict(alternative) for alternative in data.alternatives],
    }


def data_text(data: PlanData, name: str | None = None) -> str:
    """A plan without its model: where parameters are kept, and how operators are placed.

    With `name`, only that parameter, operator or module. Raises `OptionError` for a name that
    the plan does not have.
    """
    axes = " x ".join(f"{axis}={size}" for axis, size in data.axes.items())
    if name is not None:
        found = {
            key: text
            for key, text in (*data.parameters.items(), *data.operators.items())
            if key == name or key.startswith(f"{name}/")
        }
        if not found:
            raise OptionError(
                f"the plan has no parameter, operator or module {name!r}",
                hint="names are the keys of `parameters` and `operators` in the plan file",
            )
        return "\n".join(f"{key}  {text}" for key, text in found.items())
    width = max((len(key) for key in data.parameters), default=9)
    return "\n".join(
        [
            f"{data.model} on ({axes}), {data.microbatches} microbatch"
            f"{'' if data.microbatches == 1 else 'es'}: {data.chosen}",
            "",
            f"{'parameter':{width}}  stored (on {' '.join(data.axes)})",
            *(f"{key:{width}}  {text}" for key, text in data.parameters.items()),
            "",
            "costs and collectives need the model: --model MODEL",
        ]
    )
