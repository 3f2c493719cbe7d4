"""Plan data: what was decided, what was predicted, and why, without any planning.

Read `data.py` (a plan as editable JSON), `predicted.py` (predictions for one step), `decisions.py`
(one decision and its alternatives).
It may import `program`, `rules`, `options`, `placement`, `schedule`, `mesh` and the files below.
It hands on `PlanData`, `Predicted` and `Decision`.
"""

from autopar.plans.data import (
    Alternative,
    InputSignature,
    MeshRecord,
    PlanData,
    StageRecord,
    operator_text,
    parse_operator,
    parse_recomputed,
    parse_spec,
    parse_storage,
    recomputed_text,
    storage_text,
)
from autopar.plans.decisions import Choice, Decision, Option, RestOfStage
from autopar.plans.predicted import Predicted

__all__ = [
    "Alternative",
    "Choice",
    "Decision",
    "InputSignature",
    "MeshRecord",
    "Option",
    "PlanData",
    "Predicted",
    "RestOfStage",
    "StageRecord",
    "operator_text",
    "parse_operator",
    "parse_recomputed",
    "parse_spec",
    "parse_storage",
    "recomputed_text",
    "storage_text",
]
