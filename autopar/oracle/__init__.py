"""Decides whether a sharding rule is right: operators on shards against whole ones.

Read `strategies.py` (one strategy of one call), then `report.py` (all of them, in print).
May import `runtime` and the layers below it.
Hands on `check_rule` for users who write rules, and `report_case` for the rules of autopar.
"""

from autopar.oracle.report import check_rule, report_case
from autopar.oracle.strategies import MESHES, OracleCase, check_strategy, combinations

__all__ = [
    "MESHES",
    "OracleCase",
    "check_rule",
    "check_strategy",
    "combinations",
    "report_case",
]
