"""``jattn.report``: every form of heads gives the page of the same weights, and bad input a clear error."""

import base64
import contextlib
import functools
import re
import resource
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from tokenizers import Tokenizer as Tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

import jattn
from jattn import heads, reports
from jattn.interop._tokenizer import token_labels
from jattn.reports import _kept_weights, _matching, _pack_weights
from jattn.reports._head_report import _reports
from tests.reference.tokenizer import byte_names
from tests.web_page import embedded, weights_of

L, B, T, N, K, H = 2, 2, 7, 4, 2, 5
WORDS = ["the", "cat", "</script>", "sat", "<b>", "the", "cat"]


def qk(seed=0, K=K, T=T, S=T):
    """``{layer name: (query, key)}`` with grouped queries."""
    keys = jax.random.split(jax.random.key(seed), 2 * L)
    shapes = [(B, T, N, H), (B, S, K, H)] * L
    arrays = [2 * jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]
    return {f"layer {i}": (arrays[2 * i], arrays[2 * i + 1]) for i in range(L)}


def dense(layers, **options):
    """``[B,L*N,T,S]``, by the formula."""
    return np.concatenate([jattn.attention_weights(q, k, **options) for q, k in layers.values()], 1)


@pytest.fixture(scope="module")
def causal():
    return jattn.report(qk(), [WORDS, WORDS[:4]], is_causal=True, title="a <title>")


def test_the_page_has_the_weights_and_the_words(causal):
    weights = dense(qk(), is_causal=True)
    np.testing.assert_allclose(weights_of(causal.html, 0, 0), weights[0], atol=2e-5)
    np.testing.assert_allclose(weights_of(causal.html, 1, 0), weights[1, :, :4, :4], atol=2e-5)  # without padding
    data = embedded(causal.html)
    assert [view["queries"] for view in data["views"]] == [WORDS, WORDS[:4]]
    assert [view["name"] for view in data["views"]][1] == "2: the cat </script> sat"
    assert [head["code"] for head in data["heads"]] == [f"L{layer}H{head}" for layer in range(L) for head in range(N)]


@pytest.mark.slow
def test_statistics_are_means_over_all_queries(causal):
    layers = list(qk().values())
    eligible = np.arange(T) < np.array([[7], [4]])
    tokens = np.array([[0, 1, 2, 3, 4, 0, 1], [0, 1, 2, 3, -1, -1, -1]])
    statistics = [heads.statistics(q, k, tokens=tokens, eligible=eligible, is_causal=True) for q, k in layers]
    statistics = jax.tree.map(np.asarray, statistics)
    for name in ("entropy", "previous_token", "induction"):
        sums = np.concatenate([(one[name] * one["support"][name]).sum(0) for one in statistics])
        counts = np.concatenate([one["support"][name].sum(0) for one in statistics])
        np.testing.assert_allclose(causal.numbers[name], sums / counts, rtol=1e-5)
    data = embedded(causal.html)
    shown = data["numbers"][0]["values"][data["columns"].index("entropy")]
    np.testing.assert_allclose(shown, causal.numbers["entropy"], rtol=1e-3)


def test_the_page_stands_alone_and_escapes_its_text(causal):
    page = causal.html
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]*\b(?:src|href)=(?!\"data:,\")", page)
    assert set(re.findall(r"https?://[^\"'\s)]+", page)) == {"http://www.w3.org/2000/svg"}
    assert page.count("</script>") == page.count("<script") and "{{" not in page
    assert "<title>a &lt;title&gt;</title>" in page and "default-src 'none'" in page


def test_a_report_is_saved_and_shows_itself_in_a_frame(causal, tmp_path):
    again = jattn.report(qk(), [WORDS, WORDS[:4]], tmp_path / "heads.html", is_causal=True, title="a <title>")
    assert (tmp_path / "heads.html").read_text(encoding="utf-8") == again.html == causal.html
    assert causal.save(tmp_path / "other.html").read_bytes() == (tmp_path / "heads.html").read_bytes()
    frame = causal._repr_html_()
    assert frame.startswith('<iframe title="a &lt;title&gt;" sandbox="allow-scripts allow-downloads"')
    assert "<script" not in frame  # all of it is in the attribute
    assert repr(causal) == "Report('a <title>', 8 heads, 2 sequences)"


