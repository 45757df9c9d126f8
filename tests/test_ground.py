"""Surprises of the packages below and beside attention, and that jattn does not pass them on.

A test whose name begins with ``outside`` holds what another package does: where it fails, a release has changed that, and
the documents that speak of it are to be read again.
"""

import functools
import importlib
import itertools
import json
import subprocess
import sys
import warnings

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

import jattn
from jattn import heads, interop
from jattn._mods.arrays import maximum
from jattn.interop._transformer import _rows as rows_of  # as the model looks its tokens up
from jattn.sharding import HeadParallel, Ring, Ulysses
from jattn_experiments import config, train
from jattn_experiments.measure import evaluate
from jattn_experiments.runs.checkpoint import Checkpoints
from jattn_experiments.runs.folder import Damaged
from tests.jattn import test_gguf, test_interop

MANY = 4096  # entries from which on JAX's maximum on a CPU loses a NaN; and occurrences that bfloat16 cannot count
EVERYWHERE = ("xla", "blockwise", "decode", "native")
on_a_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="what XLA's compiler for CPUs does")


def drawn(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def dense(query, key, value, visible=True, change=lambda scores: scores):
    """``out [B,T,N,D]`` and weights ``[B,N,T,S]`` in float64; a row that sees nothing has zeros."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    scores = change(np.einsum("btnh,bsnh->bnts", query, key) / query.shape[-1] ** 0.5)
    exponentials = np.where(visible, np.exp(scores - scores.max(-1, keepdims=True)), 0.0)
    weights = exponentials / np.maximum(exponentials.sum(-1, keepdims=True), 1e-300)
    return np.einsum("bnts,bsnd->btnd", weights, value), weights


def setup_of(name):
    return train.Setup.of(config.load([name]).config)


def need(implementation):
    if implementation == "native":
        pytest.importorskip("jattn_native")


# a NaN in a maximum


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(MANY,), (64, 64), (2, MANY)], ids=str)
def test_our_maximum_keeps_a_nan(shape, dtype):
    x = drawn(*shape)
    x[..., 5] = np.nan
    assert np.isnan(np.asarray(jax.jit(maximum)(jnp.asarray(x, dtype)), np.float32)).all()
    assert maximum(jnp.zeros((3, 0))).tolist() == [-np.inf] * 3


@pytest.mark.parametrize("length", [pytest.param(8, marks=pytest.mark.slow), MANY])
def test_top_pairs_of_a_query_that_is_nan(length):
    """NaN counts as the largest weight, also where only groups of keys are compared first."""
    query, key = drawn(1, 4, 1, 8), drawn(1, length, 1, 8, seed=1)
    query[0, 2] = np.nan
    weight = np.asarray(heads.top_pairs(query, key, 3).weight)[0, 0]
    assert np.isnan(weight).all(1).tolist() == [False, False, True, False]
    assert np.isfinite(weight[[0, 1, 3]]).all()


@on_a_cpu
def test_outside_a_maximum_drops_nan():
    """``jattn._mods.arrays.maximum`` says since when and from where on."""
    x = np.zeros(MANY, np.float32)
    x[7] = np.nan
    results = {name: float(getattr(jnp, name)(x)) for name in ("max", "min")}
    assert results == {"max": 0.0, "min": 0.0}
    assert jnp.max(jnp.full(MANY, jnp.nan)) == -jnp.inf
    assert jnp.isnan(jnp.max(x[: MANY - 1])) and jnp.isnan(jnp.max(jnp.asarray(x, jnp.bfloat16)))
    assert jnp.argmax(x) == 7
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])
    two = jax.device_put(jnp.array([jnp.nan, 1.0]), jax.NamedSharding(mesh, P("d")))
    assert jax.shard_map(lambda x: jax.lax.pmax(x, "d"), mesh=mesh, in_specs=P("d"), out_specs=P())(two) == 1.0


@on_a_cpu
@pytest.mark.slow
@pytest.mark.parametrize("flag, lost", [("", True), ("--xla_cpu_experimental_ynn_fusion_type=", False)])
def test_outside_a_flag_keeps_the_nan(flag, lost, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flag)
    code = f"import jax.numpy as jnp; print(jnp.max(jnp.zeros({MANY}).at[7].set(jnp.nan)))"
    assert (in_a_process(code) == "0.0") == lost


def in_a_process(code, *arguments):
    run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return run.stdout.strip()


# sums in bfloat16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_that_occurs_often_has_all_of_its_gradient(dtype):
    table = nnx.Embed(3, 2, param_dtype=dtype, rngs=nnx.Rngs(0))
    tokens = jnp.zeros((1, MANY), jnp.int32)
    of = nnx.grad(lambda table: rows_of(table, tokens, None).astype(jnp.float32).sum())
    assert np.asarray(of(table)["embedding"][...], np.float64).tolist() == [[MANY] * 2, [0, 0], [0, 0]]


def test_parameters_and_moments_of_the_experiments_are_float32():
    """AdamW's second moment would stop in bfloat16, and tokens would be counted up to 256."""
    setup = setup_of("skills")
    state = jax.eval_shape(setup.init)
    floating = {x.dtype for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)}
    assert floating == {jnp.dtype(jnp.float32)}
    batch = jax.eval_shape(lambda key: setup.task.sample(key, 2), setup.keys[0])
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state["params"])
    assert jax.eval_shape(setup.model.apply, one, batch.tokens).dtype == jnp.float32


