"""plans."""

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
from autopar.plans.decisions import Choice, Decision, Option, Rest
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
    "Rest",
    "StageRecord",
    "operator_text",
    "parse_operator",
    "parse_recomputed",
    "parse_spec",
    "parse_storage",
    "recomputed_text",
    "storage_text",
]
