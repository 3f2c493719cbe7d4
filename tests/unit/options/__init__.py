"""Tests of options and units, and of errors for bad input."""
