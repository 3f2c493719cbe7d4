"""MODEL|PLAN.json: a saved plan, or a new plan of a model, made behind a progress bar."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.models import is_plan_file, load_loss, load_subject
from autopar.cli.options import PlanRequest
from autopar.cli.shell import progress
from autopar.errors import OptionError

if TYPE_CHECKING:
    from autopar.cli.models import Subject
    from autopar.planning import Plan, ShellModel

ModelOrPlan = Annotated[
    str, typer.Argument(metavar="MODEL|PLAN.json", help="A model to plan, or a saved plan.")
]
ModelOption = Annotated[
    str | None, typer.Option("--model", metavar="MODEL", help="The model of PLAN.json.")
]


def load_model(model: str, request: PlanRequest, *, real: bool = False) -> Subject:
    """MODEL, its batch, and the loss of --loss."""
    subject = load_subject(model, request.batch, request.seq, real=real)
    return subject if request.loss is None else replace(subject, loss_fn=load_loss(request.loss))


def make_plan(model: str, request: PlanRequest) -> Plan:
    """A new plan, with a progress bar that names the planner's phases."""
    mesh, options = request.machine(), request.options()
    with progress("loading the model") as report:
        subject = load_model(model, request)
        from autopar.api import plan

        report("capturing")
        options |= {"progress": report, "loss_fn": subject.loss_fn}
        made = plan(subject.model, mesh, subject.example_inputs, **options)
    return made


def shell_model(model: str, request: PlanRequest) -> ShellModel:
    """How this command line names its model."""
    from autopar.planning import ShellModel

    return ShellModel(model, request.batch, request.seq, request.loss)


def load_plan(subject: str, request: PlanRequest, model: str | None = None) -> Plan:
    """A saved plan without its model."""
    if request.hardware is not None and model is None:
        raise OptionError(
            f"--hardware {request.hardware} is for costs, and {subject} alone has none",
            hint="give --model MODEL too, or leave it out",
        )
    from autopar.planning import Plan

    if request.loss is not None and model is None:
        raise OptionError(
            f"--loss {request.loss} is for a model, and {subject} is a plan",
            hint="give --model MODEL too, or leave it out",
        )
    _refuse_planning_flags(request)
    return Plan.load(subject)


def plan_of(subject: str, model: str | None, request: PlanRequest, what: str) -> Plan:
    """A saved plan bound to its model, or a new plan of a model.

    A saved plan is priced on its own hardware, or on that of --hardware.
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
    loaded, made = load_plan(subject, request, model), load_model(model, request)
    machine = None
    if request.hardware is not None:
        from autopar.mesh import Mesh

        machine = Mesh(loaded.data.mesh.shape, loaded.data.mesh.axis_names, request.hardware)
    return loaded.bind(made.model, machine, made.loss_fn)


def _refuse_planning_flags(request: PlanRequest) -> None:
    """Refuse flags that a saved plan would ignore."""
    given = [*request.given, *(["mesh"] if request.mesh is not None else [])]
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise OptionError(f"a saved plan is decided: {flags}", hint="plan again with autopar plan")
