"""Decides whether a pipeline may run.

Read: `deadlock.py` (do ranks wait for each other for ever?), `stage.py` (invariants of one stage
program), `pipeline.py` (invariants of all stages together), `joint.py` (invariants of a stage both
ways: `joint_flow.py`, `joint_gradients.py`).
May import `cost`, `runtime` and the layers below them.
Hands on `verify_pipeline` and `verify_joint`.
"""

from autopar.verifier.deadlock import GroupCall, check_rendezvous
from autopar.verifier.joint import verify_joint
from autopar.verifier.pipeline import verify_pipeline
from autopar.verifier.stage import verify_program

__all__ = [
    "GroupCall",
    "check_rendezvous",
    "verify_joint",
    "verify_pipeline",
    "verify_program",
]
