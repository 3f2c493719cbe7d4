"""verifier."""

from autopar.verifier.pipeline import verify_pipeline
from autopar.verifier.rule_report import check_rule

__all__ = [
    "check_rule",
    "verify_pipeline",
]
