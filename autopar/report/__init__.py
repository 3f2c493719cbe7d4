"""Reports: a plan as text that a person reads, as a graph and as a page; plans side by side."""

from autopar.report.comparison import ComparedPlan, Comparison
from autopar.report.explanation import explain
from autopar.report.graph_text import INSTALL_HINT, dot
from autopar.report.html import ReportFiles, write_report
from autopar.report.scaling import scaling_svg, scaling_text
from autopar.report.simulation import simulation_dict, simulation_text, what_if_dict, what_if_text
from autopar.report.tables import headline

__all__ = [
    "INSTALL_HINT",
    "ComparedPlan",
    "Comparison",
    "ReportFiles",
    "dot",
    "explain",
    "headline",
    "scaling_svg",
    "scaling_text",
    "simulation_dict",
    "simulation_text",
    "what_if_dict",
    "what_if_text",
    "write_report",
]
