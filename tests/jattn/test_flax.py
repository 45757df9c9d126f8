"""jattn's Flax modules against Flax's own: arguments, parameters, outputs, gradients, weights, checkpoints, dropout.

Both module systems run the same tests: ``NNX`` and ``LINEN`` make a module a pure function of its parameters.
"""

import contextlib
import functools
import inspect

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from orbax.checkpoint import v1 as orbax

import jattn
import jattn.linen
import jattn.nnx

B, T, S, M, N = 2, 7, 11, 12, 6


@contextlib.contextmanager
def flaxs_promotion():
    """Flax's own code mixes ranks and dtypes, but jattn's tests are strict."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


class NNX:
    ours, theirs = jattn.nnx, nnx
    classes = ("MultiHeadAttention",)
    drawn = {"num_kv_heads": [None, 2, 3], "in_kv_features": [None, M], "keep_rngs": [True, False]}
    seeds = (0, 1, 10, 11)

    @staticmethod
    def make(library, x, key, name="MultiHeadAttention", **options):
        """``(params, apply)``; ``apply(params, *inputs, **call)`` gives the output, or ``(output, weights)``."""
        features = {"in_features": x.shape[-1], "decode": False}
        module = getattr(library, name)(N, **features, **options, rngs=nnx.Rngs(key))
        graphdef, params, rest = nnx.split(module, nnx.Param, ...)

        def apply(params, *inputs, sow_weights=False, dropout=None, **call):
            module = nnx.merge(graphdef, params, rest)
            rngs = {} if dropout is None else {"rngs": nnx.Rngs(dropout=dropout)}
            if not sow_weights:
                return module(*inputs, **call, **rngs)
            y, sown = nnx.capture(module, nnx.Intermediate)(*inputs, sow_weights=True, **call, **rngs)
            (weights,) = jax.tree.leaves(nnx.to_pure_dict(sown))
            return y, weights

        return nnx.to_pure_dict(params), lambda params, *a, **k: apply(nnx.State(params), *a, **k)


class LINEN:
    ours, theirs = jattn.linen, linen
    classes = ("MultiHeadDotProductAttention", "MultiHeadAttention")
    drawn = {"force_fp32_for_softmax": [False, True]}
    seeds = (0, 9, 20, 21)

    @staticmethod
    def make(library, x, key, name="MultiHeadDotProductAttention", **options):
        module = getattr(library, name)(N, **options)
        off = {} if "deterministic" in options else {"deterministic": True}
        params = module.init({"params": key, "dropout": key}, x, **off)["params"]

        def apply(params, *inputs, sow_weights=False, dropout=None, **call):
            rngs = {} if dropout is None else {"rngs": {"dropout": dropout}}
            if not sow_weights:
                return module.apply({"params": params}, *inputs, **call, **rngs)
            call |= {"sow_weights": True, "mutable": ["intermediates"]}
            y, sown = module.apply({"params": params}, *inputs, **call, **rngs)
            (weights,) = sown["intermediates"]["attention_weights"]
            return y, weights

        return params, apply


SYSTEMS = pytest.mark.parametrize("system", [NNX, LINEN], ids=["nnx", "linen"])

OPTIONS = {
    "qkv_features": [None, 6, 30], "out_features": [None, 7], "use_bias": [True, False], "normalize_qk": [False, True],
    "precision": [None, "highest"], "bias_init": [jax.nn.initializers.zeros, jax.nn.initializers.normal(1.0)],
    "kernel_init": [jax.nn.initializers.lecun_normal(), jax.nn.initializers.he_uniform()],
    "out_kernel_init": [None, jax.nn.initializers.normal(0.3)], "out_bias_init": [None, jax.nn.initializers.normal(0.5)],
    "param_dtype": [jnp.float32, jnp.bfloat16], "dropout_rate": [0.0, 0.3],
}  # fmt: skip
INPUTS = {"self": lambda x, x_kv: (x,), "cross": lambda x, x_kv: (x, x_kv), "keys and values apart": lambda x, x_kv: (x, x_kv, 2 * x_kv)}  # fmt: skip
MASKS = {
    "none": lambda rng, S: None,
    "causal": lambda rng, S: np.tri(T, S)[None, None],
    "random, float": lambda rng, S: (rng.random((B, N, T, S)) < 0.7).astype(np.float32),
    "padding": lambda rng, S: (np.arange(S) < [[5], [S]])[:, None, None, :],
}


def draw(system, seed):
    """Draws a point of the grid: constructor options, kind of inputs, mask."""
    rng = np.random.default_rng(seed)
    pick = lambda choices: choices[rng.integers(len(choices))]
    chosen = {name: pick(choices) for name, choices in (OPTIONS | system.drawn).items()}
    options = {name: value for name, value in chosen.items() if value is not None}
    return options, pick(list(INPUTS)), pick(list(MASKS)), rng


def relative(got, expected):
    """The largest difference over the largest value."""
    got, expected = (np.asarray(x, np.float64) for x in (got, expected))
    return np.abs(got - expected).max() / max(np.abs(expected).max(), 1e-30)


def inputs(dtype=jnp.float32):
    return (jnp.asarray(np.random.default_rng(i).normal(size=(B, n, M)), dtype) for i, n in enumerate((T, S)))


@SYSTEMS
def test_none_of_flaxs_arguments_is_missing(system):
    """Compares names, order and defaults of constructor, call, ``attention_fn`` and methods."""
    pairs = [(lib.dot_product_attention for lib in (system.ours, system.theirs))]
    for name in system.classes:
        ours, theirs = (getattr(lib, name) for lib in (system.ours, system.theirs))
        pairs += [(ours, theirs), (ours.__call__, theirs.__call__)]
        pairs += [(getattr(ours, m), getattr(theirs, m)) for m in ("init_cache", "set_view") if hasattr(theirs, m)]
    for ours, theirs in pairs:
        ours, theirs = (dict(inspect.signature(one).parameters) for one in (ours, theirs))
        assert not set(theirs) - set(ours)
        by_place = [p.name for p in theirs.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        by_place = [name for name in by_place if name not in ("parent", "name")]  # Linen appends them in every module
        assert list(ours)[: len(by_place)] == by_place
        plain = (bool, int, float, str, type(None))
        for name, parameter in theirs.items():
            if isinstance(parameter.default, plain):
                assert ours[name].default == parameter.default, name
            elif not callable(parameter.default):
                assert (ours[name].default is ours[name].empty) == (parameter.default is parameter.empty), name


@SYSTEMS
def test_names_of_the_module_classes(system):
    """Linen names parameters after the class, so a checkpoint only fits a class of the same name."""
    if system is NNX:
        assert jattn.nnx.MultiHeadAttention.__name__ == nnx.MultiHeadAttention.__name__
        return

    class Model(linen.Module):
        layer: type

        @linen.compact
        def __call__(self, x):
            return self.layer(N)(x)

    for name in system.classes:
        models = (Model(getattr(library, name)) for library in (system.ours, linen))
        ours, theirs = (model.init(jax.random.key(0), next(inputs())) for model in models)
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)


@SYSTEMS
def test_the_seeds_draw_every_option(system):
    drawn = [draw(system, seed) for seed in system.seeds]
    for name, choices in (OPTIONS | system.drawn).items():
        values = [options.get(name) for options, *_ in drawn]
        assert all(any(value is choice or value == choice for value in values) for choice in choices), name
    assert {kind for _, kind, _, _ in drawn} == set(INPUTS) and {mask for _, _, mask, _ in drawn} == set(MASKS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "system, seed", [(system, seed) for system in (NNX, LINEN) for seed in system.seeds], ids=lambda x: getattr(x, "__name__", x)
)  # fmt: skip
def test_a_drawn_grid_of_options(system, seed):
    """The same key gives bit-identical parameters. Outputs agree to 1e-6, gradients to 1e-5, and sown weights too."""
    options, kind, mask, rng = draw(system, seed)
    x, x_kv = inputs()
    args = INPUTS[kind](x, x_kv)
    mask = MASKS[mask](rng, args[-1].shape[1])
    mask = None if mask is None else jnp.asarray(mask)
    with flaxs_promotion():
        theirs, apply_theirs = system.make(system.theirs, x, jax.random.key(seed), **options)
        ours, apply_ours = system.make(system.ours, x, jax.random.key(seed), **options)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)

    def run(apply):
        def loss(params, *args):
            y, weights = apply(params, *args, mask=mask, deterministic=True, sow_weights=True)
            return jnp.sum(jnp.sin(y.astype(jnp.float32)) * jnp.cos(jnp.arange(y.shape[-1]))), (y, weights)

        step = jax.jit(jax.value_and_grad(loss, argnums=tuple(range(len(args) + 1)), has_aux=True))
        (_, (y, weights)), gradients = step(ours, *args)
        return y, weights, gradients

    with flaxs_promotion():
        expected, expected_weights, expected_gradients = run(apply_theirs)
        got, weights, gradients = run(apply_ours)
    assert (got.dtype, weights.dtype) == (expected.dtype, expected_weights.dtype) and relative(got, expected) < 1e-6
    np.testing.assert_allclose(weights, expected_weights, atol=1e-6)
    tolerance = 1e-5 if options["param_dtype"] == jnp.float32 else 2e-2  # bfloat16 gradients have 8 bits
    scale = max(np.abs(np.asarray(x, np.float64)).max() for x in jax.tree.leaves(expected_gradients))
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True):
        np.testing.assert_allclose(one.astype(jnp.float32), other.astype(jnp.float32), atol=tolerance * scale)


@pytest.mark.slow
@SYSTEMS
@pytest.mark.parametrize("explicit", [False, True], ids=["by promotion", "by dtype="])
def test_bfloat16_errs_no_more_than_flax(system, explicit):
    """Compared with Flax's formula in float64; root mean square over sixteen draws."""
    options = {"dtype": jnp.bfloat16} if explicit else {"param_dtype": jnp.bfloat16}
    dtype = jnp.float32 if explicit else jnp.bfloat16
    errors = {"ours": [], "theirs": []}
    with flaxs_promotion():
        x, _ = inputs(dtype)
        params, apply_theirs = system.make(system.theirs, x, jax.random.key(0), **options)
        _, apply_ours = system.make(system.ours, x, jax.random.key(0), **options)
        _, exact = system.make(system.theirs, x, jax.random.key(0))
        for seed in range(16):
            x = jnp.asarray(np.random.default_rng(seed).normal(size=(B, 24, M)), dtype)
            with jax.enable_x64(True):
                wide = jax.tree.map(lambda p: p.astype(jnp.float64), (params, x))
                expected = np.asarray(exact(*wide))
            for name, apply in (("ours", apply_ours), ("theirs", apply_theirs)):
                y = apply(params, x)
                assert y.dtype == jnp.bfloat16
                errors[name].append(np.mean((np.asarray(y, np.float64) - expected) ** 2))
    ours, theirs = (np.sqrt(np.mean(errors[name])) for name in ("ours", "theirs"))
    assert ours <= theirs


