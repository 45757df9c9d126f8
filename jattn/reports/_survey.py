"""Surveys a model's heads: what they do on clean input, what is lost without each, and what they add to the logits."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, ArrayLike

from jattn import heads
from jattn.heads._ablation import KINDS
from jattn.interop import Transformer
from jattn.interop._progress import track
from jattn.reports._clean_run import PATTERNS, Clean, roles_of, run_clean
from jattn.reports._effects import batches, estimated, exactly, heads_at_once
from jattn.reports._head_report import Report, report
from jattn.reports._language_model import Layer, Metric, embed, measured, next_token_loss, parts_of
from jattn.reports._paths_into import Paths, paths_into
from jattn.reports._survey_attribution import attribution, out_kernels


@dataclasses.dataclass(frozen=True)
class Survey:
    """The result of :func:`~jattn.survey`: NumPy arrays ``[L,N]``, unless stated otherwise.

    Attributes:
        tokens: ``[B,T]``.
        metric: the metric of the unchanged model, a number.
        effect: the metric with the head switched off, minus ``metric``.
        exact: bool, whether the effect is measured by a run without the head; otherwise it is an estimate.
        estimate: the estimates of all effects; None if all are measured.
        statistics: ``{name: [L,N]}``, from ``heads.statistics``, the mean over the queries of all sequences.
        roles: from ``heads.roles``, or None.
        attribution: what each head adds directly to the logit, or None.
        paths: the ``Paths`` into the chosen head, or None.
        layers: for each layer, a dict of query, key, lse, and the known options of its weights.
        notes: how the numbers were computed, and what is missing.

    Example:
        >>> from flax import nnx
        >>> sizes = {"num_layers": 2, "num_heads": 4, "model_dim": 8, "mlp_dim": 16, "vocabulary": 11, "max_length": 9}
        >>> config = jattn.interop.Config("tiny", **sizes, norm_epsilon=1e-5, activation="relu")
        >>> model = jattn.interop.Transformer(config, rngs=nnx.Rngs(0))
        >>> found = jattn.survey(model, np.array([[3, 1, 4, 1], [2, 7, 2, 7]]), progress=False)
        >>> list(found.columns())[:7]  # found.table() shows them as text, found.report() as a page
        ['layer', 'head', 'effect', 'exact', 'role', 'score', 'attribution']
    """

    tokens: np.ndarray
    metric: float
    effect: np.ndarray
    exact: np.ndarray
    estimate: np.ndarray | None
    statistics: Mapping[str, np.ndarray]
    roles: heads.Roles | None
    attribution: np.ndarray | None
    paths: Paths | None
    layers: Sequence[Mapping[str, Any]]
    notes: tuple[str, ...]

    def columns(self) -> dict[str, np.ndarray]:
        """Everything known about each head: ``{name: array}``, with one entry per head."""
        L, N = self.effect.shape
        columns = {"layer": np.repeat(np.arange(L), N), "head": np.tile(np.arange(N), L)}
        columns |= {"effect": self.effect.ravel(), "exact": self.exact.ravel()}
        if self.roles is not None:
            columns |= {"role": self.roles.label.ravel(), "score": self.roles.score.ravel()}
        if self.attribution is not None:
            columns["attribution"] = self.attribution.ravel()
        return columns | {name: values.ravel() for name, values in self.statistics.items()}

    def table(self, rows: int = 20) -> str:
        """The ``rows`` heads with the largest effects as text, then paths and notes. ``~`` marks an estimate."""
        columns = {name: values for name, values in self.columns().items() if name not in PATTERNS}
        effects, exact = columns["effect"], columns.pop("exact")
        marks = np.where(exact, "", "~")
        columns["effect"] = np.array([f"{mark}{x:+.4f}" for mark, x in zip(marks, effects, strict=True)])
        order = np.argsort(-abs(effects), kind="stable")[:rows]
        lines = [list(columns), *([_cell(values[at]) for values in columns.values()] for at in order)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        if self.paths is not None:
            (layer, head), pattern = self.paths.into, self.paths.pattern
            text.append(f"head {head} of layer {layer}: {pattern} {self.paths.score:.3f}; paths by the change:")
            text += [f"  its {by} from {at}.{of}: {change:+.3f}" for by, at, of, change in self.paths.strongest()]
        return "\n".join([*text, *self.notes])

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame`` with one row per head.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas  # type: ignore
        except ImportError:
            raise ImportError("to_pandas needs pandas: pip install jattn[pandas]; or use columns()") from None
        return pandas.DataFrame(self.columns())

    def report(self, path: str | Path | None = None, *, tokenizer: Any = None, **options: Any) -> Report:
        """``jattn.report`` of these heads, with their effects, attribution and roles.

        Args:
            path: the file to write; None writes no file.
            tokenizer: the model's tokenizer, which turns ids into text.
            options: keywords of ``jattn.report``. A survey knows only the masks of ``jattn.interop`` models. For other
                models, pass the ``is_causal=True`` or ``mask=`` of the model's attention.
        """
        columns = {"effect": self.effect}
        if self.attribution is not None:
            columns["attribution"] = self.attribution
        options = {"tokens": self.tokens, "tokenizer": tokenizer, "columns": columns, "roles": self.roles, **options}
        return report(self.layers, path=path, **options)


def survey(
    model: nnx.Module,
    tokens: ArrayLike,
    *,
    metric: Metric | None = None,
    kind: str = "mean",
    exact: int | None = 32,
    twins: Callable[[int], nnx.Module] | None = None,
    directions: Array | None = None,
    into: tuple[int, int] | None = None,
    progress: bool = True,
) -> Survey:
    """Surveys the heads of a language model on clean tokens: where each head looks, and what it is needed for.

    - Statistics: ``heads.statistics`` of these tokens, the mean over the queries of all sequences.
    - Roles: ``heads.roles``, with the heads of models with random parameters as the null. The baseline is the model on
      shuffled tokens. For ``duplicate_token`` and ``induction``, it is the clean run judged by shuffled tokens, because
      a shuffled sequence still repeats tokens, and an induction head follows them.
    - Effects: the metric with a head off (``heads.ablate``), minus the metric. All effects are estimated
      (``heads.attribution_patch``), and the heads with the largest sums of absolute estimates over positions are
      measured.
    - Attribution: ``heads.logit_attribution``, the mean over tokens.
    - Paths: ``heads.path_patch``, from each earlier head into the queries and the keys of the head ``into``.

    Args:
        model: a ``jattn.interop.Transformer``, or any ``jattn.reports.LanguageModel``.
        tokens: integers ``[B,T]``: sequences of equal length, without padding.
        metric: ``(logits [T,V], tokens [T]) -> floating scalar`` of one sequence; its mean over sequences is used. By
            default ``jattn.reports.next_token_loss``, in nats. Estimates need its gradient.
        kind: the output of a switched-off head: ``"mean"``, ``"zero"``, or ``"resample"``, its output on the previous
            sequence.
        exact: the number of heads to measure, each by a run from its layer up; None measures all, as required by
            metrics without a gradient, such as accuracy.
        twins: a function from a seed to a model with random parameters. A ``Transformer`` needs none.
        directions: ``[M]`` or an array that broadcasts to ``[B,T,M]``: the direction to which heads are attributed; by
            default the next token's row of the output embedding.
        into: ``(layer, head)``: measure the paths into this head. The other outputs come from the previous sequence of
            the batch.
        progress: show the running step on a terminal's stderr.

    Returns:
        A ``Survey``; ``table()`` shows it as text, ``report()`` as a page.

    Raises:
        TypeError: the model is not an ``nnx.Module``, or lacks ``embed``, ``layers`` or ``unembed``.
        ValueError: ``tokens`` are not integers ``[B,T]`` with T at least 2; ``kind`` is unknown; the metric is not a
            scalar, not finite on the clean run, or has no gradient for the estimates; a layer sows no heads; no metric
            is given for a model that is not causal; ``into`` does not exist or has no earlier heads, or there is only
            one sequence.

    Example:
        >>> from flax import nnx
        >>> sizes = {"num_layers": 2, "num_heads": 4, "model_dim": 8, "mlp_dim": 16, "vocabulary": 11, "max_length": 9}
        >>> config = jattn.interop.Config("tiny", **sizes, norm_epsilon=1e-5, activation="relu")
        >>> model = jattn.interop.Transformer(config, rngs=nnx.Rngs(0))
        >>> tokens = np.array([[3, 1, 4, 1], [2, 7, 2, 7]])
        >>> found = jattn.survey(model, tokens, exact=1, progress=False)  # of a real model: print(found.table())
        >>> found.effect.shape, int(found.exact.sum()), found.roles.label.shape  # one effect is measured
        ((2, 4), 1, (2, 4))
    """
    tokens = _checked(model, tokens, kind, exact)
    metric = _metric(model, metric)
    whole, layers = parts_of(model)
    tracked = functools.partial(track, show=progress)
    clean = run_clean(tracked(layers, "looking"), embed(whole, tokens), tokens)
    kernels = out_kernels(model)
    if into is not None:
        _check_path(into, clean, tokens, kernels)
    value = float(measured(whole, clean.streams[-1], tokens, metric))
    if not math.isfinite(value):
        raise ValueError(
            f"metric must be finite on the clean run, got {value}; are all tokens in the vocabulary, and are the "
            "sequences no longer than the model has positions for?"
        )
    z = [sown["z"] for sown in clean.seen]
    shape = clean.statistics["entropy"].shape
    estimate, chosen = None, np.ones(shape, bool)
    if exact is not None and exact < chosen.size:
        estimate, size = estimated(whole, layers, clean.streams[0], z, tokens, metric, kind)
        if not size.any():
            raise ValueError(
                "metric has a gradient of 0 at the output of every head, so it gives no estimates: pass a "
                "differentiable metric (the accuracy, for example, is not), or exact=None to measure every head"
            )
        chosen = _largest(size, exact)
    roles, of_roles = roles_of(model, clean, tokens, twins, tracked)
    shares, of_shares = attribution(model, z, clean.streams[-1], tokens, directions)
    at_once = heads_at_once(shape[1], tokens)
    each = tracked(batches(chosen, at_once), "heads off")
    effect = exactly(whole, layers, clean.streams, z, tokens, metric, kind, each) - value
    of_effects = _note(kind, value, effect, estimate)
    paths = None
    if into is not None and kernels is not None:
        before, pattern = slice(into[0]), _pattern(clean, roles, into)
        paths = paths_into(
            layers[into[0]], clean.streams[into[0]], z[before], list(kernels[before]), tokens, into, pattern, at_once
        )
    return Survey(
        np.asarray(tokens), value, effect if estimate is None else np.where(chosen, effect, estimate), chosen, estimate,
        clean.statistics, roles, shares, paths, _for_report(model, layers, clean), (of_effects, of_roles, of_shares),
    )  # fmt: skip


def _checked(model: nnx.Module, tokens: ArrayLike, kind: str, exact: int | None) -> Array:
    """The tokens; raises ``ValueError`` if one of these arguments is invalid."""
    ids = jnp.asarray(tokens)
    if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer) or not ids.shape[0] or ids.shape[1] < 2:
        raise ValueError(
            f"tokens must be integers [B, T] with T at least 2, got {ids.dtype} of shape {list(ids.shape)}"
        )
    if isinstance(model, Transformer) and model.config.position is None and ids.shape[1] > model.config.max_length:
        raise ValueError(
            f"tokens must be [B, T] with T at most {model.config.max_length}, the model's positions, got shape "
            f"{list(ids.shape)}"
        )
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if kind == "resample" and ids.shape[0] < 2:
        raise ValueError(f"kind='resample' needs at least 2 sequences, got tokens of shape {list(ids.shape)}")
    if exact is not None and exact < 0:
        raise ValueError(f"exact must be a number of heads, or None for all, got {exact}")
    return ids


def _metric(model: nnx.Module, metric: Metric | None) -> Metric:
    """The metric; raises ``ValueError`` if it is None and the model does not predict the next token."""
    if metric is None and isinstance(model, Transformer) and not model.config.causal:
        raise ValueError(f"a {model.config.family} is not causal and predicts no next token: pass metric=")
    return next_token_loss if metric is None else metric


def _check_path(into: tuple[int, int], clean: Clean, tokens: Array, kernels: Array | None) -> None:
    """Raises ``ValueError`` if there are no paths into this head."""
    L, N = clean.statistics["entropy"].shape
    if not (0 < into[0] < L and 0 <= into[1] < N):
        raise ValueError(
            f"into must be a layer from 1 to {L - 1}, which has heads before it, and a head below {N}, got {into}"
        )
    if tokens.shape[0] < 2:
        raise ValueError("into needs at least 2 sequences: paths take other outputs from another sequence")
    if kernels is None:
        raise ValueError(
            "into needs the model's out_kernels, and no norm between the heads' output and the residual stream"
        )


def _largest(size: np.ndarray, count: int) -> np.ndarray:
    """Bool, True for the ``count`` largest values."""
    chosen = np.zeros(size.size, bool)
    chosen[np.argsort(-size, axis=None, kind="stable")[:count]] = True
    return chosen.reshape(size.shape)


def _pattern(clean: Clean, roles: heads.Roles | None, head: tuple[int, int]) -> str:
    """The pattern of the head's role, or of its largest score."""
    role = "" if roles is None else str(roles.label[head]).removeprefix(heads.WEAK)
    return role if role in PATTERNS else max(PATTERNS, key=lambda name: clean.statistics[name][head])


