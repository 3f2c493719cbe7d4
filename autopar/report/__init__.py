"""Reports: a plan as text, as a graph and as an HTML page; comparisons, simulations, scaling.

Read in this order:
    ranges, tables, stages, division, next_best, assumptions,
    legend, parallelism, verdict, explanation, matching, named   a plan as text
    kinds, picture, folding, boxes, stage_graph, graph_text   a plan as a Graphviz graph
    page                                                      a plan as an HTML page
    comparison, simulation, scaling                           plans side by side; steps; scaling
May import `cost`, `plans`, `program` and the rooms below them, but not `passes`.
Hands on `explain`, `explain_name`, `verdict`, `dot` and `page_html`.
"""

from autopar.report.assumptions import assumed
from autopar.report.comparison import ComparedPlan, Comparison
from autopar.report.explanation import explain
from autopar.report.graph_text import dot
from autopar.report.matching import matching_names
from autopar.report.named import explain_name
from autopar.report.page import Help, Subject, facts_json, memory_bar, page_html, time_bar
from autopar.report.ranges import folded_names
from autopar.report.scaling import scaling_svg, scaling_text
from autopar.report.simulation import simulation_dict, simulation_text, what_if_dict, what_if_text
from autopar.report.tables import headline
from autopar.report.verdict import verdict

__all__ = [
    "ComparedPlan",
    "Comparison",
    "Help",
    "Subject",
    "assumed",
    "dot",
    "explain",
    "explain_name",
    "facts_json",
    "folded_names",
    "headline",
    "matching_names",
    "memory_bar",
    "page_html",
    "scaling_svg",
    "scaling_text",
    "simulation_dict",
    "simulation_text",
    "time_bar",
    "verdict",
    "what_if_dict",
    "what_if_text",
]
