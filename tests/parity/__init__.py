"""Sharded training against one process."""