def test_a_failed_write_leaves_the_old_page(causal, tmp_path):
    """As on a full disk: the file system takes the first 4096 bytes."""
    page = tmp_path / "heads.html"
    page.write_text("old")
    page.chmod(0o600)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            causal.save(page)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert page.read_text() == "old" and list(tmp_path.iterdir()) == [page]
    (tmp_path / "link.html").symlink_to(page)
    causal.save(tmp_path / "link.html")
    assert page.read_text(encoding="utf-8") == causal.html and page.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "link.html").is_symlink() and len(list(tmp_path.iterdir())) == 2
    assert causal.save("/dev/null").is_char_device()


def test_the_place_of_the_file_is_looked_at_first(monkeypatch, tmp_path):
    monkeypatch.setattr("jattn.reports._head_report.look", None)  # the work
    with pytest.raises(FileNotFoundError, match=r"path is in a folder that does not exist: .*missing'"):
        jattn.report(qk(), path=tmp_path / "missing" / "x.html")
    with pytest.raises(IsADirectoryError, match="path must be a file, but is a folder"):
        jattn.report(qk(), path=str(tmp_path))


class Tensor:
    """As of PyTorch: NumPy reads none with a gradient, on an accelerator or in bfloat16."""

    def __init__(self, array, dtype="torch.float32", device="cpu", grad=False):
        self.array, self.dtype, self.device, self.grad = array, dtype, device, grad
        self.shape, self.ndim = array.shape, array.ndim

    def change(self, **changes):
        state = {"dtype": self.dtype, "device": self.device, "grad": self.grad}
        return Tensor(self.array, **(state | changes))

    def detach(self):
        return self.change(grad=False)

    def cpu(self):
        return self.change(device="cpu")

    def float(self):
        return self.change(dtype="torch.float32")

    def is_floating_point(self):
        return "float" in self.dtype

    def tolist(self):
        return self.array.tolist()

    def __len__(self):
        return len(self.array)

    def __getitem__(self, i):
        return Tensor(self.array[i], self.dtype, self.device, self.grad)

    def __array__(self, dtype=None, copy=None):
        if self.grad:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        if self.device != "cpu":
            raise TypeError(f"can't convert {self.device} device type tensor to numpy.")
        if self.dtype == "torch.bfloat16":
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self.array if dtype is None else self.array.astype(dtype)


class Exchanged:
    """An array that is read by DLPack only."""

    def __init__(self, array):
        self.shape, self.ndim = array.shape, array.ndim
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


TENSORS = {
    "PyTorch": Tensor,
    "with a gradient": functools.partial(Tensor, grad=True),
    "on an accelerator": functools.partial(Tensor, device="cuda:0", grad=True),
    "bfloat16": functools.partial(Tensor, dtype="torch.bfloat16", grad=True),
    "DLPack": Exchanged,
}


@pytest.mark.slow_except("bfloat16")
@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_tensors_of_other_libraries_are_read(tensor):
    """As transformers gives them: a tuple of weights [B,N,T,S], one for each layer; and in every other place."""
    weights = np.random.default_rng(0).dirichlet(np.ones(T), (L, B, N, T)).astype(np.float32)
    ids = np.arange(B * T).reshape(B, T)
    like_ids = Tensor(ids, "torch.int64", "cuda:0")
    for form in (tuple(map(tensor, weights)), tensor(weights), {"a": tensor(weights[0]), "b": tensor(weights[1])}):
        report = jattn.report(form, like_ids)
        np.testing.assert_allclose(report.looked.weights, np.moveaxis(weights, 0, 1).reshape(B, L * N, T, T), atol=1e-6)
        assert report.queries == jattn.report(weights, ids).queries == [[str(i) for i in row] for row in ids]
    layers = {name: tuple(map(tensor, map(np.asarray, layer))) for name, layer in qk().items()}
    report = jattn.report(layers, list(like_ids), is_causal=True)
    np.testing.assert_allclose(report.looked.weights, dense(qk(), is_causal=True), atol=1e-6)


