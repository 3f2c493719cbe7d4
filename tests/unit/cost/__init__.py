"""Tests of the room `cost`."""
