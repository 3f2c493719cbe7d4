"""Sharding rules: how each operator may be sharded, by one line of notation per operator.

Read `rule.py` (a rule), `pattern.py` (strategies from notation), `lowering.py`, `formulas.py`
(functions that replace operators, and their costs); then the notations: `families.py`, `views.py`,
`indexing.py`, `bags.py`, `convolutions.py`, `normalisation.py`, `losses.py`, `experts.py`,
`random.py`, `padded.py`; then `tables.py` (all rules), `operators.py`, `signature.py`, `derived.py`
(what torch knows of an operator), `functions.py` (`autograd.Function`s), `registry.py` (the
look-up), `rows.py` (is each row computed alone?).
It may import `placement`, `schedule`, `mesh` and the files and rooms below them.
It mainly hands on `OpCall`, `rule_for` and `axis_strategies`.
"""

from autopar.rules.derived import is_pure
from autopar.rules.functions import is_function
from autopar.rules.lowering import FOLDED, GROUP, Lowering
from autopar.rules.operators import find_operator
from autopar.rules.padded import N_VALID, PADDED
from autopar.rules.pattern import AxisStrategy, Pattern, axis_strategies, resolve
from autopar.rules.registry import (
    all_rules,
    check_call,
    has_rule,
    keep_whole,
    missing_rule,
    own_rule,
    register_line,
    register_rule,
    rule_for,
)
from autopar.rules.rows import row_dim
from autopar.rules.rule import OpCall, OpRule
from autopar.rules.tables import FUSED, MATMULS, VIEWS
from autopar.rules.views import view_notation

__all__ = [
    "FOLDED",
    "FUSED",
    "GROUP",
    "MATMULS",
    "N_VALID",
    "PADDED",
    "VIEWS",
    "AxisStrategy",
    "Lowering",
    "OpCall",
    "OpRule",
    "Pattern",
    "all_rules",
    "axis_strategies",
    "check_call",
    "find_operator",
    "has_rule",
    "is_function",
    "is_pure",
    "keep_whole",
    "missing_rule",
    "own_rule",
    "register_line",
    "register_rule",
    "resolve",
    "row_dim",
    "rule_for",
    "view_notation",
]
