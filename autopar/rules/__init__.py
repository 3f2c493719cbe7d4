"""Sharding rules: one line of notation per operator, found by overload name."""

from autopar.rules.derived import is_pure
from autopar.rules.operators import find_operator
from autopar.rules.registry import (
    all_rules,
    check_call,
    has_rule,
    keep_whole,
    missing_rule,
    own_rule,
    register_rule,
    rule_for,
)
from autopar.rules.rule import OpCall, OpRule

__all__ = [
    "OpCall",
    "OpRule",
    "all_rules",
    "check_call",
    "find_operator",
    "has_rule",
    "is_pure",
    "keep_whole",
    "missing_rule",
    "own_rule",
    "register_rule",
    "rule_for",
]
