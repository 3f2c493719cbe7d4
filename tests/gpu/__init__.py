"""What only a GPU can show. `make test-gpu` runs these; all other runs leave them out."""
