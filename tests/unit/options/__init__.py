"""Tests of the room `options`."""
