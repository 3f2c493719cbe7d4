"""Reports: a plan as text that a person reads, as a graph and as a page; plans side by side."""

from autopar.report.comparison import Compared, Comparison
from autopar.report.dot import INSTALL_HINT, dot
from autopar.report.explain import explain
from autopar.report.html import ReportFiles, write_report

__all__ = [
    "INSTALL_HINT",
    "Compared",
    "Comparison",
    "ReportFiles",
    "dot",
    "explain",
    "write_report",
]
