"""Tests of the room `explain`."""
