"""From a program to its plan and its stage programs: a wing of rooms that exports nothing.

Reading order: `compilation.py` (what a pass is, and how passes run); `solvers/` (numbers only);
`analysis/` (what the program is) and `reshard/` (what a change of placement costs); `backward/`
(the lines of a stage both ways); `intra/` (the placements of one stage); `inter/` (stages) and
`lowering/` (the lines that ranks run); `search/` (which plan is the fastest); `binding/` (a plan on
a model's graph) and `explain/` (what a decision was chosen over); `facts.py` (what passes hand on),
`fact_text.py` (facts as text), `pipeline.py` (the whole compilation as one list), `on_text.py`
(some of it, on programs as text). Each may import only those before it, and pairs not each other.
"""
