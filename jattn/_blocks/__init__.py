"""Blockwise attention: which blocks there are, one block, the online softmax over them, and its derivatives."""
