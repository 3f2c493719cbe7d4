"""Random user programs: whole modules, drawn as text, beside eager torch.

Read `program.py` (what a program is), `grammar.py` and the tables `values.py`, `modules.py` and
`losses.py` (what is drawn), `draw.py` (how), `layouts.py`, `compare.py` (what is a fault),
`shrink.py`, `tally.py`. `python -m tests.fuzz.programs BASE NUMBER` repeats one program.
"""
