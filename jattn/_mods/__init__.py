"""Supports masks and score functions: pytrees, checks, lookups, and traced functions."""