@pytest.mark.parametrize("of_module", ["nnx", "linen"])
def test_outside_an_embedding_of_a_dtype_counts_to_256(of_module):
    tokens, options = jnp.zeros(MANY, jnp.int32), {"dtype": jnp.bfloat16, "param_dtype": jnp.float32}
    if of_module == "nnx":
        embed = nnx.Embed(3, 2, **options, rngs=nnx.Rngs(0))
        gradient = nnx.grad(lambda embed: embed(tokens).astype(jnp.float32).sum())(embed)["embedding"][...]
    else:
        embed = linen.Embed(3, 2, **options)
        params = embed.init(jax.random.key(0), tokens)
        gradient = jax.grad(lambda params: embed.apply(params, tokens).astype(jnp.float32).sum())(params)
        gradient = gradient["params"]["embedding"]
    assert gradient[0].tolist() == [256.0, 256.0]


def test_outside_optax_in_bfloat16():
    leaves = [jnp.ones(1, jnp.bfloat16)] * 400
    assert float(optax.tree.norm(leaves)) == 16.0
    optimizer, ones = optax.adamw(1e-3, b2=0.999), jnp.ones(2, jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):
        step = jax.jit(lambda state: optimizer.update(ones, state, ones)[1])
        state = jax.lax.fori_loop(0, 3000, lambda _, state: step(state), optimizer.init(ones))
    moment = optax.tree.get(state, "nu")
    assert moment.dtype == jnp.bfloat16 and moment.tolist() == [0.5, 0.5]  # 1 - 0.999**3000 = 0.95


# random streams


class Streams:
    """Which keys are drawn from, as paths from a seed's key; an entry None is a number not known while tracing."""

    DRAWS = ("bernoulli", "categorical", "choice", "dirichlet", "gumbel", "normal", "permutation", "randint", "uniform")

    def __init__(self, monkeypatch):
        self.paths, self.kept, self.drawn = {}, [], set()
        fold_in, split = jax.random.fold_in, jax.random.split

        def named(key, path):
            self.kept.append(key)  # so that its id stays its own
            self.paths[id(key)] = path
            return key

        def entry(data):
            return None if isinstance(data, jax.core.Tracer) else int(data)

        def folded(key, data):
            return named(fold_in(key, data), (*self.of(key), entry(data)))

        def parts(key, num=2):
            return [named(one, (*self.of(key), at)) for at, one in enumerate(split(key, num))]

        monkeypatch.setattr(jax.random, "fold_in", folded)
        monkeypatch.setattr(jax.random, "split", parts)
        for name in self.DRAWS:
            monkeypatch.setattr(jax.random, name, self.noted(getattr(jax.random, name)))

    def of(self, key):
        return self.paths.get(id(key), ())

    def noted(self, draw):
        @functools.wraps(draw)
        def drawing(key, *arguments, **options):
            self.drawn.add(self.of(key))
            return draw(key, *arguments, **options)

        return drawing

    def take(self):
        """The paths since the last call."""
        taken, self.drawn = self.drawn, set()
        return taken


