"""Attention of one head, its lifting to many, and how a call is checked, traced and sharded."""
