"""Computes blockwise attention: lists of blocks, one block, the online softmax over blocks, and its derivatives."""
