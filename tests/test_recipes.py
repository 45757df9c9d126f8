"""The functions of docs/recipes, with other lengths, numbers of heads and dtypes than the pages show.

Each recipe runs with other constants and is compared with its formula in float64 or, where the page has one, with the
page's own dense formula on the same numbers in float32.
"""

import contextlib
import io
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
from jattn import masks
from tests.test_docs import ROOT, blocks

DTYPES = {"float32": (jnp.float32, 2e-5), "bfloat16": (jnp.bfloat16, 3e-2), "float16": (jnp.float16, 4e-3)}


def run(name, monkeypatch, tmp_path, constants=(), stop=None):
    """The names of a recipe, whose lines that assign the ``constants`` are replaced, up to the block ``stop``."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for block in blocks((ROOT / "docs/recipes" / f"{name}.md").read_text())[:stop]:
        code = block.code
        for line in constants:
            code = re.sub(rf"^{re.escape(line.split(' = ')[0])} = .*$", line, code, flags=re.MULTILINE)
        with contextlib.redirect_stdout(io.StringIO()):
            exec(code, namespace)
    return namespace


def draw(dtype, *shapes, scale=1.0):
    rng = np.random.default_rng(0)
    return [jnp.asarray(scale * rng.normal(size=shape), dtype) for shape in shapes]


def wide(x):
    return jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, x)


def softmax_of(scores, visible=True):
    return jax.nn.softmax(jnp.where(visible, scores, -jnp.inf))


def absorbed_mla(recipe, dtype):
    r = recipe(["N, H, R, C, B, T, M = 3, 12, 6, 20, 3, 17, 40"])
    with jax.numpy_dtype_promotion("standard"):
        for name in ("w_q", "w_c", "w_r", "w_k", "w_v", "x"):
            r[name] = r[name].astype(dtype)
        parts = r["project"](r["x"], jnp.arange(17))
        ours = r["absorbed"](*parts, is_causal=True)
        cache = jattn.init_cache(3, 17, num_kv_heads=1, head_dim=26, value_dim=0, dtype=dtype)
        _, z = jax.lax.scan(r["step"], cache, (r["x"].swapaxes(0, 1), jnp.arange(17)))
        for name in ("w_k", "w_v"):
            r[name] = r[name].astype(jnp.float32)
        expected = r["expanded"](*wide(parts))
    return [(ours, expected), (z[:, :, 0].swapaxes(0, 1), expected)]


def block_sparse_attention(recipe, dtype):
    r = recipe(stop=1)
    size, blocks_ = 16, 5
    query, key, value = draw(dtype, *[(2, size * blocks_, 3, 8)] * 3)
    table = r["choose"](query, key, size, k=2)
    assert (table.sum(-1) >= np.minimum(np.arange(blocks_) + 1, 3)).all() and not np.triu(table, 1).any()
    mask = r["Blocks"](table, size) & masks.Causal()
    ours = jattn.dot_product_attention(query, key, value, mask=mask)
    visible = jnp.repeat(jnp.repeat(table, size, 2), size, 3) & np.tri(80, dtype=bool)
    q, k, v = wide((query, key, value))
    weights = softmax_of(jnp.einsum("btnh,bsnh->bnts", q, k) / 8**0.5, visible)
    return [(ours, jnp.einsum("bnts,bsnd->btnd", weights, v))]


def differential_attention(recipe, dtype):
    r = recipe(["B, T, N, H = 2, 19, 3, 12"], stop=1)
    inputs = draw(dtype, (3,), (2, 19, 6, 12), (2, 19, 6, 12), (2, 19, 3, 24))
    return [(r["differential"](*inputs, is_causal=True), r["dense"](*wide(inputs)))]


def forgetting_attention(recipe, dtype):
    r = recipe(stop=1)
    *qkv, gates = draw(dtype, *[(2, 300, 3, 16)] * 3, (2, 300, 3))
    inputs = *qkv, jax.nn.log_sigmoid(gates)
    return [(r["forgetting"](*inputs), r["dense"](*wide(inputs)))]


def gated_attention(recipe, dtype):
    r = recipe()
    (x,) = draw(dtype, (3, 9, 48))
    layer = r["GatedAttention"](6, 48, nnx.Rngs(1))
    nnx.update(layer, jax.tree.map(lambda x: x.astype(dtype), nnx.state(layer, nnx.Param)))
    kernels = wide({name: getattr(layer.attention, name).kernel[...] for name in ("query", "key", "value", "out")})
    gate = wide(x) @ wide(layer.gate.kernel[...])
    return [(layer(x, is_causal=True), r["elementwise"](kernels, gate[..., None], wide(x)))]


def int8_cache(recipe, dtype):
    results = []
    for B, S, N, K, H, chunk in ((2, 96, 4, 2, 32, 32), (1, 40, 6, 1, 16, 8), (3, 24, 3, 3, 5, 24)):
        r = recipe([f"B, S, N, K, H, CHUNK = 2, {S}, {N}, {K}, {H}, {chunk}"])
        for scale in (1.0, 1e-3, 100.0):
            query, key, value = draw(dtype, (B, 2, N, H), (B, S, K, H), (B, S, K, H))
            value = (value * scale).at[:, ::3].set(0).at[:, 1].multiply(1e-3)  # 1 / their scale exceeds float16
            parts = *r["quantise"](key), *r["quantise"](value)
            length = np.array([S - 3, 0, 5])[:B]
            ours = jax.jit(r["attend"])(query, *parts, length)
            key, value = (of_8 * step[..., None] for of_8, step in zip(parts[::2], parts[1::2], strict=True))
            expected = jattn.dot_product_attention(wide(query), key, value, key_value_seq_lengths=length)
            assert ours.dtype == dtype
            results.append((ours / scale, expected / scale))
    return results


def lora(recipe, dtype):
    r = recipe(stop=1)
    make = lambda: jattn.nnx.MultiHeadAttention(6, 48, num_kv_heads=3, dtype=dtype, rngs=nnx.Rngs(0))
    (x,) = draw(dtype, (2, 9, 48))
    layer, plain = make(), make()
    for name in ("query", "value"):
        adapted = r["WithLoRA"](getattr(layer, name), rank=3, rngs=nnx.Rngs(2))
        adapted.low_rank.lora_b[...] = draw(jnp.float32, adapted.low_rank.lora_b.shape)[0] / 9
        setattr(layer, name, adapted)
        getattr(plain, name).kernel[...] = adapted.merged()
    return [(layer(x, is_causal=True), plain(x, is_causal=True))]


def meanflow_jvp(recipe, dtype):
    r = recipe(["B, T, M = 2, 40, 24"])
    cast = lambda tree: jax.tree.map(lambda x: x.astype(dtype), tree)
    attention = jattn.init_multi_head(jax.random.key(0), 24, num_heads=3)
    inputs = cast(({"attention": attention, "r": jnp.ones(24), "t": jnp.ones(24)}, *draw(dtype, (2, 40, 24), (2, 40, 24)),
                   jnp.array([0.1, 0.3]), jnp.array([0.7, 0.9])))  # fmt: skip
    step = lambda name: jax.value_and_grad(lambda *x: r["loss"](*x, name))
    ours, expected = step("blockwise")(*inputs), step("xla")(*wide(inputs))
    return list(zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True))


def packed_documents(recipe, dtype):
    r = recipe(["lengths = [3, 1, 8, 4]", "x = jax.random.normal(jax.random.key(2), (1, 16, 32))"], stop=1)
    cast = lambda x: jax.tree.map(lambda x: x.astype(dtype), x)
    params = cast(jattn.init_multi_head(jax.random.key(0), 32, num_heads=8, num_kv_heads=2))
    r["x"], r["table"] = cast(r["x"]), cast(r["table"])
    ours = r["packed"](params)
    r["x"], r["table"] = wide(r["x"]), wide(r["table"])
    return [(ours, r["one_by_one"](wide(params)))]


def qk_norm_and_qk_clip(recipe, dtype):
    r = recipe()
    (r["x"],) = draw(dtype, (3, 20, 48), scale=3.0)
    layer = jattn.nnx.MultiHeadAttention(6, 48, num_kv_heads=3, use_bias=False, dtype=dtype, rngs=nnx.Rngs(1))
    largest = r["max_logit"](layer)
    q, k = wide((layer.query(r["x"]), jnp.repeat(layer.key(r["x"]), 2, 2)))
    scores = jnp.where(jnp.tri(20, dtype=bool), jnp.einsum("btnh,bsnh->nbts", q, k) / 8**0.5, -jnp.inf)
    tau = float(jnp.median(largest))
    r["clip"](layer, largest, tau, alpha=1)
    return [(largest, scores.max((1, 2, 3))), (r["max_logit"](layer), jnp.minimum(largest, tau))]


def shared_prefix(recipe, dtype):
    r = recipe(["B, P, T, N, H = 3, 21, 5, 4, 12"])
    inputs = draw(dtype, *[(3, 5, 4, 12)] * 3, *[(1, 21, 4, 12)] * 2)
    return [(r["shared"](*inputs), r["concatenated"](*wide(inputs)))]


def sigmoid_attention(recipe, dtype):
    r = recipe(["S = 33"], stop=1)
    inputs = draw(dtype, *[(2, 33, 3, 16)] * 3)
    return [
        (r["weighted_sum"](log_weight, *inputs, is_causal=True), r["dense"](weight, *wide(inputs)))
        for log_weight, weight in r["pairs"].values()
    ]


def sliding_window_with_sinks(recipe, dtype):
    r = recipe(["FIRST, CAPACITY, T, N, H = 2, 7, 23, 3, 12"])
    query, key, value = draw(dtype, *[(23, 2, 1, 3, 12)] * 3)
    empty = jattn.init_cache(2, 7, 3, 12, dtype=dtype, rolling=True, first_tokens=2)
    _, out = jax.lax.scan(r["step"], empty, (query, key, value))
    q, k, v = (wide(x)[:, :, 0].swapaxes(0, 1) for x in (query, key, value))
    near, first = (
        jnp.einsum("btnh,bsnh->bnts", r["rotary"](q, rows), r["rotary"](k, r["at"])) / 12**0.5
        for rows in (r["at"], jnp.minimum(r["at"], 6))
    )
    weights = softmax_of(jnp.where(r["kv"] < 2, first, near), r["visible"])
    return [(out[:, :, 0], jnp.einsum("bnts,bsnd->tbnd", weights, v))]


def slot_attention(recipe, dtype):
    r = recipe()
    inputs = draw(dtype, (3, 7, 2, 12), (3, 31, 2, 12), (3, 31, 2, 12))
    return [(r["slot_attention"](*inputs), r["dense"](*wide(inputs)))]


def softmax_off_by_one(recipe, dtype):
    r = recipe(stop=1)
    r["query"], r["key"], r["value"] = draw(dtype, *[(2, 12, 5, 8)] * 3)
    sinks = draw(dtype, (5,))[0]
    ours = r["attention"](sinks)
    r["query"], r["key"], r["value"] = wide((r["query"], r["key"], r["value"]))
    return [(ours, r["dense"](wide(sinks)))]


def muon(recipe, dtype):
    """What one head, or all as a matrix, would be given alone; in float32, in which parameters are trained."""
    r = recipe()
    shapes = {"query": (12, 3, 5), "out": (3, 5, 12)}
    params, gradient = ({name: {"kernel": wide(draw(dtype, shape)[0])} for name, shape in shapes.items()} for _ in "ab")

    def update(params, gradient, numbers=None):
        optimizer = r["muon"](1.0, muon_weight_dimension_numbers=numbers)
        return optimizer.update(gradient, optimizer.init(params), params)[0]

    results = []
    for per_head in (True, False):
        found = update(params, gradient, lambda params, per_head=per_head: r["matrices"](params, per_head))
        for name, matrix in (("query", (12, 15)), ("out", (15, 12))):
            x, g, ours = (one[name]["kernel"] for one in (params, gradient, found))
            if not per_head:
                results.append((ours.reshape(matrix), update(x.reshape(matrix), g.reshape(matrix))))
                continue
            for head in range(3):
                of = (lambda x, head=head: x[:, head]) if name == "query" else (lambda x, head=head: x[head])
                results.append((of(ours), update(of(x), of(g))))
    return results


RECIPES = [
    absorbed_mla, block_sparse_attention, differential_attention, forgetting_attention, gated_attention, int8_cache,
    lora, meanflow_jvp, muon, packed_documents, qk_norm_and_qk_clip, shared_prefix, sigmoid_attention,
    sliding_window_with_sinks, slot_attention, softmax_off_by_one,
]  # fmt: skip


def test_every_recipe_is_here():
    pages = {path.stem for path in (ROOT / "docs/recipes").glob("*.md")} - {"index"}
    assert {recipe.__name__.replace("_", "-") for recipe in RECIPES} == pages


@pytest.mark.slow
@pytest.mark.usefixtures("as_experiments_run")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
def test_other_sizes_and_dtypes(recipe, dtype, monkeypatch, tmp_path):
    name = recipe.__name__.replace("_", "-")
    load = lambda constants=(), stop=None: run(name, monkeypatch, tmp_path, constants, stop)
    dtype, tolerance = DTYPES[dtype]
    with jax.numpy_rank_promotion("allow"):
        for ours, expected in recipe(load, dtype):
            ours, expected = (np.asarray(x, np.float64) for x in (ours, expected))
            np.testing.assert_allclose(ours, expected, rtol=0, atol=tolerance * max(1.0, np.abs(expected).max()))
