"""A plan as text: its verdict, its tables in words, and one name of it.

Read `parallelism.py` (how a plan is parallel, from its placements), `sentences.py` (the verdict),
`assumptions.py`, `compiled.py` and `legend.py` (what is taken for granted, what compiling buys,
what letters mean), `explanation.py` (the whole plan), `brief.py` (the same on one screen); then
`matching.py` (which names a user means), `next_best.py` (what a decision was chosen over) and
`named.py` (one name).
May import the files of `report` and `picture`.
Mainly hands on `explain`, `explain_name`, `verdict` and `context_axes`.
"""

from autopar.report.words.assumptions import Remark, assumed, packed_documents, uneven_experts
from autopar.report.words.brief import Brief, brief
from autopar.report.words.compiled import REGION_S, compiling
from autopar.report.words.explanation import explain
from autopar.report.words.matching import matching_names
from autopar.report.words.named import explain_name
from autopar.report.words.next_best import storage_words
from autopar.report.words.parallelism import context_axes
from autopar.report.words.sentences import verdict

__all__ = [
    "REGION_S",
    "Brief",
    "Remark",
    "assumed",
    "brief",
    "compiling",
    "context_axes",
    "explain",
    "explain_name",
    "matching_names",
    "packed_documents",
    "storage_words",
    "uneven_experts",
    "verdict",
]