def overlap(one, other):
    """Whether a draw from one key uses bits of the other, or of a key that is made of it."""
    return all(a == b or None in (a, b) for a, b in zip(one, other, strict=False))


def test_fold_in_is_a_part_of_split():
    """So that a key which is drawn from must not be folded, too: ``overlap`` counts on it."""
    key = jax.random.key(7)
    folded = [jax.random.key_data(jax.random.fold_in(key, i)) for i in range(5)]
    np.testing.assert_array_equal(folded, jax.random.key_data(jax.random.split(key, 5)))
    assert overlap((1,), (1, 2)) and overlap((1, None), (1, 2, 3)) and not overlap((1, 0), (1, 2))


@pytest.mark.usefixtures("as_experiments_run")
@pytest.mark.slow_except("shift_bank")
@pytest.mark.parametrize("name", [
    "copy", "copy_string", "histogram", "hop", "in_context", "induction", "markov", "recall", "shift_bank", "skills",
])  # fmt: skip
def test_streams_of_the_experiments_are_apart(name, monkeypatch):
    """Training shares no bit with what is measured, nor parameters with data, nor untrained heads with trained ones."""
    setup, streams = setup_of(name), Streams(monkeypatch)
    state = jax.eval_shape(setup.init)
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state)
    used = {"parameters": streams.take()}
    jax.eval_shape(functools.partial(train.train_step, setup), one, setup.keys[0], jnp.int32(0))
    step = streams.take()
    jax.eval_shape(lambda step: train.train_step(setup, zeros_of(one), setup.keys[0], step), jnp.int32(0))
    used["training"] = step | streams.take()
    jax.eval_shape(train.look_at(setup), state["params"])
    used["looks"] = streams.take()
    jax.eval_shape(lambda params: evaluate._looks(setup, params, setup.keys[0]), one["params"])
    used["looks at the end"] = streams.take()
    jax.eval_shape(lambda key: evaluate._null_batch(setup, key), setup.keys[0])
    jax.eval_shape(lambda key: jax.random.normal(jax.random.fold_in(key, train.NULL_INIT)), setup.keys[0])
    used["null"] = streams.take()
    assert all(used.values())
    both = {frozenset(names) for names in itertools.combinations(used, 2)} - {frozenset(["looks", "looks at the end"])}
    together = {
        tuple(sorted(names)): (a, b)
        for names in both
        for a, b in itertools.product(*(used[part] for part in names))
        if overlap(a, b)
    }
    assert not together


@pytest.mark.usefixtures("as_experiments_run")
@pytest.mark.slow
def test_a_seeds_own_key_is_only_folded(monkeypatch):
    setup, streams = setup_of("skills"), Streams(monkeypatch)
    params = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), jax.eval_shape(setup.init)["params"])
    streams.take()
    jax.eval_shape(lambda key: evaluate._answers(setup, params, key), setup.keys[0])
    assert {path[0] for path in streams.take()} == {train.TEST_DATA}


def zeros_of(shapes):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


# how a call is made: eager or jitted, on an explicit mesh, exported


@pytest.mark.bits
@pytest.mark.slow_except("native")
@pytest.mark.parametrize("implementation", EVERYWHERE)
def test_bfloat16_is_rounded_alike_in_eager_and_in_jitted_calls(implementation):
    """An XLA program may leave out the rounding of a result that is cast to float32 at once; a call of ours does not."""
    need(implementation)
    query, key, value = (jnp.asarray(drawn(1, 64, 2, 32, seed=i), jnp.bfloat16) for i in range(3))
    attend = lambda *arrays: jattn.dot_product_attention(*arrays, is_causal=True, implementation=implementation)
    eager = attend(query, key, value)
    np.testing.assert_array_equal(eager, jax.jit(attend)(query, key, value))
    wide = jax.jit(lambda *arrays: attend(*arrays).astype(jnp.float32))(query, key, value)
    np.testing.assert_array_equal(wide, eager.astype(jnp.float32))


