"""Tests of the room `reshard`."""
