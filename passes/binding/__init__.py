"""binding."""

from autopar.passes.binding.evaluation import evaluation_parts, place_evaluation, plan_evaluation
from autopar.passes.binding.inputs import (
    ExampleInputs,
    check_mesh,
    example_of,
    has_nested_inputs,
    mesh_of,
    record_of,
    signature_of,
)
from autopar.passes.binding.placing import check_graph, check_rows, place_stages
from autopar.passes.binding.step_capture import (
    capture_plan,
    capture_step,
    options_for,
    planned_accumulation,
)

__all__ = [
    "ExampleInputs",
    "capture_plan",
    "capture_step",
    "check_graph",
    "check_mesh",
    "check_rows",
    "evaluation_parts",
    "example_of",
    "has_nested_inputs",
    "mesh_of",
    "options_for",
    "place_evaluation",
    "place_stages",
    "plan_evaluation",
    "planned_accumulation",
    "record_of",
    "signature_of",
]