@pytest.mark.slow
@SYSTEMS
def test_a_checkpoint_of_one_restores_into_the_other(system, tmp_path):
    x, x_kv = inputs()
    options = {"normalize_qk": True, "qkv_features": 30}
    with flaxs_promotion():
        theirs, apply_theirs = system.make(system.theirs, x, jax.random.key(1), **options)
    ours, apply_ours = system.make(system.ours, x, jax.random.key(2), **options)
    for name, source, target, apply_source, apply_target in (
        ("to ours", theirs, ours, apply_theirs, apply_ours),
        ("to theirs", ours, theirs, apply_ours, apply_theirs),
    ):
        described = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=p.sharding), target)
        with orbax.training.Checkpointer(tmp_path / name) as checkpoints:
            checkpoints.save(0, source)
            restored = checkpoints.load(0, described)
        with flaxs_promotion():
            assert relative(apply_target(restored, x, x_kv), apply_source(source, x, x_kv)) < 1e-6


@pytest.mark.slow_except("nnx")
@pytest.mark.bits
@SYSTEMS
def test_asking_for_weights_changes_no_bit(system):
    x, _ = inputs()
    for dtype in (jnp.float32, jnp.bfloat16):
        params, apply = system.make(system.ours, x, jax.random.key(0), dtype=dtype)
        call = jax.jit(functools.partial(apply, is_causal=True), static_argnames="sow_weights")
        y, weights = call(params, x, sow_weights=True)
        np.testing.assert_array_equal(call(params, x, sow_weights=False), y)
        assert weights.dtype == dtype
        np.testing.assert_array_equal(weights > 0, np.broadcast_to(np.tri(T) > 0, (B, N, T, T)))


