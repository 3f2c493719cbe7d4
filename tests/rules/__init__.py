"""Sharding rules: every strategy of every rule on shards, in one process."""
