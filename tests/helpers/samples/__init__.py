"""Sample calls of every operator, fixed and drawn."""
