"""Tests of the room `lowering`."""