@pytest.mark.slow
def test_outside_a_softmax_in_bfloat16_is_not_rounded_before_a_cast():
    x = jnp.asarray(3 * drawn(64, 128), jnp.bfloat16)
    wide = lambda x: jax.nn.softmax(x, axis=-1).astype(jnp.float32)
    assert np.mean(np.asarray(wide(x) == jax.jit(wide)(x))) < 0.1


@pytest.mark.slow_except("HeadParallel")
@pytest.mark.parametrize("kind", [Ring, Ulysses, HeadParallel], ids=lambda kind: kind.__name__)
def test_plain_arrays_on_the_mesh_that_make_mesh_makes(kind):
    """Its axes are Explicit, where ``jax.shard_map`` refuses arrays that are not sharded."""
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])
    query, key, value = arrays = [drawn(1, 8, 2, 4, seed=i) for i in range(3)]
    with pytest.raises(ValueError, match="does not match the specs of the input"):
        jax.shard_map(lambda x: x, mesh=mesh, in_specs=P("d"), out_specs=P("d"))(jnp.zeros(4))
    attend = lambda *arrays: jattn.dot_product_attention(*arrays, is_causal=True, implementation=kind(mesh, "d"))
    expected = dense(*arrays, np.tril(np.ones((8, 8), bool)))[0]
    for run in (attend, jax.jit(attend)):
        np.testing.assert_allclose(run(*map(jnp.asarray, arrays)), expected, atol=1e-5)


def test_a_window_over_a_symbolic_length():
    """``jax.nn.dot_product_attention`` raises a TypeError."""
    (length,) = jax.export.symbolic_shape("t")
    shape = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)
    program = lambda attend: jax.export.export(
        jax.jit(lambda query, key, value: attend(query, key, value, local_window_size=(3, 0)))
    )
    exported = program(jattn.dot_product_attention)(shape, shape, shape)
    arrays, at = [drawn(1, 12, 1, 8, seed=i) for i in range(3)], np.arange(12)
    far = at[:, None] - at
    np.testing.assert_allclose(exported.call(*arrays), dense(*arrays, (far >= 0) & (far <= 3))[0], atol=1e-5)
    with pytest.raises(TypeError):
        program(jax.nn.dot_product_attention)(shape, shape, shape)


def test_what_an_exported_call_cannot_do_is_exported_itself():
    """No ``vmap`` and no forward mode of ``Exported.call``: the batch is an axis, the derivative a program."""
    (batch,) = jax.export.symbolic_shape("b")
    attend = lambda query: jattn.dot_product_attention(query, query, query, is_causal=True)
    shape, x = jax.ShapeDtypeStruct((batch, 6, 1, 4), jnp.float32), jnp.asarray(drawn(3, 6, 1, 4))
    exported = jax.export.export(jax.jit(attend))(shape)
    with pytest.raises(NotImplementedError, match="call_exported"):
        jax.vmap(exported.call)(x[:, None])
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(exported.call, (x,), (x,))
    seen = np.tril(np.ones((6, 6), bool))
    np.testing.assert_allclose(exported.call(x), dense(x, x, x, seen)[0], atol=1e-5)
    forward = jax.export.export(jax.jit(lambda x, direction: jax.jvp(attend, (x,), (direction,))[1]))(shape, shape)
    along, step = np.asarray(drawn(3, 6, 1, 4, seed=1), np.float64), 1e-6
    plus, minus = (dense(*[np.asarray(x, np.float64) + sign * step * along] * 3, seen)[0] for sign in (1, -1))
    np.testing.assert_allclose(forward.call(x, jnp.asarray(along, jnp.float32)), (plus - minus) / (2 * step), atol=1e-4)


# files


def test_parameters_of_another_shape_are_refused(tmp_path):
    """``nnx.update`` takes arrays of any shape, and any names."""
    tensors = test_interop.gpt2_tensors()
    wrong = tensors | {"h.0.attn.c_attn.weight": tensors["h.0.attn.c_attn.weight"][:, :-1]}
    with pytest.raises(ValueError, match=r"of another shape: h\.0\.attn\.c_attn\.weight"):
        interop.from_tensors(wrong, test_interop.GPT2)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"w": jnp.arange(6.0).reshape(2, 3)})
    np.testing.assert_array_equal(checkpoints.load(1, {"w": jnp.zeros((2, 3))})["w"], np.arange(6.0).reshape(2, 3))
    for like in ({"w": jnp.zeros((3, 2))}, {"w": jnp.zeros((2, 4))}, {"v": jnp.zeros((2, 3))}):
        with warnings.catch_warnings(), pytest.raises(Damaged, match="cannot be read"):
            warnings.simplefilter("ignore")  # Orbax leaves coroutines behind when it refuses
            checkpoints.load(1, like)


