"""Tests of `passes/pipeline.py` and `passes/compilation.py`."""
