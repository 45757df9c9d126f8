"""Computes the attention of one head, maps it over many heads, and checks, traces and shards calls."""