class Ours(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([jattn.nnx.MultiHeadAttention(N, N * H, num_kv_heads=K, rngs=rngs) for _ in range(L)])

    def __call__(self, x, **options):
        for layer in self.layers:
            x = x + layer(x, is_causal=True, **options)
        return x


class Flaxs(nnx.Module):
    """Flax's own modules with our function between the projections."""

    def __init__(self, rngs):
        attention_fn = functools.partial(jattn.nnx.dot_product_attention, sow_heads=True)
        make = functools.partial(nnx.MultiHeadAttention, N, N * H, decode=False, attention_fn=attention_fn, rngs=rngs)
        self.layers = nnx.List([make() for _ in range(L)])

    def __call__(self, x, **options):
        for layer in self.layers:
            x = x + layer(x, mask=nnx.make_causal_mask(x[..., 0]), **options)
        return x


class Linens(linen.Module):
    attention: type = jattn.linen.MultiHeadDotProductAttention

    @linen.compact
    def __call__(self, x, **options):
        for _ in range(L):
            x = x + self.attention(num_heads=N)(x, mask=linen.make_causal_mask(x[..., 0]), **options)
        return x


def sown_by(model, x, **options):
    return nnx.capture(lambda model: model(x, **options), nnx.Intermediate)(model)[1]


@pytest.mark.slow
def test_what_models_sow_is_read():
    """From queries and keys as from the weights that the same model sows."""
    x = jax.random.normal(jax.random.key(1), (B, T, N * H))
    ours, flaxs, linens = Ours(nnx.Rngs(0)), Flaxs(nnx.Rngs(0)), Linens()
    variables = linens.init(jax.random.key(0), x)
    _, by_linen = linens.apply(variables, x, sow_heads=True, mutable=["intermediates"])
    _, weights = linens.apply(variables, x, sow_weights=True, mutable=["intermediates"])
    pairs = [(sown_by(ours, x, sow_heads=True), sown_by(ours, x, sow_weights=True)), (by_linen["intermediates"], weights["intermediates"])]  # fmt: skip
    for sown, expected in pairs:
        dense_weights = np.concatenate([np.asarray(one) for one in heads.collect(expected, "attention_weights")], 1)
        for form in (sown, heads.collect(sown), expected):
            report = jattn.report(form, is_causal=form is not expected)
            np.testing.assert_allclose(weights_of(report.html, 1, 0), dense_weights[1], atol=2e-5)
    sown = sown_by(flaxs, x, sow_weights=True)  # so Flax's module passes itself on
    assert heads.collect(sown)[0].keys() >= {"query", "key", "lse"}
    dense_weights = dense({i: (one["query"], one["key"]) for i, one in enumerate(heads.collect(sown))}, is_causal=True)
    report = jattn.report(sown, is_causal=True)
    np.testing.assert_allclose(weights_of(report.html, 0, 0), dense_weights[0], atol=2e-5)


@pytest.mark.slow
def test_a_layer_has_options_of_its_own():
    layers = qk()
    (q0, k0), (q1, k1) = layers.values()
    window = jattn.masks.SlidingWindow(1, 0)
    model = {"near": {"query": q0, "key": k0, "mask": window, "scale": 0.3, "z": None, "value": None}, "far": (q1, k1)}
    report = jattn.report(model, scale=0.5)
    shown = weights_of(report.html, 0, 0)
    np.testing.assert_allclose(shown[:N], jattn.attention_weights(q0, k0, mask=window, scale=0.3)[0], atol=2e-5)
    np.testing.assert_allclose(shown[N:], jattn.attention_weights(q1, k1, scale=0.5)[0], atol=2e-5)
    assert [head.code for head in report.heads][::N] == ["nearH0", "farH0"]


@pytest.mark.parametrize("lead", [(N,), (L, N), pytest.param((L, B, N), marks=pytest.mark.slow)])
def test_weights_are_read_as_they_are(lead):
    weights = np.random.default_rng(0).random((*lead, 3, 4)).astype(np.float32)
    weights[..., 0, :] = 0  # a query that sees nothing
    weights[..., 1, 2] = 0
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-9) * 1.25  # a sink takes the rest
    report = jattn.report(weights, ["a", "b", "c"] if len(lead) < 3 else [["a", "b", "c"]] * B, key_tokens=None)
    by_layer = weights.reshape(*{1: (1, 1, N), 2: (L, 1, N), 3: lead}[len(lead)], 3, 4)  # [L,B,N,T,S]
    np.testing.assert_allclose(weights_of(report.html, 0, 0), by_layer[:, 0].reshape(-1, 3, 4), atol=2e-5)
    assert embedded(report.html)["views"][0]["cross"]
    largest = by_layer[0, :, 0, 1:].max(-1).mean()
    np.testing.assert_allclose(report.numbers["max_weight"][0], largest, rtol=1e-5)


