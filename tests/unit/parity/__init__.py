"""Tests of the room `parity`."""
