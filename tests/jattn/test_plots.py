"""Plots of attention: what is on the axes, one scale for all heads, readable labels."""

import importlib.util
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jattn import plots

FRENCH = "Le chat noir mange la souris blanche".split()


def random_weights(*shape):
    weights = np.random.default_rng(0).random(shape)
    return weights / weights.sum(-1, keepdims=True)


def shown(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def test_queries_go_down_and_keys_across():
    weights = random_weights(7, 7)
    ax = plots.attention_heatmap(jnp.asarray(weights, jnp.float32), FRENCH, title="one head")
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("Keys (Source)", "Queries (Target)")
    assert ax.get_title() == "one head"
    assert shown(ax.xaxis) == shown(ax.yaxis) == FRENCH
    assert ax.yaxis_inverted()  # the first query is on top
    np.testing.assert_allclose(ax.images[0].get_array(), weights, rtol=1e-6)
    assert ax.images[0].get_clim() == pytest.approx((0, weights.max()))


def test_keys_may_be_other_tokens():
    ax = plots.attention_heatmap(random_weights(2, 3), ["le", "chat"], key_tokens=["the", "black", "cat"])
    assert (shown(ax.yaxis), shown(ax.xaxis)) == (["le", "chat"], ["the", "black", "cat"])
    ax = plots.attention_heatmap(random_weights(2, 3), ["le", "chat"])  # the keys have no labels
    assert (shown(ax.yaxis), shown(ax.xaxis)) == (["le", "chat"], ["0", "1", "2"])


def test_draws_where_it_is_told_on_the_scale_it_is_given():
    ax = Figure().subplots()
    assert plots.attention_heatmap(np.eye(3) / 2, ax=ax, vmax=1.0, colorbar=False) is ax
    assert ax.images[0].get_clim() == (0, 1)
    assert ax.figure.axes == [ax]


def test_half_precision_and_odd_tokens(tmp_path):
    tokens = ["\n", " ", r"$\x$", "an unusually long token", 5]
    ax = plots.attention_heatmap(jnp.eye(5, dtype=jnp.bfloat16), tokens)
    assert shown(ax.yaxis) == ["↵", "␣", r"$\x$", "an unusually lo…", "5"]
    assert ax.images[0].get_array().dtype == np.float32
    ax.figure.savefig(tmp_path / "odd.png")  # would fail if the token were parsed as a formula


@pytest.mark.parametrize("draw", [plots.attention_heatmap, lambda weights, *args, **options: plots.head_grid(weights[None], *args, **options).axes[0]])  # fmt: skip
def test_a_tokenizer_gives_the_text(draw):
    """Of its ids and of its strings, in which a space is Ġ and a character of two bytes two letters."""
    names = ["l", "Ã", "ļ", "Ġ", "Ġl"]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [("Ġ", "l")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    encoding = tokenizer.encode("lÚ l")
    assert encoding.tokens == ["l", "Ã", "ļ", "Ġl"]
    for tokens in (encoding.ids, np.array(encoding.ids), encoding.tokens):
        ax = draw(random_weights(4, 4), tokens, tokenizer=tokenizer)
        assert shown(ax.xaxis) == shown(ax.yaxis) == ["l", "Ú₁", "Ú₂", " l"]
    ax = draw(random_weights(4, 2), encoding.ids, key_tokens=[4, 3], tokenizer=tokenizer)
    assert (shown(ax.yaxis)[1], shown(ax.xaxis)) == ("Ú₁", [" l", "␣"])
    with pytest.raises(ValueError, match="key_tokens has the id -1, which no tokenizer knows"):
        draw(random_weights(4, 2), encoding.ids, key_tokens=[4, -1], tokenizer=tokenizer)


def test_head_grid_has_one_scale_and_one_colour_bar():
    weights = random_weights(2, 3, 4, 4)
    weights[1, 2, 0, 0] = 0.9
    figure = plots.head_grid(weights, list("abcd"), title="all")
    *heads, bar = figure.axes
    assert [ax.get_title() for ax in heads] == [f"layer {i} head {j}" for i in range(2) for j in range(3)]
    assert {ax.images[0].get_clim() for ax in heads} == {(0.0, float(np.float32(0.9)))}
    assert bar.get_ylabel() == "attention weight"
    for ax, drawn in zip(heads, weights.reshape(6, 4, 4), strict=True):
        np.testing.assert_allclose(ax.images[0].get_array(), drawn, rtol=1e-6)
    assert (figure.get_supxlabel(), figure.get_supylabel()) == ("Keys (Source)", "Queries (Target)")
    assert plots.head_grid(weights, vmax=1.0).axes[0].images[0].get_clim() == (0, 1)


def test_heads_without_layers_wrap():
    figure = plots.head_grid(random_weights(6, 3, 5))
    heads = [ax for ax in figure.axes if ax.images]
    assert [ax.get_title() for ax in heads] == [f"head {i}" for i in range(6)]
    assert heads[4].get_subplotspec().rowspan.start == 1


@pytest.mark.slow_except("False-7")
@pytest.mark.parametrize("size", [7, 32, 64, 200])
@pytest.mark.parametrize("grid", [False, True])
def test_labels_do_not_overlap(size, grid):
    tokens, weights = [f"c{i} v{i % 16}" for i in range(size)], np.eye(size)
    if grid:
        figure = plots.head_grid(np.stack([weights] * 4), tokens)
        left, lowest = figure.axes[0], figure.axes[0]
    else:
        left = lowest = plots.attention_heatmap(weights, tokens)
        figure = left.figure
    figure.draw_without_rendering()
    for axis, side in ((left.yaxis, "y"), (lowest.xaxis, "x")):
        boxes = [label.get_window_extent() for label in axis.get_ticklabels()]
        assert len(boxes) >= min(size, 14)
        ends = [(getattr(box, f"{side}0"), getattr(box, f"{side}1")) for box in boxes]
        ends.sort()
        # A text's box has space above and below the letters, so boxes may overlap by a fifth.
        assert all(one[1] - two[0] < 0.2 * (one[1] - one[0]) for one, two in zip(ends, ends[1:], strict=False))


@pytest.mark.parametrize("draw, message", [
    (lambda: plots.attention_heatmap(np.ones((2, 3, 3))), r"weights has shape \(2, 3, 3\), expected \[T, S\]"),
    (lambda: plots.attention_heatmap(np.ones((0, 3))), r"weights has shape \(0, 3\), expected \[T, S\]"),
    (lambda: plots.attention_heatmap(np.eye(3), ["a"]), r"tokens has 1 entries, expected T=3"),
    (lambda: plots.attention_heatmap(np.ones((2, 3)), key_tokens=["a"]), r"key_tokens has 1 entries, expected S=3"),
    (lambda: plots.head_grid(np.eye(3)), r"weights has shape \(3, 3\), expected \[N, T, S\] or \[L, N, T, S\]"),
    (lambda: plots.head_grid(np.ones((2, 3, 3)), titles=["a"]), r"titles has 1 entries, expected 2"),
])  # fmt: skip
def test_wrong_input_is_named(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()


def imported_anew():
    spec = importlib.util.spec_from_file_location("plots_imported_anew", plots.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_pyplot(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # makes the import fail
    module = imported_anew()
    module.attention_heatmap(np.eye(3), list("abc")).figure.savefig(tmp_path / "head.png")
    module.head_grid(np.stack([np.eye(3)] * 2)).savefig(tmp_path / "heads.png")
    assert {file.name for file in tmp_path.iterdir()} == {"head.png", "heads.png"}


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    with pytest.raises(ImportError, match=r"pip install jattn\[plots\]"):
        imported_anew()


@pytest.mark.parametrize("kind", ["pdf", "eps"])
@pytest.mark.parametrize(
    "draw",
    [
        lambda: plots.attention_heatmap(random_weights(4, 4), FRENCH[:4]).figure,
        lambda: plots.head_grid(random_weights(2, 4, 4)),
    ],
)
def test_a_figure_for_a_paper_has_no_type_3_fonts(tmp_path, draw, kind):
    """Which many venues refuse, and which matplotlib writes by default."""
    from matplotlib import rcParams

    before = rcParams[f"{'pdf' if kind == 'pdf' else 'ps'}.fonttype"]
    draw().savefig(tmp_path / f"heads.{kind}")
    text = (tmp_path / f"heads.{kind}").read_bytes()
    type_3, true_type = (b"/FontType 3", b"/FontType 42") if kind == "eps" else (b"/Type3", b"/TrueType")
    assert type_3 not in text
    assert true_type in text or b"/CIDFontType2" in text
    assert rcParams[f"{'pdf' if kind == 'pdf' else 'ps'}.fonttype"] == before  # the reader's own settings stay
