"""Tests of the repository itself: packaging, docs, golden files and shared captures."""
