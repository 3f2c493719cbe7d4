"""Damaged files: every mutant of a plan or a profile is refused by our own errors, or is right.
Random user programs are in `programs`.

Read `trees.py` (mutations), `plans.py` and `profiles.py` (mutants of them), `watch.py`.
"""
