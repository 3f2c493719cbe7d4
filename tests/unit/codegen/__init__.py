"""Tests of the room `verifier`."""
