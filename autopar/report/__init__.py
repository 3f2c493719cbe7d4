"""Reports: a plan as text that a person reads, as a graph and as a page."""

from autopar.report.dot import INSTALL_HINT, dot
from autopar.report.explain import explain
from autopar.report.html import ReportFiles, write_report

__all__ = ["INSTALL_HINT", "ReportFiles", "dot", "explain", "write_report"]