def test_a_layer_given_parameters_of_another_shape_raises():
    layer = jattn.nnx.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0))
    nnx.update(layer, {"query": {"kernel": jnp.ones((8, 2, 5))}})
    with pytest.raises(TypeError, match="incompatible shapes"):
        layer(jnp.ones((1, 3, 8)))


def test_outside_nnx_update_takes_any_shape():
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    nnx.update(layer, {"kernel": jnp.ones(5), "another": jnp.ones(1)})
    assert layer.kernel.shape == (5,) and layer.another.shape == (1,)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_small_floats_are_read_where_jattn_alone_is_imported(kind, tmp_path):
    """Or refused with a ``ValueError`` that names the file; safetensors reads BF16 only once ml_dtypes is imported."""
    safetensors = pytest.importorskip("safetensors.numpy")
    tensors = {name: np.ascontiguousarray(x.astype(kind)) for name, x in test_interop.gpt2_tensors().items()}
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(test_interop.GPT2))
    code = (
        "import sys; from jattn import interop\n"
        "try: print(interop.load(sys.argv[1]).token_embed.embedding[...].tolist())\n"
        "except ValueError as error: print(sys.argv[1] in str(error) or 'wte.weight' in str(error))"
    )
    read = in_a_process(code, str(tmp_path))
    assert read == "True" or json.loads(read) == tensors["wte.weight"].astype(np.float32).tolist()


def test_outside_safetensors_stores_a_transposed_array_in_the_order_of_memory(tmp_path):
    """So an array is made contiguous before it is saved."""
    safetensors = pytest.importorskip("safetensors.numpy")
    x = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    safetensors.save_file({"view": x.T, "copy": np.ascontiguousarray(x.T)}, tmp_path / "x.safetensors")
    read = safetensors.load_file(tmp_path / "x.safetensors")
    np.testing.assert_array_equal(read["copy"], x.T)
    assert read["view"].tolist() == x.reshape(3, 2).tolist()


def test_scaled_positions_and_biases_of_a_gguf_llama_are_kept(tmp_path):
    """transformers drops both and says nothing."""
    gguf = test_gguf.gguf
    config, tensors = test_gguf.of("llama")
    width = {name: len(tensors[f"model.layers.0.self_attn.{name}_proj.weight"]) for name in "qkvo"}
    biases = {
        f"model.layers.{i}.self_attn.{name}_proj.bias": drawn(width[name], seed=i)
        for i in range(config["num_hidden_layers"])
        for name in width
    }
    fields = {"rope_scaling_type": gguf.RopeScalingType.LINEAR, "rope_scaling_factor": 4.0}
    file = test_gguf.write(tmp_path / "tiny.gguf", config | {"attention_bias": True}, tensors | biases, fields)
    model = interop.load(file)
    assert model.config.position.scaling.factor == 4.0
    for name, ours in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "out")):
        stored = np.asarray(getattr(model.layers.attention, ours).bias[...])
        for i in range(config["num_hidden_layers"]):
            np.testing.assert_array_equal(stored[i].ravel(), biases[f"model.layers.{i}.self_attn.{name}_proj.bias"])


# what a layer gives out


@pytest.mark.parametrize("implementation", EVERYWHERE)
def test_a_row_without_a_visible_key(implementation):
    """Output 0 and a log-sum-exp of -inf, with and without weights; PyTorch's layer gives NaN or 0, by its options."""
    need(implementation)
    query, key, value = arrays = [drawn(1, 4, 2, 8, seed=i) for i in range(3)]
    seen = np.ones((4, 4), bool)
    seen[1] = False
    out, lse = jattn.dot_product_attention(
        *map(jnp.asarray, arrays),
        mask=jnp.asarray(seen)[None, None],
        implementation=implementation,
        return_residual=True,
    )
    np.testing.assert_allclose(out, dense(*arrays, seen)[0], atol=1e-5)
    assert not np.asarray(out)[0, 1].any() and (np.asarray(lse)[0, 1] == -np.inf).all()
    assert np.isfinite(np.asarray(lse)[0, [0, 2, 3]]).all()
    assert not np.asarray(jattn.attention_weights(*arrays[:2], mask=seen[None, None]))[0, :, 1].any()