def test_two_texts_are_shown_apart():
    report = jattn.report(qk(S=3), [WORDS] * B, key_tokens=[["le", "chat", "noir"]] * B)
    view = embedded(report.html)["views"][0]
    assert (view["cross"], view["queries"], view["keys"]) == (True, WORDS, ["le", "chat", "noir"])
    assert "previous_token" not in report.numbers and "entropy" in report.numbers


class Tokenizer:
    """Of byte-level pairs: decoding alone drops the space that the name has."""

    def decode(self, ids, skip_special_tokens=True):
        return {0: "" if skip_special_tokens else "<s>", 1: "cat", 2: "\n"}[ids[0]]

    def id_to_token(self, i):
        return {0: "<s>", 1: "\u0120cat", 2: "\u010a"}[i]


def test_ids_become_text():
    ids = np.array([[0, 1, 2, 1, 1, 1, 1]] * B)
    report = jattn.report(qk(), ids, tokenizer=Tokenizer(), is_causal=True)
    assert report.queries[0][:4] == ["<s>", " cat", "↵", " cat"]
    assert jattn.report(qk(), jnp.asarray(ids), is_causal=True).queries[0][:2] == ["0", "1"]
    assert jattn.report(qk(), is_causal=True).queries[0] == [str(i) for i in range(T)]


