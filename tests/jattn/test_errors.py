"""Errors of wrong calls, from a table: each names the argument, what it got and what was expected.

And what is noted on the errors of users' own masks and score functions.
"""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jattn
import jattn.linen
import jattn.nnx
from jattn._mods.arrays import CONVENTION
from jattn.kernels.splash import Splash
from tests.jattn.error_table import ROWS


@pytest.mark.slow
def test_every_error_says_what_is_wrong():
    """In a separate process without a type checker, as users call."""
    command = [sys.executable, Path(__file__).with_name("error_table.py")]
    raised = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    unclear = {}
    for name, (_, words) in ROWS.items():
        kind, message = raised[name] or (None, "nothing was raised")
        known = kind in ("TypeError", "ValueError", "AttributeError", "FileNotFoundError", "Unsupported")
        if not known or any(word not in message for word in words) or len(message) > 800:
            unclear[name] = kind, message, words
    assert unclear == {}


def test_the_table_is_long_enough():
    assert len(ROWS) >= 150


X, INPUTS = jnp.ones((1, 4, 2, 8)), jnp.ones((1, 4, 16))
MODEL = jattn.nnx.MultiHeadAttention(2, 16, rngs=nnx.Rngs(0))
FLAXS = nnx.MultiHeadAttention(2, 16, decode=False, attention_fn=jattn.nnx.dot_product_attention, rngs=nnx.Rngs(0))
LINEN = jattn.linen.MultiHeadAttention(2)


class Refused(Exception):
    """What the functions below raise."""


@jattn.pytree_dataclass
class Raises(jattn.masks.Mask):
    """A mask that jattn need not trace before it is used."""

    def __call__(self, b, h, q_idx, kv_idx):
        raise Refused("no")


@jattn.pytree_dataclass
class RaisesScore:
    """The same as a score function."""

    def __call__(self, score, b, h, q_idx, kv_idx):
        raise Refused("no")


@jattn.pytree_dataclass
class RaisesInBounds(jattn.masks.Causal):
    """A mask of which only the bounds raise."""

    def bounds(self, b, h, q_min, q_max, kv_min, kv_max):
        raise Refused("no")


def mask(b, h, q_idx, kv_idx):
    raise Refused("no")


def score_mod(score, b, h, q_idx, kv_idx):
    raise Refused("no")


def calls_attention(score, b, h, q_idx, kv_idx):
    return score + jattn.dot_product_attention(X, X, X, mask=mask).sum()


def attention(implementation=None, **options):
    return lambda: jattn.dot_product_attention(X, X, X, implementation=implementation, **options)


CALLS = {
    "mask": (attention(mask=mask), "mask"),
    "score_mod": (attention(score_mod=score_mod), "score_mod"),
    "mask, blockwise": (attention("blockwise", mask=mask), "mask"),
    "score_mod, blockwise": (attention("blockwise", score_mod=score_mod), "score_mod"),
    "part of a mask": (attention(mask=jattn.masks.Causal() & ~jattn.masks.and_masks(mask)), "mask"),
    "second score_mod": (attention(score_mod=jattn.score_mods.then(jattn.score_mods.SoftCap(1.0), score_mod)), "score_mod"),
    "class": (attention(mask=Raises()), "mask"),
    "class, score": (attention(score_mod=RaisesScore()), "score_mod"),
    "class, blockwise": (attention("blockwise", mask=Raises()), "mask"),
    "class, score, blockwise": (attention("blockwise", score_mod=RaisesScore()), "score_mod"),
    "class, splash": (attention(Splash(interpret=True), mask=Raises()), "mask"),
    "class, explain": (lambda: jattn.explain(X, X, X, mask=Raises(), platform="tpu"), "mask"),
    "score_mod, pallas": (lambda: jattn.explain(X, X, X, score_mod=score_mod, implementation="pallas_tpu"), "score_mod"),
    "bounds": (attention("blockwise", mask=RaisesInBounds()), "mask.bounds"),
    "nested": (attention(score_mod=calls_attention), "mask"),
    "block_mask": (lambda: jattn.block_mask(mask, 4, 4), "mask"),
    "block_mask, class": (lambda: jattn.block_mask(Raises(), 4, 4), "mask"),
    "weights": (lambda: jattn.attention_weights(X, X, mask=mask), "mask"),
    "fold_weights": (lambda: jattn.fold_weights(lambda c, *x: c, 0.0, X, X, score_mod=score_mod), "score_mod"),
    "attend": (lambda: jattn.attend(X[0, :, 0], X[0, :, 0], X[0, :, 0], mask=mask), "mask"),
    "attend, head": (lambda: jattn.attend(X[0, :, 0], X[0, :, 0], X[0, :, 0], score_mod=score_mod, batch=0, head=0), "score_mod"),
    "one head in blocks": (lambda: jattn.blockwise(X[0, :, 0], X[0, :, 0], X[0, :, 0], mask=Raises()), "mask"),
    "statistics": (lambda: jattn.heads.statistics(X, X, mask=mask), "mask"),
    "forbid": (attention(mask=jattn.heads.forbid(mask, [0])), "mask"),
    "nnx": (lambda: MODEL(INPUTS, mask=mask), "mask"),
    "nnx, score_mod": (lambda: MODEL(INPUTS, score_mod=score_mod), "score_mod"),
    "nnx, Flax's": (lambda: FLAXS(INPUTS, mask=mask), "mask"),
    "linen": (lambda: LINEN.init(jax.random.key(0), INPUTS, mask=mask), "mask"),
    "gradient": (lambda: jax.grad(lambda x: jattn.dot_product_attention(x, x, x, mask=mask).sum())(X), "mask"),
    "jit": (lambda: jax.jit(lambda x: jattn.dot_product_attention(x, x, x, mask=Raises()))(X), "mask"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_what_a_mask_or_score_function_raises_gets_one_note(name):
    call, argument = CALLS[name]
    with pytest.raises(Refused) as caught:
        call()
    notes = [note for note in caught.value.__notes__ if CONVENTION in note]
    assert notes == [f"jattn called {argument} {CONVENTION}"]


def test_the_note_is_on_the_errors_of_flex_attentions_functions():
    """Those that take scalars there: a dot product of two vectors, and a condition."""
    table = jnp.ones((1, 2, 4, 8))
    functions = {
        "score_mod": (lambda s, b, h, q, kv: s + jnp.dot(table[b, h, q], table[b, h, kv]), TypeError),
        "mask": (lambda b, h, q, kv: True if q > kv else False, ValueError),
    }
    for argument, (function, kind) in functions.items():
        with pytest.raises(kind) as caught:
            jattn.dot_product_attention(X, X, X, **{argument: function})
        assert f"jattn called {argument} {CONVENTION}" in caught.value.__notes__
    for words in ("[T, 1]", "[1, S]", "x[..., 0]", "(a * b).sum(-1)", "jnp.where", "& | ~"):
        assert words in CONVENTION
    by_pair = lambda s, b, h, q, kv: s + (table[b, h, q] * table[b, h, kv]).sum(-1)
    jattn.dot_product_attention(X, X, X, score_mod=by_pair, mask=lambda b, h, q, kv: jnp.where(q > kv, True, False))
