"""Computes blockwise attention: block lists, a single block, the online softmax over blocks, and its derivatives."""
