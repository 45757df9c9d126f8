"""Attention of one head, its vmap over many, and how a call is checked, traced and sharded."""
