"""A dense function in place of cuDNN's kernel, for every platform: ``Cudnn(fused)``."""

import jax
import jax.numpy as jnp


def visible_to(q, k, is_causal, window, query_lengths, kv_lengths):
    """Bool ``[B,1,T,S]`` for the options of ``jax.nn.dot_product_attention``."""
    rows, columns = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])[None, :]
    visible = (rows >= columns) | (not is_causal)
    if window is not None:
        visible &= columns >= rows - window[0]
    for lengths, index in ((query_lengths, rows), (kv_lengths, columns)):
        if lengths is not None:
            visible = visible & (index < lengths[:, None, None])
    return visible.reshape(-1, 1, *visible.shape[-2:])


def fused(query, key, value, *, is_causal, local_window_size, query_seq_lengths, key_value_seq_lengths):
    """As cuDNN: keeps its output and log-sum-exp, and leaves open what rows without a visible key return."""
    assert all(x.shape[1] % 2 == 0 for x in (query, key, value))  # what cuDNN's backward pass takes
    options = is_causal, local_window_size, query_seq_lengths, key_value_seq_lengths
    repeated = lambda x: jnp.repeat(x, query.shape[2] // x.shape[2], 2).astype(jnp.float32)

    def scores(q, k):
        s = jnp.einsum("btnh,bsnh->bnts", q.astype(jnp.float32), repeated(k)) * q.shape[-1] ** -0.5
        return jnp.where(visible_to(q, k, *options), s, -1e30)

    @jax.custom_vjp
    def attend(q, k, v):
        return forward(q, k, v)[0]

    def forward(q, k, v):
        s = scores(q, k)
        lse = jax.nn.logsumexp(s, -1)
        lse += 0.0 * jnp.cos(lse)  # which a test looks for
        out = jnp.einsum("bnts,bsnh->btnh", jnp.exp(s - lse[..., None]), repeated(v)).astype(v.dtype)
        return out, (q, k, v, lse, out)

    def backward(kept, d_out):
        q, k, v, lse, out = kept
        s, pull = jax.vjp(scores, q, k)
        p, d_out = jnp.exp(s - lse[..., None]), d_out.astype(jnp.float32)
        delta = jnp.einsum("btnh,btnh->bnt", d_out, out.astype(jnp.float32))[..., None]
        d_v = jax.vjp(repeated, v)[1](jnp.einsum("bnts,btnh->bsnh", p, d_out))
        return *pull(p * (jnp.einsum("btnh,bsnh->bnts", d_out, repeated(v)) - delta)), *d_v

    attend.defvjp(forward, backward)
    return attend(query, key, value)
