"""How a plan meets a model: what it records of inputs and mesh, and how it is placed on a graph.

Reading order: `inputs.py` (inputs and mesh as data, and back), `step_capture.py` (the graph of a
training step), `placing.py` (a plan's stages on that graph), `evaluation.py` (a forward program
over the same shards).
May import `passes/inter`, `lowering`, the rooms below them, and what lies below `passes`.
Mainly hands on `capture_step`, `place_stages` and `signature_of`; `passes/pipeline.py` calls them.
"""

from autopar.passes.binding.evaluation import evaluation_parts, place_evaluation, plan_evaluation
from autopar.passes.binding.inputs import (
    ExampleInputs,
    check_mesh,
    example_of,
    has_nested_inputs,
    mesh_of,
    planned_row_dims,
    record_of,
    signature_of,
)
from autopar.passes.binding.placing import check_graph, check_rows, nearest_sizes, place_stages
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
    "nearest_sizes",
    "options_for",
    "place_evaluation",
    "place_stages",
    "plan_evaluation",
    "planned_accumulation",
    "planned_row_dims",
    "record_of",
    "signature_of",
]
