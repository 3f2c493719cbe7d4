"""Sample calls of every operator."""
