"""`autopar compare`: saved plans and new plans of models, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autopar.cli.models import is_plan_file
from autopar.cli.options import PlanRequest
from autopar.cli.plans import load_plan, make_plan, plan_of
from autopar.cli.shell import Result, writing
from autopar.errors import OptionError


def compare_result(
    subjects: Sequence[str], model: str | None, request: PlanRequest, output: Path | None
) -> Result:
    """Compare saved plans, bound to `model` if it is given, and new plans of models."""
    from autopar.api import compare
    from autopar.planning import Plan

    files = [subject for subject in subjects if is_plan_file(subject)]
    if model is not None and not files:
        raise OptionError("--model is for plan files, and none is given")
    # Planning flags are for the models. If all subjects are files, `load_plan` refuses the flags.
    of_files = request
    if len(files) != len(subjects):
        loss = request.loss if model is not None else None
        of_files = replace(request, mesh=None, hardware=None, given={}, loss=loss)

    def found(subject: str) -> Plan:
        if subject not in files:
            return make_plan(subject, request)
        if model is None:
            return load_plan(subject, of_files)
        return plan_of(subject, model, of_files, "compare")

    comparison = replace(compare(*map(found, subjects)), names=tuple(subjects))
    if output is not None:
        with writing():
            output.write_text(comparison.html(), encoding="utf-8")
    written = None if output is None else str(output)
    return Result(comparison.text(), comparison.to_dict() | {"written": written})
