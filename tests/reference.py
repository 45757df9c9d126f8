"""Attention by its formula, in NumPy and float64, with the whole matrix of weights.

The conformance table has a reference of its own, which JAX differentiates; so has the soak, which also bounds the
rounding of each entry.
"""

import numpy as np


def softmax(scores, visible=True):
    """Along the last axis, over the visible entries; 0 for the others, also where none is visible."""
    scores = np.where(visible, np.asarray(scores, np.float64), -np.inf)
    high = scores.max(-1, keepdims=True)
    exponentials = np.exp(scores - np.where(high == -np.inf, 0.0, high))
    total = exponentials.sum(-1, keepdims=True)
    return exponentials / np.where(total == 0.0, 1.0, total)


def weights(query, key, visible=True):
    """``[B,N,T,S]`` of a query ``[B,T,N,H]`` and a key ``[B,S,K,H]``; ``visible``: broadcastable to them."""
    query, key = np.asarray(query, np.float64), np.asarray(key, np.float64)
    key = key.repeat(query.shape[2] // key.shape[2], 2)
    return softmax(np.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(query.shape[-1]), visible)


def attention(query, key, value, visible=True):
    """``[B,T,N,D]``, of the arguments of ``weights`` and a value ``[B,S,K,D]``."""
    value = np.asarray(value, np.float64).repeat(query.shape[2] // value.shape[2], 2)
    return np.einsum("bnts,bsnd->btnd", weights(query, key, visible), value)
