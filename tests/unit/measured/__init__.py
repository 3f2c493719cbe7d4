"""Tests of the room `measured`."""
