"""Plan data: what was decided, what was predicted, and why, without any planning.

Read `data.py` (a plan as editable JSON), `json_values.py` (JSON from outside, value by value),
`reading.py` (a plan read and checked), `predicted.py` (predictions for one step), `decisions.py`
(one decision and its alternatives).
It may import `program`, `rules`, `options`, `placement`, `schedule`, `mesh` and the files below.
It mainly hands on `PlanData` (read by `load_plan`), `Predicted` and `Decision`.
"""

from autopar.plans.data import (
    MANUAL,
    Alternative,
    InputSignature,
    MeshRecord,
    PlanData,
    PlanSummary,
    StageRecord,
    operator_text,
    parse_operator,
    parse_recomputed,
    parse_spec,
    parse_storage,
    recomputed_text,
    storage_text,
)
from autopar.plans.decisions import Choice, Decision, Option, RestOfStage, RunnerUp
from autopar.plans.json_values import Json, read_json
from autopar.plans.predicted import Predicted
from autopar.plans.reading import load_plan, parse_plan

__all__ = [
    "MANUAL",
    "Alternative",
    "Choice",
    "Decision",
    "InputSignature",
    "Json",
    "MeshRecord",
    "Option",
    "PlanData",
    "PlanSummary",
    "Predicted",
    "RestOfStage",
    "RunnerUp",
    "StageRecord",
    "load_plan",
    "operator_text",
    "parse_operator",
    "parse_plan",
    "parse_recomputed",
    "parse_spec",
    "parse_storage",
    "read_json",
    "recomputed_text",
    "storage_text",
]
