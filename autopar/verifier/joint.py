"""Verifies a joint program before it runs."""
from __future__ import annotations

from autopar.program import JointProgram, taken_parameters
from autopar.verifier.joint_flow import Flow, Reruns, check_flow, words_of
from autopar.verifier.joint_gradients import check_gradients


def verify_joint(joint: JointProgram) -> None:
    stage = joint.stage
    words = words_of(stage.axis_names, stage.group_axes())
    taken = {*taken_parameters(stage), *(d.local.name for d in stage.delivered)}
    taken |= {b.local.name for b in stage.received}
    held = frozenset(taken)
    flow = Flow(held, held, held, words)
    check_flow("forward", flow, joint.forward, {*stage.returned, *joint.saved})
    given = {name for name in joint.cotangents if name is not None}
    saved = frozenset(joint.saved)
    flow = Flow(saved | given, frozenset(), saved, words)
    check_flow("backward", flow, joint.backward, ())
    Reruns(joint.forward).check("backward", joint.backward, joint.saved)
    check_gradients(joint)
