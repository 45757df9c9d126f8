"""Computes attention of one head, maps it over many, and checks, traces and shards calls."""
