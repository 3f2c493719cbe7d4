"""Decides which lines backward runs, what forward saves for it, and when a value is freed.

Read `joint.py` (the walk over the order of work), `recording.py` (the kernels of
one operator and of its derivative), `templates.py` (what stands for them in a program),
`kernels.py` and `names.py` (a template as lines), `provision.py` (views made again, what is saved,
frees), `fusible.py` (the operators of a block as one region), `proving.py` (every stage, a deep
one by few blocks).
It may import `passes/analysis`, and what lies below `passes`.
It hands on `differentiate`, `make_fusible`, and `proved`, which also verifies what it wrote.
"""

from autopar.passes.backward.fusible import make_fusible
from autopar.passes.backward.joint import differentiate
from autopar.passes.backward.proving import proved

__all__ = ["differentiate", "make_fusible", "proved"]
