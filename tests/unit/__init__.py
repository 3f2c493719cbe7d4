"""Each room of the house alone; the folders here are named after the rooms."""
