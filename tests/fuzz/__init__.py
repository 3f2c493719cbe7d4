"""Damaged files: every mutant of a plan or a profile is refused by our own errors, or is right.

Read `trees.py` (documents as trees, and mutations of them), `plans.py` (mutants of plan files),
`profiles.py` (mutants of hardware profiles), `watch.py` (what a mutant touches, its time).
A mutant follows from its number. Ordinary runs take a sample of them, `make nightly` all.
"""
