"""Suggests the keyword argument probably meant by an unknown one."""

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar, Unpack, get_args, get_origin

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_CAUSAL = ("is_causal", "mask=jattn.masks.Causal()")
_DROPOUT = ("dropout_rate", "dropout=(rate, key)")
_WINDOW = ("local_window_size", "mask=jattn.masks.SlidingWindow(left, right)", "left, not counting the query's own key")
_WEIGHTS = ("return_weights", "sow_weights", "jattn.attention_weights(query, key, ...)")
_SOFT_CAP = ("score_mod=jattn.score_mods.SoftCap(cap)",)
_KEY_MASK = ("key_value_seq_lengths, or mask=mask[:, None, None, :]", "mask")
# Argument names in other libraries, and their names here. The first that is a keyword of the function is suggested.
MEANT: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "q": ("query",), "k": ("key",), "v": ("value",), "query": ("q",), "key": ("k",), "value": ("v",),
        "causal": _CAUSAL, "is_causal": _CAUSAL, "causal_mask": _CAUSAL, "use_causal_mask": _CAUSAL,
        "attn_mask": ("mask",), "attention_mask": ("mask",), "mask_mod": ("mask",), "block_mask": ("mask",),
        "key_mask": _KEY_MASK, "kv_mask": _KEY_MASK, "padding_mask": _KEY_MASK, "key_padding_mask": _KEY_MASK,
        "dropout": _DROPOUT, "dropout_p": _DROPOUT, "dropout_prob": _DROPOUT, "dropout_rate": _DROPOUT,
        "softmax_scale": ("scale",), "sm_scale": ("scale",), "scaling": ("scale",),
        "attn_bias": ("bias",), "attention_bias": ("bias",),
        "enable_gqa": ("key and value with fewer heads than query, which need no flag",),
        "window_size": _WINDOW, "sliding_window": _WINDOW, "window": _WINDOW, "local_window_size": _WINDOW,
        "softcap": _SOFT_CAP, "soft_cap": _SOFT_CAP, "logits_soft_cap": _SOFT_CAP,
        "alibi_slopes": ("score_mod=jattn.score_mods.Alibi(slopes)",),
        "segment_ids": ("mask=jattn.masks.Segments(ids)", "query_ids"), "ids": ("query_ids",),
        "return_lse": ("return_residual",), "lengths": ("length",), "length": ("lengths",),
        "return_weights": _WEIGHTS, "need_weights": _WEIGHTS, "sow_weights": _WEIGHTS, "output_attentions": _WEIGHTS,
        "return_attention_weights": _WEIGHTS, "return_attn_weights": _WEIGHTS, "return_attention_scores": _WEIGHTS,
    }
)  # fmt: skip


def suggest_keywords(fn: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """``fn``, with an error for unknown keyword arguments whose message suggests the one probably meant."""
    parameters = inspect.signature(fn).parameters
    known = {*parameters, *(name for parameter in parameters.values() for name in unpacked_keywords(parameter))}

    @functools.wraps(fn)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in known:
                raise TypeError(unknown_keyword(name, known))
        return fn(*args, **kwargs)

    return checked


def unpacked_keywords(parameter: inspect.Parameter) -> Collection[str]:
    """The keywords of ``**parameter: Unpack[T]`` with a ``TypedDict`` T; none for any other parameter."""
    if parameter.kind != inspect.Parameter.VAR_KEYWORD or get_origin(parameter.annotation) is not Unpack:
        return ()
    (keywords,) = get_args(parameter.annotation)
    return keywords.__required_keys__ | keywords.__optional_keys__


def unknown_keyword(name: str, known: Collection[str]) -> str:
    """The error for the keyword argument ``name``, which is not among the ``known`` ones."""
    candidates = (*MEANT.get(name, ()), *difflib.get_close_matches(name, known, 1))
    meant = (candidate for candidate in candidates if re.split(r"\W", candidate)[0] in {*known, "jattn"})
    return f"unexpected keyword argument {name!r}" + "".join(f"; did you mean {one}?" for one in list(meant)[:1])
