"""Placements of one program on one mesh: the choice problem, its prices, recompute, hiding."""
