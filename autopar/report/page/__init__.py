"""A plan as a page: one HTML file that loads nothing, drawn from the plan's facts in JSON.

Read `subject.py` (what the page is made of), `facts.py` (the JSON, all of it), then its parts:
`bars.py`, `memory.py`, `graph.py`, `timeline.py`, `tables.py`; then `writing.py` (the file).
`web/` has the page's own sources, its lock file, and the bundle that is shipped.
It mainly hands on `Subject`, `Help`, `facts_json` and `page_html`.
"""

from autopar.report.page.bars import time_bar
from autopar.report.page.facts import facts_json, plan_facts
from autopar.report.page.memory import memory_bar
from autopar.report.page.subject import Help, Subject
from autopar.report.page.writing import page_html

__all__ = [
    "Help",
    "Subject",
    "facts_json",
    "memory_bar",
    "page_html",
    "plan_facts",
    "time_bar",
]
