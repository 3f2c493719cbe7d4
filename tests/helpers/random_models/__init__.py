"""Random models: their steps, drawn and built."""
