"""Tests of the room `module`."""
