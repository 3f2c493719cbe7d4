"""What a plan that is bound to its model has."""

from __future__ import annotations

from autopar import Plan
from autopar.planning import Bound
from autopar.program.lines import Pipeline, StageProgram


def bound_of(plan: Plan) -> Bound:
    assert plan.bound is not None
    return plan.bound


def pipeline_of(plan: Plan) -> Pipeline:
    return bound_of(plan).pipeline


def program_of(plan: Plan) -> StageProgram:
    """The program of a plan with one stage."""
    (program,) = pipeline_of(plan).stages
    return program