def by_bytes(*merges):
    """Of byte-level pairs, as GPT-2's; the ids of single bytes are their own."""
    names = [*byte_names(), *map("".join, merges)]
    tokenizer = Tokenizers(models.BPE({name: i for i, name in enumerate(names)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def with_fallback():
    """As Llama's: what has no token of its own is bytes."""
    names = ["<unk>", "▁", "c", "a", "▁c", "▁ca", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = models.BPE({name: i for i, name in enumerate(names)}, [("▁", "c"), ("▁c", "a")], unk_token="<unk>", byte_fallback=True)  # fmt: skip
    tokenizer = Tokenizers(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])  # fmt: skip
    return tokenizer


class Transformers:
    """The interface of transformers' tokenizers, which have an id for what they do not know."""

    def __init__(self, tokenizer):
        self.tokenizer, self.decode, self.convert_ids_to_tokens = tokenizer, tokenizer.decode, tokenizer.id_to_token

    def convert_tokens_to_ids(self, name):
        i = self.tokenizer.token_to_id(name)
        return 0 if i is None else i


class Nameless:
    """Decodes and can do nothing else."""

    def decode(self, ids, skip_special_tokens=True):
        return bytes(ids).decode(errors="replace")


PARTS = {
    "a token a byte": (by_bytes(), "a é猫😀", "a| |é₁|é₂|猫₁|猫₂|猫₃|😀₁|😀₂|😀₃|😀₄"),
    "merged across": (
        by_bytes(("Ġ", "ç"), ("«", "ð"), ("e", "Ì")),
        " 猫😀e\u0301",
        " 猫₁|猫₂|猫₃😀₁|😀₂|😀₃|😀₄|e\u0301₁|\u0301₂",
    ),
    "cut at both ends": (by_bytes(), b"\x8c\xab\xe7\x8c\xab\xe7\x8c", "<0x8C>|<0xAB>|猫₁|猫₂|猫₃|<0xE7>|<0x8C>"),
    "a replacement character": (by_bytes(("ï", "¿"), ("ï¿", "½")), "\ufffd\n", "\ufffd|↵"),
    "byte fallback": (with_fallback(), "ca 猫\ufffd", " ca| |猫₁|猫₂|猫₃|\ufffd₁|\ufffd₂|\ufffd₃"),
    "no names": (Nameless(), "a猫".encode(), "a|<token 231>|<token 140>|<token 171>"),
}


@pytest.mark.parametrize(("tokenizer", "text", "expected"), PARTS.values(), ids=PARTS)
def test_parts_of_a_character_are_told_apart(tokenizer, text, expected):
    ids = list(text) if isinstance(text, bytes) else tokenizer.encode(text).ids
    assert token_labels("tokens", [ids, ids[::-1]], tokenizer)[0] == expected.split("|")
    if not isinstance(tokenizer, Nameless):  # the strings that encode(text).tokens has
        for one in (tokenizer, Transformers(tokenizer)):
            names = [tokenizer.id_to_token(i) for i in ids]
            assert token_labels("tokens", [[*names, "its", "words"]], one)[0] == [*expected.split("|"), "its", "words"]


def test_a_report_has_the_text_of_byte_level_tokens():
    """In two orders the same ids are other characters: E7 8C AB is 猫, E7 AB 8C is 竌."""
    ids = np.array([*"猫竌a".encode()])
    report = jattn.report({"a": (jnp.ones((1, 7, N, H)),) * 2}, [ids], tokenizer=by_bytes(), is_causal=True)
    assert report.queries == [["猫₁", "猫₂", "猫₃", "竌₁", "竌₂", "竌₃", "a"]]
    assert embedded(report.html)["views"][0]["name"] == "1: 猫 竌 a"
    assert "A token that is a part of a character" in report.html
    assert "a part of a character" not in jattn.report(qk(), is_causal=True).html


@pytest.mark.parametrize("make", [np.array, lambda x: np.array(x, object), lambda x: [np.array(x[0])] * B])
def test_words_may_be_arrays(make):
    assert jattn.report(qk(), make([WORDS] * B), is_causal=True).queries == [WORDS] * B


@pytest.mark.slow
def test_numbers_of_ones_own_and_roles():
    effect = np.arange(L * N).reshape(L, N) / 10
    draw = lambda i: tuple(jax.random.normal(jax.random.key(i), (2, 1, T, 40, H)))
    null = jattn.report({f"layer {i}": draw(i) for i in range(3)}, [WORDS], is_causal=True)
    sharp = 40 * jax.nn.one_hot(jnp.arange(T), T)[None, :, None]
    sees_previous = (jnp.broadcast_to(jnp.roll(sharp, -1, -1), (1, T, N, T)), sharp)
    report = jattn.report({"a": sees_previous, "b": sees_previous}, [WORDS], columns={"effect": effect}, null=null)
    assert report.numbers["effect"].tolist() == effect.ravel().tolist()
    data = embedded(report.html)
    assert data["columns"][-1] == "effect" and "Roles are tested" in report.html
    assert len(report.roles) == L * N


def test_heads_beside_others_are_matched():
    layers = qk()
    pairs = zip(layers.items(), [[2, 0, 3, 1], [1, 3, 0, 2]], strict=True)
    swapped = {name: (q[:, :, at], jnp.repeat(k, 2, 2)[:, :, at]) for (name, (q, k)), at in pairs}
    one = jattn.report(layers, [WORDS] * B, is_causal=True, title="one")
    other = jattn.report(swapped, [WORDS] * B, is_causal=True, title="other")
    assert _matching.matched(one, other).tolist() == [1, 3, 0, 2, 6, 4, 7, 5]
    exchanged = dict(zip(layers, reversed(layers.values()), strict=True))
    across = _matching.matched(one, jattn.report(exchanged, [WORDS] * B, is_causal=True))
    assert sorted(across[:N]) == list(range(N))  # within layers, though the other layer has the same heads
    both = jattn.report(layers, [WORDS] * B, is_causal=True, title="one", compare=other)
    np.testing.assert_allclose(weights_of(both.html, 0, 1), weights_of(both.html, 0, 0), atol=4e-5)
    frame = embedded(both.html)["views"][0]["frames"][1]
    assert frame["title"] == "other" and frame["heads"][:2] == ["L0H1", "L0H3"]
    shown = embedded(both.html)["numbers"]
    assert shown[0]["values"] == shown[1]["values"]


def test_other_texts_and_other_models_stand_beside():
    one = jattn.report(qk(), [WORDS] * B, is_causal=True)
    text = jattn.report(qk(), [WORDS[::-1]] * B, is_causal=True, title="backwards", compare=one)
    views = embedded(text.html)["views"]
    assert [len(view["frames"]) for view in views] == [1] * 4
    assert views[2]["name"].startswith("Attention heads: 1: the cat")
    smaller = jattn.report(dict(list(qk().items())[:1]), [WORDS] * B, is_causal=True, title="smaller")
    mixed = embedded(jattn.report(qk(), [WORDS] * B, is_causal=True, compare=[smaller, one]).html)["views"][0]["frames"]
    assert [frame.get("heads", []).count("–") for frame in mixed] == [0, N, 0]


@pytest.mark.parametrize(("change", "error", "words"), [
    ({"heads": {}}, ValueError, "has no layers: did the model sow, with sow_heads=True"),
    ({"heads": {"intermediates": {}}}, ValueError, "nothing, .* call the model with sow_heads=True"),
    ({"heads": {"params": {"query": {}, "key": {}}}}, ValueError, "params has parameters, not arrays"),
    ({"heads": {"a": dict(zip(("query", "key"), qk()["layer 0"], strict=True), causal=True)}}, TypeError, "a takes no 'causal'"),
    ({"heads": ()}, ValueError, "no layers: transformers returns attentions only if .*\"eager\" and .* output_attentions=True"),
    ({"heads": None}, TypeError, "got NoneType; transformers returns attentions only if"),
    ({"heads": (None, None)}, ValueError, "layer 0 must be .* got NoneType; transformers returns attentions only if"),
    ({"heads": {"layer 0": qk()["layer 0"], 0: qk()["layer 0"]}}, ValueError, "two heads with the name 'layer 0 head 0'"),
    ({"heads": {"layer 0": qk()["layer 0"], "L0": qk()["layer 0"]}}, ValueError, "two heads with the name 'L0H0'"),
    ({"heads": 3}, TypeError, "heads must be what a model has sown"),
    ({"heads": {"a": 3}}, ValueError, "a must be \\(query, key\\)"),
    ({"heads": {"a": {"query": np.zeros((T, N, H))}}}, ValueError, "expected 'query' and 'key'"),
    ({"heads": {"a": (np.zeros((T, N)), np.zeros((T, N)))}}, ValueError, "query \\[B,T,N,H\\]"),
    ({"heads": [*qk().values(), *qk(S=3).values()]}, ValueError, "see the same sequences"),
    ({"heads": qk(T=0)}, ValueError, "is empty"),
    ({"heads": np.ones((N, T, T))}, ValueError, "must sum to at most 1; these sum to 7"),
    ({"heads": np.ones((T, T))}, ValueError, "weights must be"),
    ({"tokens": WORDS}, ValueError, "tokens must be 2 lists of 1 to 7 strings.*got 1 of 7"),
    ({"tokens": [np.arange(T), np.arange(3)]}, ValueError, "ids of one length; got lengths \\[7, 3\\]. Pad the ids"),
    ({"tokens": np.full((B, T), -1), "tokenizer": Tokenizer()}, ValueError, "has the id -1, which no tokenizer"),
    ({"tokens": np.zeros((B, 3), int)}, ValueError, "ids \\[B, T\\] = \\[2, 7\\]"),
    ({"tokens": np.zeros((B, T))}, ValueError, "got float64"),
    ({"tokens": np.zeros((B, T), int), "tokenizer": 3}, TypeError, "tokenizer must have a method decode"),
    ({"columns": {"effect": np.zeros((L, N + 1))}}, ValueError, "columns\\['effect'\\] must have a number for each"),
    ({"columns": {"entropy": np.zeros((L, N))}}, ValueError, "columns has 'entropy', which is already a statistic"),
    ({"columns": {"effect": 3}}, ValueError, "must have a number for each head"),
    ({"causal": True}, TypeError, "report takes no 'causal'"),
])  # fmt: skip
def test_wrong_arguments_are_named(change, error, words):
    arguments = {"heads": qk(), "tokens": None} | change
    with pytest.raises(error, match=words):
        jattn.report(**arguments)


@pytest.mark.parametrize("other", ["other.html", [qk()], 3])
def test_what_stands_beside_is_a_report(other):
    with pytest.raises(TypeError, match="compare must be a Report"):
        _reports("compare", other)


@pytest.mark.slow
def test_weights_under_another_mask_are_refused():
    """Otherwise the picture would show what the model did not do."""
    sown = sown_by(Ours(nnx.Rngs(0)), jax.random.normal(jax.random.key(1), (B, T, N * H)), sow_heads=True)
    with pytest.raises(ValueError, match="weights of a query sum to .* pass the model's options: is_causal=True"):
        jattn.report(sown)


def test_what_does_not_fit_is_left_out_and_said():
    rng = np.random.default_rng(0)
    frame = _pack_weights.Frame("a", rng.random((6, 40, 40)).astype(np.float32) ** 8)
    rooms = (10**6, 14_000, 5_000, 100)
    whole, fewer, coarser, none = (_pack_weights.pack([frame], room) for room in rooms)
    assert whole[0][0]["bits"] == 16 and whole[0][0]["note"] == ""
    assert fewer[0][0]["bits"] < 16 and f"1/{2 ** fewer[0][0]['bits'] - 1} of the largest" in fewer[0][0]["note"]
    assert "Weights below" in coarser[0][0]["note"] and coarser[0][0]["dropped"] > 0
    assert all(len(packed[1][0]) <= room for packed, room in zip((whole, fewer, coarser, none), rooms, strict=True))
    size = 6, 40, 5
    top = _pack_weights.Frame("a", None, rng.random(size) ** 3 + 0.002, np.zeros(size, int), frame.weights[:, :4, :4])
    tried = [_pack_weights.pack([top], room) for room in range(500, 3000, 50)]
    blob = next(blobs[0] for entries, blobs, _ in tried if "unless they are among a query's 2" in entries[0]["note"])
    codes = np.frombuffer(zlib.decompress(base64.b64decode(blob)), "<u2")[5 * 240 : 10 * 240].reshape(5, 6, 40)
    assert (codes[:2] > 0).mean() > 0.9 > (codes[2:] > 0).mean()


@pytest.mark.parametrize("most", [100_000, 10_000])
def test_a_page_that_is_too_large_says_so(monkeypatch, most):
    monkeypatch.setattr("jattn.reports._head_report.PAGE_LETTERS", most)
    report = jattn.report(qk(), [["a" * 5000, *"bcdefg"]] * B, is_causal=True)
    with contextlib.nullcontext() if most > 90_000 else pytest.warns(UserWarning, match=r"the page has 0\.\d MB, more .* shorter tokens"):  # fmt: skip
        assert len(report.html) > 70_000


def test_nan_is_said():
    """A read-out of 0 would hide it."""
    (q, k), other = qk().values()
    report = jattn.report({"a": (q.at[0, 2, 1].set(jnp.nan), k), "b": other}, is_causal=True)
    assert embedded(report.html)["views"][0]["frames"][0]["note"].startswith("NaN: the weights of 1 queries")
    assert np.isnan(report.numbers["entropy"]).tolist() == [False, True] + [False] * 6
    assert "NaN" not in embedded(report.html)["views"][1]["frames"][0]["note"]


@pytest.mark.slow
def test_a_long_text_keeps_the_largest_weights_of_each_query(monkeypatch):
    monkeypatch.setattr(_kept_weights, "ALL_WEIGHTS", 0)
    monkeypatch.setattr(_kept_weights, "MOST_BLOCKS", 4)
    words = [[f"w{i}" for i in range(9)], [f"w{i}" for i in range(5)]]
    layers = qk(T=9, S=9)
    report = jattn.report(layers, words, is_causal=True)
    weights = dense(layers, is_causal=True)
    top = np.sort(weights, -1)[..., ::-1]
    np.testing.assert_allclose(report.looked.top, top[..., : report.looked.top.shape[-1]], atol=1e-5)
    first, second = (view["frames"][0] for view in embedded(report.html)["views"])
    assert first["k"] == 9 and first["side"] == [4, 4] and first["span"] == [2.25, 2.25]
    assert second["side"] == [3, 3]  # five tokens reach into three blocks of 2.25


@pytest.mark.slow
def test_of_very_many_sequences_the_first_are_drawn(monkeypatch):
    monkeypatch.setattr(_kept_weights, "ALL_WEIGHTS", 0)
    monkeypatch.setattr(_kept_weights, "DRAWN_QUERIES", 2 * L * N * 9 - 1)
    layers = qk(T=9, S=9)
    report = jattn.report(layers, [[f"w{i}" for i in range(9)]] * B, is_causal=True)
    assert len(embedded(report.html)["views"]) == len(report.queries) == 1
    assert "Only the first 1 of 2 sequences are drawn; the numbers cover all 2." in report.html
    q, k = layers["layer 0"]
    expected = heads.statistics(q, k, is_causal=True, names=["max_weight"])["max_weight"]
    np.testing.assert_allclose(report.numbers["max_weight"][:N], np.asarray(expected).mean(0), rtol=1e-5)


def test_it_runs_outside_of_compiled_functions():
    with pytest.raises(TypeError, match="layer 0 is traced: call report outside jax.jit"):
        jax.jit(lambda q, k: jattn.report({0: (q, k)}))(*qk()["layer 0"])


def test_reports_are_offered():
    assert reports.report is jattn.report and isinstance(jattn.report(qk(), is_causal=True), reports.Report)
