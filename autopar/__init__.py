"""autopar: a compiler-style auto-parallelizer for PyTorch.

    pm = autopar.parallelize(model, (2, 8), example_inputs=batch)
    loss = pm.step(**batch)

The public names are those listed here.
"""

from autopar.api import load, parallelize, save
from autopar.errors import (
    AutoparError,
    BatchError,
    CaptureError,
    InfeasibleError,
    LaunchError,
    MeshError,
    MissingRuleError,
    NotationError,
    NotPlannedError,
    NotSupportedError,
    OptionError,
    PlanError,
    VerificationError,
)
from autopar.mesh import Device, Link, Mesh
from autopar.options import Manual
from autopar.oracle import check_rule
from autopar.parallel_module import ParallelModule
from autopar.planning import Plan, plan
from autopar.rules import register_rule
from autopar.runtime.launch import launch
from autopar.verification import Report, verify

__version__ = "0.1.0"

__all__ = [
    "AutoparError",
    "BatchError",
    "CaptureError",
    "Device",
    "InfeasibleError",
    "LaunchError",
    "Link",
    "Manual",
    "Mesh",
    "MeshError",
    "MissingRuleError",
    "NotPlannedError",
    "NotSupportedError",
    "NotationError",
    "OptionError",
    "ParallelModule",
    "Plan",
    "PlanError",
    "Report",
    "VerificationError",
    "check_rule",
    "launch",
    "load",
    "parallelize",
    "plan",
    "register_rule",
    "save",
    "verify",
]
