"""Reports: a plan as text, as a graph and as an HTML page; comparisons, simulations, scaling.

Read `blocks.py` (names of equal layers), `device_rates.py` (to compare), `tables.py`, `stages.py`
and `division.py` (facts of a plan as rows). Then the rooms: `words` (a plan as text), `picture` (as
a graph), `page` (as an HTML page); and `comparison.py`, `simulation.py`, `scaling.py` (plans side
by side; steps; scaling).
May import `cost`, `plans`, `program` and the rooms below them, but not `passes`.
Mainly hands on `explain`, `explain_name`, `verdict`, `dot` and `page_html`.
"""

from autopar.report.blocks import folded_names
from autopar.report.comparison import ComparedPlan, Comparison
from autopar.report.division import Division, division
from autopar.report.page import Help, Subject, facts_json, memory_bar, page_html, time_bar
from autopar.report.picture import dot
from autopar.report.scaling import scaling_svg, scaling_text
from autopar.report.simulation import simulation_dict, simulation_text, what_if_dict, what_if_text
from autopar.report.tables import headline, optimality
from autopar.report.words import (
    REGION_S,
    Brief,
    Remark,
    assumed,
    brief,
    compiling,
    context_axes,
    explain,
    explain_name,
    matching_names,
    packed_documents,
    uneven_experts,
    verdict,
)

__all__ = [
    "REGION_S",
    "Brief",
    "ComparedPlan",
    "Comparison",
    "Division",
    "Help",
    "Remark",
    "Subject",
    "assumed",
    "brief",
    "compiling",
    "context_axes",
    "division",
    "dot",
    "explain",
    "explain_name",
    "facts_json",
    "folded_names",
    "headline",
    "matching_names",
    "memory_bar",
    "optimality",
    "packed_documents",
    "page_html",
    "scaling_svg",
    "scaling_text",
    "simulation_dict",
    "simulation_text",
    "time_bar",
    "uneven_experts",
    "verdict",
    "what_if_dict",
    "what_if_text",
]
