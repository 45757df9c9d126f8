"""Checkpoints in jattn's modules: tiny random models, against the formulas in float64."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn import interop, masks
from tests.reference.models import Model, shapes
from tests.soak import files

RNG = np.random.default_rng(0)
VOCABULARY, LENGTH, LAYERS, HEADS, WIDTH, INNER = 19, 11, 2, 3, 12, 20
GPT2 = {
    "model_type": "gpt2", "n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "n_inner": INNER, "vocab_size": VOCABULARY,
    "n_positions": LENGTH, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
}  # fmt: skip
BERT = {
    "model_type": "bert", "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "hidden_size": WIDTH,
    "intermediate_size": INNER, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "type_vocab_size": 2,
    "layer_norm_eps": 1e-12, "hidden_act": "gelu",
}  # fmt: skip
TOKENS = RNG.integers(0, VOCABULARY, (3, 7))


@nnx.jit
def run(model, tokens, **options):
    return model(tokens, **options)


def random(*shape):
    return RNG.normal(size=shape, scale=0.4).astype(np.float32)


def random_tensors(config):
    """By their published names, and ``[out,in]``."""
    norm = lambda name, size: len(size) == 1 and name.endswith("weight")
    return {name: random(*size) + np.float32(norm(name, size)) for name, size in shapes(config).items()}


def gpt2_tensors():
    """Tensors as saved by Hugging Face: Conv1D weights ``[in,out]``; query, key and value fused."""
    return transposed(random_tensors(GPT2))


def bert_tensors():
    """Tensors as saved by Hugging Face: Linear weights ``[out,in]``; separate projections; without a pooler."""
    return {name: x for name, x in random_tensors(BERT).items() if "pooler" not in name}


def gpt2_reference(tensors, tokens):
    w = {name: x.astype(np.float64) for name, x in transposed(tensors).items()}
    return Model(GPT2, w, np.ones(tokens.shape, bool)).gpt2(tokens)


def bert_reference(tensors, tokens, valid, num_layers=LAYERS, num_heads=HEADS):
    w = {name: x.astype(np.float64) for name, x in tensors.items()}
    width = w["embeddings.word_embeddings.weight"].shape[1]
    sizes = {"num_hidden_layers": num_layers, "num_attention_heads": num_heads, "hidden_size": width}
    return Model(BERT | sizes, w, valid).bert(tokens, np.zeros_like(tokens))


def transposed(tensors):
    """The same GPT-2 with Linear weights ``[out,in]`` for Conv1D weights ``[in,out]``, and the other way round."""
    return {name: x.T.copy() if x.ndim == 2 and name.startswith("h.") else x for name, x in tensors.items()}


def make_tile_function(tensors, axis):
    """Splits the fused projection into three."""
    separate = {}
    for name, x in tensors.items():
        if ".c_attn." in name:
            parts = np.split(x, 3, axis=axis if x.ndim == 2 else 0)
            separate |= {name.replace("c_attn", f"{one}_proj"): part for one, part in zip("qkv", parts, strict=True)}
        else:
            separate[name] = x
    return separate


def with_head(tensors):
    """As saved by a language model with tied output embeddings, including masks."""
    mask = {f"transformer.h.{i}.attn.bias": np.tril(np.ones((1, 1, LENGTH, LENGTH), bool)) for i in range(LAYERS)}
    named = {f"transformer.{name}": x for name, x in tensors.items()}
    return named | mask | {"lm_head.weight": tensors["wte.weight"]}


LAYOUTS = {
    "Conv1D, fused": lambda tensors: tensors,
    "Conv1D, separate": lambda tensors: make_tile_function(tensors, 1),
    "Linear, fused": transposed,
    "Linear, separate": lambda tensors: make_tile_function(transposed(tensors), 0),
    "with its head": with_head,
}


@pytest.fixture(scope="module")
def tiny_gpt2():
    return gpt2_tensors()


@pytest.mark.slow_except("Linear, separate", "with its head")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpt2_in_every_layout(tiny_gpt2, layout):
    model = interop.from_tensors(LAYOUTS[layout](tiny_gpt2), GPT2)
    expected = gpt2_reference(tiny_gpt2, TOKENS)
    hidden = run(model, TOKENS)
    result = nnx.jit(lambda model, hidden: model.logits(hidden))(model, hidden)
    np.testing.assert_allclose(hidden, expected, atol=2e-5)
    logits = expected @ tiny_gpt2["wte.weight"].astype(np.float64).T
    np.testing.assert_allclose(result, logits, atol=1e-4)
    assert (model.head is not None) == (layout == "with its head")


@pytest.mark.slow
def test_bert(tmp_path):
    """From a folder, with separate projections, a prefix, TensorFlow's norm names and a pooler; ignores padding."""
    from safetensors.numpy import save_file

    tensors = bert_tensors()
    pooler = {"pooler.dense.weight": random(WIDTH, WIDTH), "pooler.dense.bias": random(WIDTH)}
    saved_as = lambda name: f"bert.{name}".replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")
    renamed = {saved_as(name): x for name, x in (tensors | pooler).items()}
    renamed |= {"bert.embeddings.position_ids": np.arange(LENGTH)[None], "cls.predictions.bias": random(VOCABULARY)}
    half = dict(list(renamed.items())[:9])
    save_file(half, tmp_path / "model-00001-of-00002.safetensors")
    rest = {name: x for name, x in renamed.items() if name not in half}
    save_file(rest, tmp_path / "model-00002-of-00002.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(BERT))
    model = interop.load(tmp_path, ignore=["cls."])
    valid = np.arange(7)[None, :] < np.array([7, 4, 1])[:, None]
    hidden = model(TOKENS, valid=valid)
    expected = bert_reference(tensors, TOKENS, valid)
    np.testing.assert_allclose(np.asarray(hidden)[valid], expected[valid], atol=2e-5)
    pooled = np.tanh(expected[:, 0] @ pooler["pooler.dense.weight"].T + pooler["pooler.dense.bias"])
    np.testing.assert_allclose(model.pooled(hidden), pooled, atol=2e-5)
    assert interop.load(tmp_path, ignore=["cls."], dtype=jnp.bfloat16).token_embed.embedding[...].dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_checkpoint_of_16_bits(tmp_path, tiny_gpt2, dtype):
    from safetensors.flax import save_file

    rounded = {name: jnp.asarray(x.astype(dtype)) for name, x in tiny_gpt2.items()}
    save_file(rounded, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    expected = gpt2_reference({name: np.asarray(x, np.float32) for name, x in rounded.items()}, TOKENS)
    np.testing.assert_allclose(run(interop.load(tmp_path), TOKENS), expected, atol=2e-5)


def test_bert_with_fused_projections_and_other_token_types():
    tensors = bert_tensors()
    fused = {name: x for name, x in tensors.items() if "attention.self" not in name}
    for i in range(LAYERS):
        for part in ("weight", "bias"):
            parts = [tensors[f"encoder.layer.{i}.attention.self.{name}.{part}"] for name in ("query", "key", "value")]
            fused[f"encoder.layer.{i}.attention.self.qkv.{part}"] = np.concatenate(parts)
    model = interop.from_tensors(fused, BERT)
    valid = np.ones(TOKENS.shape, bool)
    np.testing.assert_allclose(model(TOKENS), bert_reference(tensors, TOKENS, valid), atol=2e-5)
    tensors["embeddings.token_type_embeddings.weight"] = tensors["embeddings.token_type_embeddings.weight"][::-1]
    other = model(TOKENS, token_types=np.ones_like(TOKENS))
    np.testing.assert_allclose(other, bert_reference(tensors, TOKENS, valid), atol=2e-5)
    with pytest.raises(ValueError, match="no pooler"):
        model.pooled(other)


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_norms_of_a_stream_with_a_large_mean(tiny_gpt2, family):
    """The variance is not a difference of squares, which at a mean of 1000 leaves no digit."""
    tensors, config = (dict(tiny_gpt2), GPT2) if family == "gpt2" else (bert_tensors(), BERT)
    name = "wte.weight" if family == "gpt2" else "embeddings.word_embeddings.weight"
    tensors[name] = tensors[name] + np.float32(1000)
    valid = np.ones(TOKENS.shape, bool)
    expected = gpt2_reference(tensors, TOKENS) if family == "gpt2" else bert_reference(tensors, TOKENS, valid)
    # The sum of embeddings is rounded to 2^-14, and layers carry that on. A difference of squares is off by more than 1.
    np.testing.assert_allclose(interop.from_tensors(tensors, config)(TOKENS), expected, atol=0.02)


def test_gpt2_without_an_output_embedding(tiny_gpt2):
    model = interop.from_tensors(tiny_gpt2, GPT2 | {"tie_word_embeddings": False})
    for use in (lambda: model.logits(jnp.ones((1, WIDTH))), model.output_embedding):
        with pytest.raises(ValueError, match="no output embedding"):
            use()
    head = random(VOCABULARY, WIDTH)
    untied = interop.from_tensors(tiny_gpt2 | {"lm_head.weight": head}, GPT2 | {"tie_word_embeddings": False})
    np.testing.assert_array_equal(untied.output_embedding(), head)


@nnx.jit
def of_tables(model, ids):
    """What the ids give in each table, with all tokens valid and with those of id 0."""
    embed, tokens = functools.partial(model._embedded, cache=None), jnp.asarray(np.arange(5)[None])
    calls = (
        functools.partial(embed, ids, token_types=None, positions=None),
        functools.partial(embed, tokens, token_types=ids, positions=None),
        functools.partial(embed, tokens, token_types=None, positions=ids[0]),
    )
    return [(call(valid=None), call(valid=ids == 0)) for call in calls]


@pytest.mark.parametrize("index", [-(2**31), -VOCABULARY, -1, VOCABULARY, 2**31 - 1])
def test_ids_outside_of_their_table_give_nan(index):
    model = interop.from_tensors(bert_tensors(), BERT)
    for of_all, of_real in of_tables(model, np.array([[0, 0, index, 0, 0]], np.int32)):
        assert np.isnan(np.asarray(of_all)[0]).all(1).tolist() == [False, False, True, False, False]
        assert np.isfinite(of_real).all()  # of padding


def test_padding_may_have_any_id(tiny_gpt2):
    model, valid = interop.from_tensors(tiny_gpt2, GPT2), np.arange(7) < np.array([[7], [4], [1]])
    results = jax.device_get([run(model, np.where(valid, TOKENS, index), valid=valid) for index in (0, -1, 100)])
    np.testing.assert_array_equal(*(np.where(valid[..., None], x, 0) for x in results[:2]))
    np.testing.assert_array_equal(*(np.where(valid[..., None], x, 0) for x in results[1:]))
    assert np.isfinite(results[1:]).all()
    assert np.isnan(np.asarray(run(model, np.where(valid, TOKENS, -1)))[1, 4:]).all()
    np.testing.assert_array_equal(run(model, TOKENS.astype(np.int8), valid=valid), run(model, TOKENS, valid=valid))


def test_every_tensor_that_does_not_fit_is_named(tiny_gpt2):
    wrong = dict(tiny_gpt2)
    del wrong["h.1.ln_2.bias"], wrong["wpe.weight"]
    wrong |= {"h.0.attn.c_attn.weight": random(WIDTH, 3 * WIDTH + 1), "h.0.mlp.c_proj.bias": random(WIDTH + 2)}
    wrong |= {"h.2.ln_1.weight": random(WIDTH), "score.weight": random(2, WIDTH)}
    with pytest.raises(ValueError) as caught:
        interop.from_tensors(wrong, GPT2)
    lines = str(caught.value).splitlines()[1:]
    assert lines[0] == "missing: layers.1.mlp_norm.bias, position_embed.embedding"
    assert lines[1] == "left over: h.2.ln_1.weight, score.weight"
    assert lines[2] == (
        f"of another shape: h.0.attn.c_attn.weight is [{WIDTH}, {3 * WIDTH + 1}], expected [{WIDTH}, {3 * WIDTH}], "
        f"h.0.mlp.c_proj.bias is [{WIDTH + 2}], expected [{WIDTH}]"
    )


@pytest.mark.parametrize("change, message", [
    ({"model_type": "t5"}, "model_type must be one of bert, gpt2, gpt_neox, llama, mistral, qwen2, qwen3, .*gemma3, got 't5'"),
    ({"n_head": None}, "has no n_head"),
    ({"activation_function": "swish2"}, "activation_function"),
    ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
])  # fmt: skip
def test_configs_that_it_does_not_know(tiny_gpt2, change, message):
    config = {key: value for key, value in (GPT2 | change).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        interop.from_tensors(tiny_gpt2, config)


def test_folders_that_hold_no_model(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        interop.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    with pytest.raises(FileNotFoundError, match="safetensors"):
        interop.load(tmp_path)


def test_an_index_says_which_files_hold_the_model(tmp_path):
    """As transformers reads a folder: one whole file first, then those of the index; others beside them are not read."""
    from safetensors.numpy import save_file

    def shards(**changes):
        names, half = list(tensors), len(tensors) // 2
        for i, part in enumerate((names[:half], names[half:])):
            save_file({name: tensors[name] for name in part}, tmp_path / f"part-{i}.safetensors")
        where = {name: f"part-{int(i >= half)}.safetensors" for i, name in enumerate(names)} | changes
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))

    tensors = gpt2_tensors()
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    save_file({name: x + 1 for name, x in tensors.items()}, tmp_path / "consolidated.safetensors")
    shards()
    embedding = lambda: np.asarray(interop.load(tmp_path).token_embed.embedding[...])
    np.testing.assert_array_equal(embedding(), tensors["wte.weight"])
    shards(**{"wte.weight": "part-9.safetensors"})
    with pytest.raises(FileNotFoundError, match=r"index\.json names files that do not exist: part-9\.safetensors"):
        interop.load(tmp_path)
    shards(other="part-0.safetensors")
    with pytest.raises(ValueError, match=r"names tensors that are not in the files it says: other"):
        interop.load(tmp_path)
    for name in ("../part-0.safetensors", "config.json", 3):
        shards(**{"wte.weight": name})
        with pytest.raises(ValueError, match="weight_map from tensors to names of files in the same folder"):
            interop.load(tmp_path)
    save_file({name: x + 2 for name, x in tensors.items()}, tmp_path / "model.safetensors")
    np.testing.assert_array_equal(embedding(), tensors["wte.weight"] + 2)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds an adapter \(adapter_config\.json\)"):
        interop.load(tmp_path)


@pytest.mark.slow
def test_valid_joins_any_mask_and_layers_have_options_of_their_own():
    model, tokens = interop.from_tensors(bert_tensors(), BERT), np.arange(10).reshape(2, 5) % VOCABULARY
    valid, window = np.array([[True] * 5, [True] * 3 + [False] * 2]), np.tri(5, dtype=bool)
    run = lambda **options: nnx.jit(lambda model: model(tokens, valid=valid, **options))(model)
    plain, by_array, by_mask = run(), run(mask=window[None, None]), run(mask=masks.Causal())
    assert not np.allclose(plain, by_array, atol=1e-3)
    np.testing.assert_allclose(by_array, by_mask, atol=1e-5)
    short = model(tokens[1:, :3], mask=window[None, None, :3, :3])
    np.testing.assert_allclose(by_mask[1:, :3], short, atol=1e-5)
    layers = [{"mask": masks.Causal()}] * LAYERS
    np.testing.assert_allclose(run(per_layer=layers), by_mask, atol=1e-6)
    with pytest.raises(ValueError, match=rf"per_layer must have options for each of {LAYERS} layers, got 1"):
        model(tokens, per_layer=[{}])


@pytest.mark.parametrize("tokens", [np.zeros((1, LENGTH + 1), int), np.zeros(3, int), np.zeros((1, 3))])
def test_tokens_of_another_shape(tiny_gpt2, tokens):
    with pytest.raises(ValueError, match=rf"integers \[B, T\] with T at most {LENGTH}"):
        interop.from_tensors(tiny_gpt2, GPT2)(tokens)


def test_gpt2_beside_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", reason="compared where PyTorch and transformers are installed")
    torch = pytest.importorskip("torch")
    config = transformers.GPT2Config(**{name: value for name, value in GPT2.items() if name != "model_type"})
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path)
    ours = interop.load(tmp_path)
    with torch.no_grad():
        logits = theirs(torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(ours.logits(ours(TOKENS)), logits, atol=1e-5)


def test_damaged_files_end_in_one_error(tmp_path):
    """A few draws of ``python -m tests.soak --mode files``: headers of 2^60, overlaps, truncation, flipped bytes."""
    results = [files.load_checkpoint(tmp_path, np.random.default_rng([0, number])) for number in range(60)]
    assert [wrong for _, wrong in results if wrong] == []
    assert {outcome for outcome, _ in results} <= {"loaded", "ValueError"}


def test_one_tensor_in_two_files(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").write_bytes(files.packed(*files.whole()))
    (tmp_path / "config.json").write_text(json.dumps(files.CONFIG))
    with pytest.raises(ValueError, match=r"b\.safetensors and .*a\.safetensors both hold h\.0\."):
        interop.load(tmp_path)
