"""Edges of a small model in NumPy, float64: every reader of every layer with an input of its own, writers by name.

Nothing here knows an order of edges: a writer and a reader are names, and a gate belongs to a pair of them.
"""

import numpy as np


def numbers(model):
    """The parameters of a ``jattn.interop.Transformer``, by layer, as float64."""
    from flax import nnx

    state = nnx.to_pure_dict(nnx.state(model))
    wide = lambda tree: {k: wide(v) if isinstance(v, dict) else np.asarray(v, np.float64) for k, v in tree.items()}
    state = wide(state)
    pick = lambda tree, i: {k: pick(v, i) if isinstance(v, dict) else v[i] for k, v in tree.items()}
    return state, [pick(state["layers"], i) for i in range(model.config.num_layers)]


def norm(config, x, params, eps=None):
    if params is None:
        return x
    if config.norm == "layer":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_epsilon)
    return x * params["scale"] + params.get("bias", 0.0)


def rotated(x, rotary):
    """``[T,H]``."""
    H = x.shape[-1]
    dim = int(H * rotary.fraction)
    angles = np.arange(len(x))[:, None] * rotary.base ** (-np.arange(0, dim, 2) / dim)
    a, b, rest = x[:, : dim // 2], x[:, dim // 2 : dim], x[:, dim:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)


def activation(config, x):
    if config.activation == "silu":
        return x / (1 + np.exp(-x))
    if config.activation == "relu":
        return np.maximum(x, 0)
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


class Edges:
    """``run`` computes the logits of one sequence where each reader reads what ``inputs`` gives it."""

    def __init__(self, model):
        self.config = model.config
        self.state, self.layers = numbers(model)

    def run(self, tokens, inputs=None):
        """Logits, ``{writer: [T,M]}``, ``{reader: [T,M]}``. ``inputs(reader, stream, written) -> [T,M]`` if not the stream."""
        config, c = self.config, self.state
        inputs = (lambda reader, stream, written: stream) if inputs is None else inputs
        x = c["token_embed"]["embedding"][tokens] * (config.embed_scale or 1.0)
        if config.position is None:
            x = x + c["position_embed"]["embedding"][np.arange(len(tokens))]
        written, read = {"embedding": x}, {}
        T, N = len(tokens), config.num_heads
        K = config.num_kv_heads or N
        seen = np.tril(np.ones((T, T), bool))

        def take(reader, stream):
            read[reader] = inputs(reader, stream, written)
            return read[reader]

        for i, p in enumerate(self.layers):
            att, local = p["attention"], config.is_local[i] and config.window is not None
            position = config.local_position if local and config.local_position is not None else config.position
            of = {}
            for kind, count in (("query", N), ("key", K), ("value", K)):
                of[kind] = np.zeros((count, T, config.size_of_head))
                for n in range(count):
                    y = norm(config, take(f"{kind} {i}.{n}", x), p.get("attention_norm"))
                    of[kind][n] = y @ att[kind]["kernel"][:, n] + att[kind].get("bias", np.zeros((count, 1)))[n]
            for kind, name in (("query", "query_ln"), ("key", "key_ln")):
                if name in att:
                    axes = -1 if config.qk_norm == "head" else (0, 2)
                    scale = att[name]["scale"]
                    scale = scale if scale.ndim == 1 else scale[:, None]
                    if config.qk_norm == "all":
                        scale = att[name]["scale"].reshape(len(of[kind]), 1, -1)
                    of[kind] = (
                        of[kind] / np.sqrt((of[kind] ** 2).mean(axes, keepdims=True) + config.norm_epsilon) * scale
                    )
                if position is not None:
                    of[kind] = np.stack([rotated(one, position) for one in of[kind]])
            visible = seen & ~np.tril(np.ones((T, T), bool), -config.window) if local else seen
            each = []
            for n in range(N):
                k = n // (N // K)
                scores = of["query"][n] @ of["key"][k].T * (config.scale or config.size_of_head**-0.5)
                if config.score_cap is not None:
                    scores = config.score_cap * np.tanh(scores / config.score_cap)
                weights = np.exp(np.where(visible, scores, -np.inf) - scores.max(-1, keepdims=True))
                z = weights / weights.sum(-1, keepdims=True) @ of["value"][k]
                each.append(z @ att["out"]["kernel"][n])
            bias = att["out"].get("bias", 0.0)
            added = sum(each) + bias
            if config.norm_outputs:
                out = p["attention_out_norm"]["scale"] / np.sqrt(
                    (added**2).mean(-1, keepdims=True) + config.norm_epsilon
                )
                each, added = [one * out for one in each], added * out
            mlp_stream = x if config.parallel else x + added
            before_mlp = dict(written)
            written |= {f"head {i}.{n}": one for n, one in enumerate(each)}
            if config.parallel:
                read[f"mlp {i}"] = inputs(f"mlp {i}", mlp_stream, before_mlp)
            else:
                take(f"mlp {i}", mlp_stream)
            y = norm(config, read[f"mlp {i}"], p.get("mlp_norm"))
            hidden = y @ p["mlp_in"]["kernel"] + p["mlp_in"].get("bias", 0.0)
            if config.gated:
                hidden = activation(config, y @ p["mlp_gate"]["kernel"] + p["mlp_gate"].get("bias", 0.0)) * hidden
            else:
                hidden = activation(config, hidden)
            mlp = hidden @ p["mlp_out"]["kernel"] + p["mlp_out"].get("bias", 0.0)
            if config.norm_outputs:
                mlp = norm(config, mlp, p["mlp_out_norm"])
            written[f"mlp {i}"] = mlp
            x = x + added + mlp
        last = norm(config, take("logits", x), self.state["last_norm"])
        logits = last @ self.state["token_embed"]["embedding"].T
        cap = config.logit_cap
        return (logits if cap is None else cap * np.tanh(logits / cap)), written, read

    def cut(self, clean, corrupt, edges):
        """The logits with the ``edges``, pairs of writer and reader, of the clean run alone."""
        _, base, reads = self.run(corrupt)

        def inputs(reader, stream, written):
            kept = [name for name in written if (name, reader) in edges]
            return reads[reader] + sum(written[name] - base[name] for name in kept)

        return self.run(clean, inputs)[0]

    def with_gates(self, clean, corrupt, gates):
        """The logits of the clean run, where a reader also reads a share of a writer's change: ``{(writer, reader): share}``."""
        (_, own, _), (_, base, _) = self.run(clean), self.run(corrupt)

        def inputs(reader, stream, written):
            return stream + sum(g * (base[w] - own[w]) for (w, r), g in gates.items() if r == reader)

        return self.run(clean, inputs)[0]
