"""Solvers against brute force and against each other; no torch."""