def _note(kind: str, value: float, effect: np.ndarray, estimate: np.ndarray | None) -> str:
    """How the effects were computed, and how well any estimates fit the measurements."""
    note = f"effect: the metric with the head off ({kind}) minus {value:.4f}"
    if estimate is None:
        return note
    there = ~np.isnan(effect)
    note += f"; ~ is an estimate, {there.sum()} of {there.size} heads are measured"
    if there.sum() < 3:
        return note
    of_effects, of_estimates = (_ranks(x[there]) for x in (effect, estimate))
    if not (of_effects.std() and of_estimates.std()):
        return f"{note}; all of their {'estimates' if of_effects.std() else 'effects'} are equal: no rank correlation"
    return f"{note}, their rank correlation with the estimates is {np.corrcoef(of_effects, of_estimates)[0, 1]:.2f}"


def _ranks(values: np.ndarray) -> np.ndarray:
    """Twice the rank of each value, up to a constant; equal values share the mean of their ranks."""
    every = np.sort(values)
    return np.searchsorted(every, values, "left") + np.searchsorted(every, values, "right")


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, np.floating) else str(value)


def _for_report(model: nnx.Module, layers: Sequence[Layer], clean: Clean) -> list[dict[str, Any]]:
    """What ``jattn.report`` needs of each layer."""
    options: dict[str, Any] = {}
    if isinstance(model, Transformer):
        options = {"scale": model.config.scale, "score_mod": model.layers.attention.score_mod}
    every = [
        {name: sown[name] for name in ("query", "key", "lse")} | options | {"mask": layer.mask}
        for layer, sown in zip(layers, clean.seen, strict=True)
    ]
    return [{name: x for name, x in of_layer.items() if x is not None} for of_layer in every]
