"""A run's findings as a page and figures."""
