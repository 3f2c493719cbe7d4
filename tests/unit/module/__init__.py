"""Tests of the room `capture`."""
