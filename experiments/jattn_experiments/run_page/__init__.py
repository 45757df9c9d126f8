"""The page of one run: its figures, its tables, its heads' weights, and what is kept of it."""
