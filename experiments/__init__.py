"""Experiments that show what attention heads learn: one config in, one report out."""
