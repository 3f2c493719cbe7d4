"""Tests of the room `codegen`."""