@pytest.mark.slow
@SYSTEMS
@pytest.mark.parametrize("broadcast", [True, False])
def test_dropout_agrees_in_distribution(system, broadcast):
    """Mean and variance of the output over 400 keys match Flax's, with and without a shared pattern."""
    x, _ = inputs()
    options = {"dropout_rate": 0.4, "broadcast_dropout": broadcast}
    moments = {}
    for name, library in (("ours", system.ours), ("theirs", system.theirs)):
        with flaxs_promotion():
            params, apply = system.make(library, x, jax.random.key(0), **options)
            keys = jax.random.split(jax.random.key(5), 400)
            draw = lambda key, p=params, f=apply: f(p, x, dropout=key, deterministic=False)
            y = np.asarray(jax.jit(jax.vmap(draw))(keys), np.float64)
            off = apply(params, x, deterministic=True)
        moments[name] = y.mean(0), y.var(0), np.asarray(off)
    ours, theirs = moments["ours"], moments["theirs"]
    np.testing.assert_allclose(ours[2], theirs[2], atol=1e-6)
    deviation = np.sqrt(theirs[1] / 400)
    assert (np.abs(ours[0] - theirs[0]) < 7 * deviation).all()
    np.testing.assert_allclose(ours[1].mean(), theirs[1].mean(), rtol=0.1)  # a shared pattern adds up over heads


