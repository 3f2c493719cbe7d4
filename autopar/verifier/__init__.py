"""Decides whether a pipeline may run, and whether a sharding rule is right.

Read: `deadlock.py` (do ranks wait for each other for ever?), `stage.py` (invariants of one stage
program), `pipeline.py` (invariants of all stages together), `joint.py` (invariants of a stage both
ways: `joint_flow.py`, `joint_gradients.py`, `joint_calls.py`); then `oracle.py` (does an operator
on shards do what its rule claims?) and `rule_report.py` (all strategies of one call, in print).
May import `cost`, `runtime` and the layers below them.
Hands on `verify_pipeline`, `verify_joint`, and `check_rule` for users who write rules.
"""

from autopar.verifier.deadlock import GroupCall, check_rendezvous
from autopar.verifier.joint import verify_joint
from autopar.verifier.joint_calls import line_calls
from autopar.verifier.oracle import MESHES, OracleCase, check_strategy, combinations
from autopar.verifier.pipeline import verify_pipeline
from autopar.verifier.rule_report import check_rule, report_case
from autopar.verifier.stage import verify_program

__all__ = [
    "MESHES",
    "GroupCall",
    "OracleCase",
    "check_rendezvous",
    "check_rule",
    "check_strategy",
    "combinations",
    "line_calls",
    "report_case",
    "verify_joint",
    "verify_pipeline",
    "verify_program",
]