@pytest.mark.slow
def test_outside_a_row_without_a_visible_key_in_pytorch():
    torch = pytest.importorskip("torch")
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    x, hidden = torch.randn(1, 4, 8), torch.zeros(4, 4, dtype=torch.bool)
    hidden[1] = True
    is_nan = lambda **options: bool(layer(x, x, x, attn_mask=hidden, **options)[0][0, 1].isnan().any())
    assert is_nan(need_weights=True) and not is_nan(need_weights=False)
    layer.eval()
    with torch.no_grad():
        assert is_nan(need_weights=True) and is_nan(need_weights=False)
    query = torch.randn(1, 2, 4, 8)
    assert not torch.nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=~hidden)[0, :, 1].any()


@pytest.mark.slow_except("xla")
@pytest.mark.bits
@pytest.mark.parametrize("implementation", EVERYWHERE)
def test_weights_are_given_out_whatever_runs_beside_the_same_bits(implementation):
    """transformers gives an empty tuple by default; Flax's own layer computes other bits once it sows."""
    need(implementation)
    options = {"decode": False, "implementation": implementation, "rngs": nnx.Rngs(0)}
    layer, x = jattn.nnx.MultiHeadAttention(2, 8, **options), jnp.asarray(drawn(1, 6, 8))
    plain = layer(x, is_causal=True)
    same, seen = nnx.capture(lambda layer: layer(x, is_causal=True, sow_weights=True), nnx.Intermediate)(layer)
    np.testing.assert_array_equal(plain, same)
    (weights,) = jax.tree.leaves(nnx.to_pure_dict(seen))
    project = lambda one: np.einsum("btm,mnh->btnh", np.asarray(x, np.float64), np.asarray(one.kernel[...], np.float64))
    query, key = project(layer.query), project(layer.key)
    np.testing.assert_allclose(weights, dense(query, key, key, np.tril(np.ones((6, 6), bool)))[1], atol=1e-5)


@pytest.mark.slow
def test_outside_no_weights_from_transformers_by_default():
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    sizes = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_size": 8,
        "intermediate_size": 16,
        "vocab_size": 11,
    }
    model = transformers.LlamaModel(transformers.LlamaConfig(**sizes))
    assert model(torch.zeros(1, 4, dtype=torch.long), output_attentions=True).attentions == ()


@pytest.mark.parametrize("implementation", ["xla", "blockwise", "decode"])
def test_an_edit_of_the_scores_changes_the_output(implementation):
    """In models that TransformerLens boots natively, the hook on scores sees weights, and an edit is discarded."""
    arrays = [drawn(1, 5, 2, 8, seed=i) for i in range(3)]
    edit = lambda score, b, h, q_idx, kv_idx: score + 3.0 * (kv_idx == 2)
    out = jattn.dot_product_attention(*map(jnp.asarray, arrays), score_mod=edit, implementation=implementation)
    expected = dense(*arrays, change=lambda scores: scores + 3.0 * (np.arange(5) == 2))[0]
    np.testing.assert_allclose(out, expected, atol=1e-5)
    assert np.abs(expected - dense(*arrays)[0]).max() > 0.1


@pytest.mark.slow
def test_outside_an_edit_of_the_scores_in_transformer_lens():
    torch = pytest.importorskip("torch")
    lens = pytest.importorskip("transformer_lens")
    with pytest.raises(ImportError, match="removed"):
        lens.HookedTransformer  # noqa: B018
    sizes = {"n_layers": 1, "d_model": 8, "n_heads": 2, "d_head": 4, "d_mlp": 16, "n_ctx": 16, "d_vocab": 11}
    options = {"act_fn": "gelu", "normalization_type": "LN", "architecture": "TransformerLensNative"}
    model = lens.TransformerBridge.boot_native(lens.TransformerBridgeConfig(**sizes, **options))
    tokens, name = torch.arange(6)[None], "blocks.0.attn.hook_attn_scores"
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        clean, cache = model.run_with_cache(tokens)
        assert torch.equal(cache[name], cache["blocks.0.attn.hook_pattern"])
        edited = model.run_with_hooks(tokens, fwd_hooks=[(name, lambda scores, hook: torch.zeros_like(scores))])
    assert torch.equal(clean, edited)


