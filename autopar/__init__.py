"""autopar: a compiler-style auto-parallelizer for PyTorch.

    pm = autopar.parallelize(model, (2, 8), example_inputs=batch)
    loss = pm.step(**batch)

The public names are those listed here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.api import compare, export_weights, load, parallelize, plan, save
    from autopar.elastic import ResilientRun, resilient
    from autopar.errors import (
        AbsentRanksError,
        AutoparError,
        BatchError,
        CaptureError,
        DivergenceError,
        InfeasibleError,
        LaunchError,
        MeshError,
        MissingRuleError,
        NonFiniteError,
        NotationError,
        NotPlannedError,
        NotSupportedError,
        OptionError,
        PlanError,
        StateError,
        StepError,
        StepTimeoutError,
        VerificationError,
    )
    from autopar.manual import Manual
    from autopar.mesh import Device, Link, Mesh
    from autopar.module import ParallelModule
    from autopar.oracle import check_rule
    from autopar.parity import Report, verify
    from autopar.planning import Plan
    from autopar.program.graph import Audit
    from autopar.rules import register_rule
    from autopar.runtime.checkpoints import AsyncSaver
    from autopar.runtime.launch import launch

__version__ = "0.3.0"

__all__ = [
    "AbsentRanksError",
    "AsyncSaver",
    "Audit",
    "AutoparError",
    "BatchError",
    "CaptureError",
    "Device",
    "DivergenceError",
    "InfeasibleError",
    "LaunchError",
    "Link",
    "Manual",
    "Mesh",
    "MeshError",
    "MissingRuleError",
    "NonFiniteError",
    "NotPlannedError",
    "NotSupportedError",
    "NotationError",
    "OptionError",
    "ParallelModule",
    "Plan",
    "PlanError",
    "Report",
    "ResilientRun",
    "StateError",
    "StepError",
    "StepTimeoutError",
    "VerificationError",
    "check_rule",
    "compare",
    "export_weights",
    "launch",
    "load",
    "parallelize",
    "plan",
    "register_rule",
    "resilient",
    "save",
    "verify",
]

# Imported on first use, so that `autopar --help` does not wait for torch.
_HOMES = {
    "AbsentRanksError": "autopar.errors",
    "AsyncSaver": "autopar.runtime.checkpoints",
    "Audit": "autopar.program.graph",
    "AutoparError": "autopar.errors",
    "BatchError": "autopar.errors",
    "CaptureError": "autopar.errors",
    "Device": "autopar.mesh",
    "DivergenceError": "autopar.errors",
    "InfeasibleError": "autopar.errors",
    "LaunchError": "autopar.errors",
    "Link": "autopar.mesh",
    "Manual": "autopar.manual",
    "Mesh": "autopar.mesh",
    "MeshError": "autopar.errors",
    "MissingRuleError": "autopar.errors",
    "NonFiniteError": "autopar.errors",
    "NotPlannedError": "autopar.errors",
    "NotSupportedError": "autopar.errors",
    "NotationError": "autopar.errors",
    "OptionError": "autopar.errors",
    "ParallelModule": "autopar.module",
    "Plan": "autopar.planning",
    "PlanError": "autopar.errors",
    "Report": "autopar.parity",
    "ResilientRun": "autopar.elastic",
    "StateError": "autopar.errors",
    "StepError": "autopar.errors",
    "StepTimeoutError": "autopar.errors",
    "VerificationError": "autopar.errors",
    "check_rule": "autopar.oracle",
    "compare": "autopar.api",
    "export_weights": "autopar.api",
    "launch": "autopar.runtime.launch",
    "load": "autopar.api",
    "parallelize": "autopar.api",
    "plan": "autopar.api",
    "register_rule": "autopar.rules",
    "resilient": "autopar.elastic",
    "save": "autopar.api",
    "verify": "autopar.parity",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
