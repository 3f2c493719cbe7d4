"""Pictures of the documents: `draw.py` makes them all."""
