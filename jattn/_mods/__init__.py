"""Supports masks and score functions: pytrees, checks, look-ups, and traced functions."""
