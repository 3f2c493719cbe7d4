"""Reports: a plan as text that a person reads."""

from autopar.report.explain import explain

__all__ = ["explain"]