@pytest.mark.slow
def test_memory_of_causal_attention_is_linear():
    """``tokamax``'s "xla_chunked" keeps a number for each pair where it is causal."""

    def temporaries(attend, length):
        shape = jax.ShapeDtypeStruct((1, length, 1, 64), jnp.float32)
        compiled = jax.jit(functools.partial(attend, is_causal=True)).lower(shape, shape, shape).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    ours = functools.partial(jattn.dot_product_attention, implementation="blockwise")
    assert temporaries(ours, 32768) < 2.2 * temporaries(ours, 16384) < 2.2 * 48 * 2**20
    if importlib.util.find_spec("tokamax"):
        import tokamax

        chunked = functools.partial(tokamax.dot_product_attention, implementation="xla_chunked")
        assert temporaries(chunked, 16384) > 16384**2 / 2


def test_one_row_equals_that_row_of_many_to_a_tolerance():
    """Not in bits: XLA's sums run in an order that depends on the shapes."""
    query, key, value = arrays = [drawn(1, 40, 2, 16, seed=i) for i in range(3)]
    attend = lambda *arrays: jattn.dot_product_attention(*map(jnp.asarray, arrays))
    expected = dense(*arrays)[0]
    np.testing.assert_allclose(attend(*arrays)[:, 7:8], expected[:, 7:8], atol=1e-5)
    np.testing.assert_allclose(attend(query[:, 7:8], key, value), expected[:, 7:8], atol=1e-5)


@pytest.mark.slow
def test_outside_sinks_of_ejkernel():
    """Its flash attention gives every head all sinks; ours are one for each head (``jattn.testing``, case "sinks")."""
    flash = pytest.importorskip("ejkernel.kernels._xla.flash_attention").flash_attention
    arrays, sinks = [drawn(1, 16, 4, 16, seed=i) for i in range(3)], np.array([-2.0, 0.0, 1.0, 3.0], np.float32)
    seen = np.tril(np.ones((16, 16), bool))
    scores = np.where(seen, np.einsum("btnh,bsnh->bnts", *(x.astype(np.float64) for x in arrays[:2])) / 4, -np.inf)
    weights = np.exp(scores) / (np.exp(scores).sum(-1, keepdims=True) + np.exp(sinks.astype(np.float64)).sum())
    out = flash(*map(jnp.asarray, arrays), softmax_aux=jnp.asarray(sinks), causal=True)
    np.testing.assert_allclose(out, np.einsum("bnts,bsnd->btnd", weights, arrays[2]), atol=1e-5)


@pytest.mark.usefixtures("as_experiments_run")
def test_equal_logits_in_bfloat16_are_drawn_evenly():
    """``jax.random.categorical`` of bfloat16 draws only the first ones; ``interop.generate`` draws in float32."""
    sizes = {"num_layers": 1, "num_heads": 1, "model_dim": 2, "mlp_dim": 2, "vocabulary": 50_000, "max_length": 4}
    config_of_zeros = interop.Config("zeros", **sizes, norm_epsilon=1e-5, activation="relu")
    model = interop.Transformer(config_of_zeros, rngs=nnx.Rngs(0))
    nnx.update(model, jax.tree.map(lambda x: jnp.zeros_like(x, jnp.bfloat16), nnx.state(model)))
    drawn_tokens = np.asarray(interop.generate(model, [[1]] * 200, 1, temperature=1.0, key=jax.random.key(0)))[:, -1]
    assert drawn_tokens.max() > 45_000 and abs(drawn_tokens.mean() - 25_000) < 5_000
    logits = jnp.zeros((200, 50_000), jnp.bfloat16)
    assert jax.random.categorical(jax.random.key(0), logits).max() < 5_000  # else the page is to be corrected
