"""MODEL|PLAN.json: a saved plan, or a new plan of a model, made behind a progress bar."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.models import is_plan_file, load_subject
from autopar.cli.options import PlanRequest
from autopar.cli.shell import progress
from autopar.errors import OptionError

if TYPE_CHECKING:
    from autopar.cli.models import Subject
    from autopar.planning import Plan

ModelOrPlan = Annotated[
    str, typer.Argument(metavar="MODEL|PLAN.json", help="A model to plan, or a saved plan.")
]
ModelOption = Annotated[
    str | None, typer.Option("--model", metavar="MODEL", help="The model of PLAN.json.")
]


def load_model(model: str, request: PlanRequest, *, real: bool = False) -> Subject:
    return load_subject(model, request.batch, request.seq, real=real)


def make_plan(model: str, request: PlanRequest) -> Plan:
    """A new plan, with a progress bar that names the planner's phases."""
    mesh, options = request.machine(), request.options()
    with progress("loading the model") as report:
        subject = load_model(model, request)
        from autopar.api import plan

        report("capturing")
        made = plan(subject.model, mesh, subject.example_inputs, progress=report, **options)
    return made


def load_plan(subject: str, request: PlanRequest) -> Plan:
    """A saved plan without its model."""
    from autopar.planning import Plan

    _refuse_planning_flags(request)
    return Plan.load(subject)


def plan_of(subject: str, model: str | None, request: PlanRequest, what: str) -> Plan:
    """A saved plan bound to its model, or a new plan of a model.

    `what` is the command, for messages. Raises `OptionError` if --model is missing or unused.
    """
    if not is_plan_file(subject):
        if model is not None:
            raise OptionError(f"--model is for a plan file, and {subject} is a model")
        return make_plan(subject, request)
    if model is None:
        raise OptionError(
            f"{what} is made from a plan and its model",
            hint=f"autopar {what} {subject} --model MODEL",
        )
    loaded = load_plan(subject, request)
    return loaded.bind(load_model(model, request).model)


def _refuse_planning_flags(request: PlanRequest) -> None:
    """Refuse flags that a saved plan would ignore."""
    given = [*request.given, *(k for k in ("mesh", "hardware") if getattr(request, k) is not None)]
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise OptionError(f"a saved plan is decided: {flags}", hint="plan again with autopar plan")
