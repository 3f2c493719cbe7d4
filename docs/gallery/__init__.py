"""Plans of known models as pages: `models.py` (which), `make.py` (the pages)."""