def test_which_weights_are_dropped_together():
    """With ``value = identity``, the output equals the weights after dropout."""
    q = jax.random.normal(jax.random.key(0), (B, T, N, 5))
    v = jnp.broadcast_to(jnp.eye(T)[:, None], (B, T, N, T))
    for fn in (jattn.nnx.dot_product_attention, jattn.linen.dot_product_attention):
        drop = functools.partial(fn, q, q, v, dropout_rate=0.5, dropout_rng=jax.random.key(1))
        kept = {shared: np.moveaxis(drop(broadcast_dropout=shared) != 0, 2, 1) for shared in (True, False)}
        np.testing.assert_array_equal(kept[True], np.broadcast_to(kept[True][:1, :1], kept[True].shape))
        assert (kept[False][0, 0] != kept[False][1, 0]).any() and (kept[False][0, 0] != kept[False][0, 1]).any()
        assert all(0.3 < x.mean() < 0.7 for x in kept.values())


@SYSTEMS
def test_who_decides_whether_dropout_is_on(system):
    x, _ = inputs()
    params, apply = system.make(system.ours, x, jax.random.key(0), dropout_rate=0.5)
    key = jax.random.key(3)
    off = apply(params, x, deterministic=True)
    assert relative(apply(params, x, deterministic=False, dropout=key), off) > 0.01
    with pytest.raises(ValueError, match="pass deterministic=True or False"):
        apply(params, x)
    _, fixed = system.make(system.ours, x, jax.random.key(0), dropout_rate=0.5, deterministic=True)
    np.testing.assert_array_equal(fixed(params, x), off)
    on = [apply(params, x, deterministic=False, dropout=key) for _ in range(2)]
    assert relative(on[0], off) > 0.01
    np.testing.assert_array_equal(*on)
    if system is LINEN:
        by_argument = functools.partial(apply, params, x, deterministic=False, dropout_rng=key)
        np.testing.assert_array_equal(by_argument(), by_argument(dropout=jax.random.key(9)))
        with pytest.raises(flax.errors.InvalidRngError):
            apply(params, x, deterministic=False)
    else:
        options = {"dropout_rate": 0.5, "deterministic": False}
        module = jattn.nnx.MultiHeadAttention(N, M, **options, rngs=nnx.Rngs(0, dropout=1))
        assert relative(module(x), module(x)) > 0.01, "the stream must advance"
        module = jattn.nnx.MultiHeadAttention(N, M, **options, keep_rngs=False, rngs=nnx.Rngs(0))
        with pytest.raises(ValueError, match="dropout needs a random key"):
            module(x)


