"""planning."""

from autopar.planning.binding import Bound, bind, lay_stages
from autopar.planning.inputs import (
    ExampleInputs,
    check_mesh,
    example_of,
    has_nested_inputs,
    mesh_of,
)
from autopar.planning.plan import Plan, plan_program, settled_heap
from autopar.planning.step_capture import capture_step, planned_accumulation

__all__ = [
    "Bound",
    "ExampleInputs",
    "Plan",
    "bind",
    "capture_step",
    "check_mesh",
    "example_of",
    "has_nested_inputs",
    "lay_stages",
    "mesh_of",
    "plan_program",
    "planned_accumulation",
    "settled_heap",
]