@pytest.mark.slow_except("linen")
@SYSTEMS
def test_a_function_of_the_users_gets_flaxs_keywords(system):
    x, x_kv = inputs()
    seen = {}

    def record(library, query, key, value, **keywords):
        seen[library] = {name for name in keywords if name != "kwargs"}
        return system.theirs.dot_product_attention(query, key, value, **keywords)

    if system is LINEN:  # Flax passes the keywords in the function's signature

        def named(library):
            def fn(query, key, value, mask=None, dropout_rng=None, dropout_rate=0.0, broadcast_dropout=True,
                   deterministic=False, dtype=None, precision=None, force_fp32_for_softmax=False,
                   qk_attn_weights_einsum=None, attn_weights_value_einsum=None):  # fmt: skip
                arguments = dict(locals())
                del arguments["record"], arguments["library"]  # of the enclosing functions
                return record(library, **arguments)

            return fn
    else:
        named = lambda library: functools.partial(record, library)
    results = []
    with flaxs_promotion():
        for library in (system.ours, system.theirs):
            params, apply = system.make(library, x, jax.random.key(0), attention_fn=named(library))
            results.append(apply(params, x, x_kv, mask=jnp.ones((B, 1, T, S))))
        np.testing.assert_array_equal(*results)
        assert seen[system.ours] == seen[system.theirs]
        params, apply = system.make(system.ours, x, jax.random.key(0), attention_fn=named(system.ours))
        with pytest.raises(ValueError, match="head_gate: only jattn's own attention_fn takes them"):
            apply(params, x, head_gate=jnp.ones(N))


@pytest.mark.slow
@SYSTEMS
def test_flaxs_modules_with_jattns_attention_fn(system):
    """The simplest way to use jattn: models keep their layers and sown weights, and gain the options in ``partial``."""
    x, x_kv = inputs()
    ours = system.ours.dot_product_attention
    mask = jnp.asarray(np.random.default_rng(1).random((B, 1, T, S)) < 0.6).at[:, :, :, 0].set(True)
    with flaxs_promotion():
        params, plain = system.make(system.theirs, x, jax.random.key(0))
        _, upgraded = system.make(system.theirs, x, jax.random.key(0), attention_fn=ours)
        for call in ({}, {"mask": mask}):
            results = (run(params, x, x_kv, sow_weights=True, **call) for run in (upgraded, plain))
            for got, expected in zip(*results, strict=True):
                assert relative(got, expected) < 1e-6
        options = {"position": jattn.positions.Rotary(fraction=1.0), "score_mod": jattn.score_mods.SoftCap(2.0)}
        capped = functools.partial(ours, **options, is_causal=True)
        if system is LINEN:  # Flax's Linen module looks keywords up in the signature, which partial keeps
            _, upgraded = system.make(system.theirs, x, jax.random.key(0), attention_fn=capped)
            _, whole = system.make(system.ours, x, jax.random.key(0), **options)
            assert relative(upgraded(params, x), whole(params, x, is_causal=True)) < 1e-6


def test_quantised_products_go_to_flax():
    """``qk_attn_weights_einsum_cls`` and similar options are used, not ignored."""
    x, _ = inputs()
    calls = []

    def factory():
        def einsum(formula, a, b):
            calls.append(formula)
            return jnp.einsum(formula, a, b)

        return einsum

    options = {"qk_attn_weights_einsum_cls": factory, "attn_weights_value_einsum_cls": factory}
    with flaxs_promotion():
        params, apply = LINEN.make(jattn.linen, x, jax.random.key(0), **options)
        calls.clear()
        got = apply(params, x)
        assert len(calls) == 2 and relative(got, LINEN.make(linen, x, jax.random.key(0))[1](params, x)) < 1e-6
        with pytest.raises(ValueError, match="head_gate: only jattn's own"):
            apply(params, x, head_gate=jnp.ones(N))


@pytest.mark.slow_except("nnx")
@SYSTEMS
def test_a_dot_general_of_the_users_is_used(system):
    x, _ = inputs()
    count = []

    def dot_general(*args, **kwargs):
        count.append(1)
        return jax.lax.dot_general(*args, **kwargs)

    options = {"qkv_dot_general": dot_general, "out_dot_general": dot_general}
    params, apply = system.make(system.ours, x, jax.random.key(0), **options)
    count.clear()
    apply(params, x)
    assert len(count) == 4


@SYSTEMS
def test_what_the_modules_sow_is_no_keyword_of_attention_fn(system):
    x = jnp.ones((1, 2, 1, 2))
    for name in ("sow_statistics", "sow_weights", "in_float32"):
        with pytest.raises(TypeError, match=f"^unexpected keyword argument '{name}'"):
            system.ours.dot_product_attention(x, x, x, **{name: True})
