"""What a language model's heads do in long texts: which copy a needle, what they are needed for, and where others look.

Heads are chosen on some texts and judged on others. The controls are random groups of other heads of the same layers,
or of the next ones, with outputs as large, places of the text that are not the needle's, and a twin with random
parameters. What has been measured is kept in ``out/parts``, so a stopped run goes on from there.
"""

import dataclasses
import functools
import hashlib
import importlib.util
import io
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from rich.progress import Progress

from jattn import heads, interop, masks
from jattn_experiments import head_scores
from jattn_experiments.config import Config
from jattn_experiments.measure import evaluate, long_metrics, long_texts, paths, sequences
from jattn_experiments.measure.language_model import NULL_HEADS, Model, output_norms
from jattn_experiments.measure.long_metrics import COPIES, PATTERNS
from jattn_experiments.measure.long_model import ROWS, Answer, Reader
from jattn_experiments.measure.long_texts import Texts
from jattn_experiments.model_files import model_file
from jattn_experiments.runs import devices
from jattn_experiments.runs.findings import Findings
from jattn_experiments.runs.folder import Damaged, write_atomically
from jattn_experiments.runs.terminal import Terminal

SPANS = 60  # of a text whose weights are pictured: as many as the page has room for
COMPARED = 2048  # tokens on which the model and its twin are compared
PLACE = 512  # logits computed at once
LOSS = 512  # tokens of a text whose loss is measured

Part = dict[str, np.ndarray]


def check(config: Config) -> None:
    """Raises ``ValueError`` for options that do not apply to long texts, or if the model is missing."""
    for section in ("pretrained", "task", "model", "train", "evaluate", "controls", "sweep", "mesh"):
        default = next(field for field in dataclasses.fields(Config) if field.name == section).default_factory()
        if getattr(config, section) != default:
            raise ValueError(f"{section}: nothing is trained on long texts; leave its options out")
    options = config.long
    most = {"chosen": len(long_texts.CHOSEN), "texts": len(long_texts.JUDGED), "depths": len(long_texts.WORDS)}
    for name, largest in most.items():
        if getattr(options, name) > largest:
            raise ValueError(f"long.{name}: expected at most {largest}, got {getattr(options, name)}")
    if min(options.lengths) < 64 or options.ablated not in options.lengths:
        raise ValueError(
            f"long.lengths: expected numbers from 64 on, one of them long.ablated={options.ablated}, got "
            f"{options.lengths}"
        )
    if len(set(options.lengths)) < len(options.lengths):
        raise ValueError(f"long.lengths: expected each number once, got {options.lengths}")
    if min([*options.sizes, 1]) < 1 or len(set(options.sizes)) < len(options.sizes):
        raise ValueError(f"long.sizes: expected numbers from 1 on, each once, got {options.sizes}")
    if options.streamed < 2 * options.window:
        raise ValueError(
            f"long.streamed: expected at least twice long.window={options.window}, so that most tokens are beyond it, "
            f"got {options.streamed}"
        )
    if options.pictured < SPANS:
        raise ValueError(f"long.pictured: expected at least {SPANS}, the blocks of a picture, got {options.pictured}")
    if max(options.streamed, options.pictured) > max(options.lengths):
        raise ValueError(
            f"long.streamed, long.pictured: expected at most {max(options.lengths)} tokens, the longest of "
            f"long.lengths, got {options.streamed} and {options.pictured}"
        )
    farthest = max(options.lengths) - ROWS - 1
    if not options.distances or not all(1 < distance <= farthest for distance in options.distances):
        raise ValueError(
            f"long.distances: expected 2 to {farthest}, what the longest of long.lengths has room for, got "
            f"{options.distances}"
        )
    long_metrics.check(config)
    for package in ("safetensors", "tokenizers", "gguf"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"long: {package} is not installed; pip install 'jattn[experiments,hf,gguf]'")
    try:
        file = model_file(config.language.model)
    except ValueError as wrong:
        raise ValueError(f"language.model: {wrong}") from None
    long_texts.draw(config, interop.tokenizer(file))


def run(config: Config, out: Path) -> Findings:
    """Chooses heads on some texts; finds needles, switches heads off, hides needles and looks at sinks on others."""
    started = time.monotonic()
    source = model_file(config.language.model)
    tokenizer, model = interop.tokenizer(source), Model.of(interop.load(source))
    sizes = model.config
    texts, data = long_texts.draw(config, tokenizer), sequences.draw(config.language, tokenizer, sizes.vocabulary)
    ordinary = sequences.ordinary_tokens(tokenizer, sizes.vocabulary)
    twins = math.ceil(NULL_HEADS / (sizes.num_layers * sizes.num_heads))
    with Progress(console=Terminal()) as progress:
        task = progress.add_task("long texts", total=_count(config, twins, sizes.num_layers * sizes.num_heads))

        def bench(one: Model, name: str) -> _Bench:
            return _Bench(config, one, texts, out / "parts" / name, functools.partial(progress.update, task))

        found = _measured(bench(model, "model"), data, ordinary)
        for i in range(twins):
            twin = bench(Model.of(interop.Transformer(sizes, rngs=nnx.Rngs(i))), f"twin {i}")
            found["twins"].append(_twin(twin, data, pictures=not i))
    return _findings(config, tokenizer, found, time.monotonic() - started)


def _count(config: Config, twins: int, num_heads: int) -> int:
    """The parts that are measured; of each model, one is the texts."""
    options, groups, few = config.long, 1 + config.language.matched, min(2, config.long.texts)
    sizes = sum(size <= num_heads // 2 for size in options.sizes)
    needles = options.chosen + (len(options.lengths) + 1) * options.texts + few * (groups + 2 * sizes)
    return needles + groups + 1 + 3 * few + 7 + 3 * twins + few + 1


class _Bench:
    """A model, the texts of a config, and the parts that were measured."""

    def __init__(self, config: Config, model: Model, texts: Texts, folder: Path, tell: Callable[..., Any]):
        self.config, self.options, self.model, self.texts, self.folder = config, config.long, model, texts, folder
        self.shape = model.config.num_layers, model.config.num_heads
        self.depths = long_texts.depths_of(self.options.depths)
        self._tell, self._reader = tell, Reader(model, self.options.ablated)
        # What all other parts rest on: a stopped run goes on with the same.
        every = [
            *texts.chosen,
            *texts.judged,
            *(np.array(part) for each in texts.needles for one in each for part in one),
        ]
        digest = np.frombuffer(hashlib.sha256(np.concatenate(every).astype(np.int32).tobytes()).digest(), np.uint8)
        if (self.part("texts", lambda: {"digest": digest})["digest"] != digest).any():
            raise Damaged(f"{folder} was measured on other texts, of another version; start in another folder")

    def part(self, name: str, measure: Callable[[], Part]) -> Part:
        """What ``measure`` returns, or what it returned before the run was stopped."""
        file = self.folder / f"{name}.npz"
        if not file.exists():
            self._tell(description=name)
            content = io.BytesIO()
            np.savez_compressed(content, **measure())
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, content.getvalue())
        self._tell(advance=1)
        with np.load(file) as kept:
            return {key: kept[key] for key in kept}

    def reader(self, length: int) -> Reader:
        """Of prompts of this length; only the last one's compiled functions are kept."""
        if self._reader.length != length:
            self._reader = Reader(self.model, length)
        return self._reader

    def text(self, number: int) -> np.ndarray:
        """The tokens of a text; judged ones count on from the chosen ones."""
        return [*self.texts.chosen, *self.texts.judged][number]

    def prompts(self, number: int, length: int) -> list[long_texts.Prompt]:
        """Those of a text, one for each depth."""
        text, each = self.text(number), zip(self.texts.needles[number], self.depths, strict=True)
        return [long_texts.prompt(text, needle, depth, length, self.texts.first) for needle, depth in each]

    def read(self, number: int, length: int, gates: Any = None) -> Iterator[tuple[long_texts.Prompt, Any]]:
        """Each prompt of a text, and the cache with all of it but the question. What prompts share is read once."""
        reader, at = self.reader(length), 0
        shared = reader.empty()
        for prompt in self.prompts(number, length):
            if prompt.start < at:
                raise ValueError(f"long.depths: {length} tokens have no room for {self.options.depths} depths")
            shared, at = reader.read(shared, prompt.tokens[at : prompt.start], gates), prompt.start
            yield prompt, reader.read(shared, prompt.tokens[prompt.start : prompt.asked], gates)

    def answer(self, length: int, cache: Any, prompt: long_texts.Prompt, **options: Any) -> Answer:
        """What the model writes, and the retrieval scores."""
        tokens, _, _, asked, needle, answer = prompt
        return self.reader(length).answer(cache, tokens, asked, needle, answer, **options)

    def needles(self, number: int, length: int, gates: Any = None) -> Part:
        """``found [D]``, ``right [D]`` (the share of the answer's tokens) and ``score [D,L,N]`` at each depth."""
        answers = [
            self.answer(length, cache, prompt, gates=gates) for prompt, cache in self.read(number, length, gates)
        ]
        return {
            "found": np.array([answer.right.all() for answer in answers]),
            "right": np.array([answer.right.mean() for answer in answers]),
            "score": np.stack([answer.score for answer in answers]),
        }


# ---- what is measured


def _measured(bench: _Bench, data: sequences.Sequences, ordinary: np.ndarray) -> dict[str, Any]:
    options, matched = bench.options, bench.config.language.matched
    chosen, judged = range(options.chosen), range(options.chosen, options.chosen + options.texts)
    rng = np.random.default_rng(bench.config.language.seed)

    choose = [bench.part(f"chosen {i}", lambda i=i: bench.needles(i, options.ablated)) for i in chosen]
    scores = np.concatenate([part["score"] for part in choose]).mean(0)
    norms = bench.part("norms", lambda: {"norms": output_norms(bench.model, jnp.asarray(data.chosen[:4]))})["norms"]
    order = np.argsort(-scores, axis=None, kind="stable")
    ranked = [tuple(int(i) for i in np.unravel_index(at, scores.shape)) for at in order]
    group = [at for at in ranked if scores[at] >= COPIES] or ranked[:1]
    groups = [group, *paths.matched_groups(group, matched, norms, [], rng)]
    found: dict[str, Any] = {"scores": scores, "group": group, "groups": groups, "twins": []}

    def off(heads_off: paths.Heads) -> np.ndarray:
        gates = np.ones(bench.shape)
        for at in heads_off:
            gates[at] = 0.0
        return gates

    # Long ones first: a run that does not fit into memory says so early.
    found["needles"] = {
        length: [bench.part(f"needles {length} {i}", lambda i=i, n=length: bench.needles(i, n)) for i in judged]
        for length in sorted(options.lengths, reverse=True)
    }
    found["hidden"] = [bench.part(f"hidden {i}", lambda i=i: _hidden(bench, i, groups)) for i in judged]
    every = {f"off {at}": one for at, one in enumerate(groups)}
    for size in options.sizes:
        if size <= len(ranked) // 2:
            every[f"largest {size}"] = ranked[:size]
            every[f"random {size}"] = paths.matched_groups(ranked[:size], 1, norms, [], rng)[0]
    found["off"] = {
        name: [
            bench.part(f"{name} {i}", lambda i=i, h=one: bench.needles(i, options.ablated, off(h))) for i in judged[:2]
        ]
        for name, one in every.items()
    }
    every["whole"] = []
    judge = _Judge(bench)
    found["beside"] = {
        name: bench.part(f"beside {name}", lambda h=one: judge(off(h)))
        for name, one in every.items()
        if name.startswith(("off", "whole"))
    }
    found["each"] = bench.part("each head off", lambda: _each_off(bench, judged[0]))
    found["sinks"] = [bench.part(f"sinks {i}", lambda i=i: _sinks(bench, i)) for i in judged[:2]]
    found["streams"] = [bench.part(f"streams {i}", lambda i=i: _streams(bench, i)) for i in judged[:2]]
    found["distances"] = [bench.part(f"distances {i}", lambda i=i: _distances(bench, i, ordinary)) for i in range(2)]
    found["patterns"] = bench.part("patterns", lambda: _patterns(bench, data))
    found["pictures"] = _pictures(bench)
    found["zoom"] = bench.part("zoom", lambda: _zoom(bench, judged[0]))
    return found


def _twin(bench: _Bench, data: sequences.Sequences, pictures: bool) -> dict[str, Any]:
    """What a model with random parameters does on the first judged text."""
    options = bench.options
    needles = bench.part("needles", lambda: bench.needles(options.chosen, options.ablated))
    found = {"scores": needles["score"].mean(0), "patterns": bench.part("patterns", lambda: _patterns(bench, data))}
    if pictures:
        found["pictures"] = _pictures(bench)
        found["zoom"] = bench.part("zoom", lambda: _zoom(bench, options.chosen))
    return found


def _hidden(bench: _Bench, number: int, groups: list[paths.Heads]) -> Part:
    """Needles found if heads do not see some places while they read the question and answer.

    ``group [G,D]``: the needle is hidden from each of the groups; ``elsewhere [D]``: as many tokens right before the
    needle, or after it, from the first group.
    """
    length, found, elsewhere = bench.options.ablated, [], []
    for prompt, cache in bench.read(number, length):
        at, of_group = np.arange(length), []
        needle = (at >= prompt.start) & (at < prompt.stop)
        for group in groups:
            blind = np.zeros(bench.shape, bool)
            blind[tuple(np.transpose(group))] = True
            of_group.append(bench.answer(length, cache, prompt, blind=blind, hidden=needle).right.all())
            if group is groups[0]:
                size = prompt.stop - prompt.start
                other = np.roll(needle, -size if prompt.start > size else size)
                elsewhere.append(bench.answer(length, cache, prompt, blind=blind, hidden=other).right.all())
        found.append(of_group)
    return {"group": np.array(found).T, "elsewhere": np.array(elsewhere)}


class _Judge:
    """What else a model does with heads off: the loss of ordinary text in nats, and short answers without a text.

    The loss is that of tokens that continue an earlier bigram, which can be copied, and of all others.
    """

    def __init__(self, bench: _Bench):
        texts, self.model = bench.texts, bench.model
        first = np.array([texts.first])
        self.texts = np.stack([np.concatenate([first, text[:LOSS]]) for text in texts.judged]).astype(np.int32)
        self.last, self.right = (np.array(each) for each in zip(*((len(t), r) for t, r in texts.facts), strict=True))
        self.starts = np.zeros((len(texts.facts), 1 + self.last.max()), np.int32)
        for row, (tokens, _) in zip(self.starts, texts.facts, strict=True):
            row[: 1 + len(tokens)] = [texts.first, *tokens]
        copied = sequences.continue_bigrams(self.texts)
        self.places = np.stack([copied, ~copied, np.ones_like(copied)])
        self._loss, self._facts = jax.jit(self._loss_of_texts), jax.jit(self._right_facts)

    def __call__(self, gates: np.ndarray) -> Part:
        """Both."""
        return {"loss": self.loss(gates), "facts": self.facts(gates)}

    def loss(self, gates: np.ndarray) -> np.ndarray:
        """``[3]``: at tokens that continue a bigram, at others, and at all."""
        return np.asarray(self._loss(self.model.state, jnp.asarray(gates, jnp.float32)))

    def facts(self, gates: np.ndarray) -> np.ndarray:
        """bool ``[F]``: which short answers are right."""
        return np.asarray(self._facts(self.model.state, jnp.asarray(gates, jnp.float32)))

    def _loss_of_texts(self, state: Any, gates: Array) -> Array:
        model, per_layer = nnx.merge(self.model.graph, state), [{"head_gate": gate} for gate in gates]

        def one_text(tokens: Array) -> Array:
            return _losses(model, model(tokens[None], per_layer=per_layer)[0], tokens)

        losses = jax.lax.map(one_text, self.texts)
        return jnp.stack([losses.mean(where=place) for place in self.places])

    def _right_facts(self, state: Any, gates: Array) -> Array:
        model, per_layer = nnx.merge(self.model.graph, state), [{"head_gate": gate} for gate in gates]
        hidden = model(self.starts, per_layer=per_layer)[np.arange(len(self.last)), self.last]
        return model.logits(hidden).argmax(-1) == self.right


def _losses(model: Any, hidden: Array, tokens: Array) -> Array:
    """``[T-1]``: the loss at each next token, for hidden states ``[T,M]``; all logits at once would not fit."""
    padding = -(len(tokens) - 1) % PLACE
    states = jnp.pad(hidden[:-1], ((0, padding), (0, 0))).reshape(-1, PLACE, hidden.shape[-1])

    def some(both: tuple[Array, Array]) -> Array:
        states, right = both
        logits = model.logits(states).astype(jnp.float32)
        return jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, right[:, None], 1)[:, 0]

    right = jnp.pad(tokens[1:], (0, padding)).reshape(-1, PLACE)
    return jax.lax.map(some, (states, right)).ravel()[: len(tokens) - 1]


def _each_off(bench: _Bench, number: int) -> Part:
    """``whole [1]`` and ``each [L,N,1]``: the share of the answers' tokens that are right with one head off.

    On one needle in a text of the shortest length. The head is off while the question is read and answered.
    """
    length = min(bench.options.lengths)
    prompt, cache = list(bench.read(number, length))[bench.options.depths // 2]

    def accuracy(gates: np.ndarray) -> list[float]:
        return [float(bench.answer(length, cache, prompt, gates=gates).right.mean())]

    one_off = 1.0 - np.eye(int(np.prod(bench.shape))).reshape(-1, *bench.shape)
    each = [accuracy(gates) for gates in one_off]
    return {"whole": np.array(accuracy(np.ones(bench.shape))), "each": np.array(each).reshape(*bench.shape, 1)}


def _sinks(bench: _Bench, number: int) -> Part:
    """``first`` and ``entropy [lengths,L,N]``: weight on the first token, and nats, of each length's last queries."""
    longest = max(bench.options.lengths)
    reader, found = bench.reader(longest), []
    cache, at = reader.empty(), 0
    tokens = np.concatenate([[bench.texts.first], bench.text(number)])
    for length in long_metrics.sink_lengths(bench.options.lengths):
        cache, at = reader.read(cache, tokens[at : length - ROWS]), length - ROWS
        weights = reader.rows(cache, tokens[at:length])
        nats = [-(layer * np.log(np.maximum(layer, 1e-30))).sum(-1).mean(-1) for layer in weights]
        found.append((weights[..., 0].mean(-1), np.stack(nats)))
    first, entropy = zip(*found, strict=True)
    return {"first": np.stack(first), "entropy": np.stack(entropy)}


def _streams(bench: _Bench, number: int) -> Part:
    """``loss [4,T-1]``: that of each next token, in each of ``STREAMS``.

    The window is a rolling cache. With four first tokens, or without the first, it is a mask: positions stay what they
    are.
    """
    options, texts, model = bench.options, bench.texts, bench.model
    window = options.window
    tokens = np.concatenate([[texts.first], bench.text(number)[: options.streamed - 1]]).astype(np.int32)

    @jax.jit
    def masked(state: Any, mask: Any) -> Array:
        whole = nnx.merge(model.graph, state)
        return _losses(whole, whole(tokens[None], mask=mask)[0], jnp.asarray(tokens))

    @jax.jit
    def rolled(state: Any) -> Array:
        whole = nnx.merge(model.graph, state)
        size = min(window, len(tokens))
        chunks = jnp.asarray(tokens[: len(tokens) // size * size].reshape(-1, 1, size))

        def chunk(cache: Any, tokens: Array) -> tuple[Any, Array]:
            hidden, cache = whole(tokens, cache=cache)
            return cache, hidden[0]

        _, hidden = jax.lax.scan(chunk, whole.init_cache(1, size, rolling=True), chunks)
        return _losses(whole, hidden.reshape(-1, hidden.shape[-1]), chunks.ravel())

    sinks = masks.Causal() & (masks.SlidingWindow(window - 1) | masks.Prefix(4))
    found = [masked(model.state, masks.Causal()), rolled(model.state), masked(model.state, sinks)]
    found.append(masked(model.state, masks.Causal() & ~masks.Prefix(1)))
    return {"loss": np.stack([np.asarray(loss)[: len(found[1])] for loss in found])}


def _distances(bench: _Bench, number: int, ordinary: np.ndarray) -> Part:
    """``score [distances,L,N]``: weight on what followed the same token, in random tokens repeated from so far back."""
    longest = max(bench.options.lengths)
    reader, rng = bench.reader(longest), np.random.default_rng([bench.config.language.seed, number])
    tokens = np.concatenate([[bench.texts.first], rng.choice(ordinary, longest - ROWS - 1)])
    cache, found = reader.read(reader.empty(), tokens), []
    for distance in bench.options.distances:
        again = tokens[len(tokens) - distance :][:ROWS]
        weights, rows = reader.rows(cache, again), np.arange(1, len(again))  # the first has no token before it
        found.append(weights[:, :, rows, len(tokens) - distance + rows + 1].mean(-1))
    return {"score": np.stack(found)}


def _patterns(bench: _Bench, data: sequences.Sequences) -> Part:
    """``induction [L,N]`` on random tokens that repeat, and every statistic ``[L,N]`` on text."""
    model, texts = bench.model, bench.texts
    length = min(COMPARED, max(bench.options.lengths))
    text = np.stack([np.concatenate([[texts.first], text[: length - 1]]) for text in texts.judged[:2]]).astype(np.int32)

    def statistics(state: Any, tokens: Array, names: tuple[str, ...]) -> dict[str, Array]:
        asked = {"names": names, "tokens": tokens}
        forward = nnx.capture(lambda model: model(tokens, sow_statistics=asked), nnx.Intermediate)
        layers = heads.collect(forward(nnx.merge(model.graph, state))[1], "attention_statistics")
        return {name: jnp.stack([layer[name].mean(0) for layer in layers]) for name in names}

    of = jax.jit(statistics, static_argnums=2)
    repeated = of(model.state, jnp.asarray(data.tested), ("induction",))
    return jax.tree.map(np.asarray, of(model.state, jnp.asarray(text), head_scores.ALL) | repeated)


def _pictures(bench: _Bench) -> list[Part]:
    """Two texts in blocks."""

    def measure(text: np.ndarray) -> Part:
        tokens = np.concatenate([[bench.texts.first], text[: bench.options.pictured - 1]])
        return {"weights": _pictured(bench.model, tokens)}

    return [bench.part(f"pictures {i}", lambda t=text: measure(t)) for i, text in enumerate(bench.texts.judged[:2])]


def _pictured(model: Model, tokens: np.ndarray) -> np.ndarray:
    """``[L,N,SPANS,SPANS]``: the weights of a text in blocks."""

    @jax.jit
    def blocks(state: Any, tokens: Array) -> Array:
        forward = nnx.capture(lambda model: model(tokens, sow_heads=True), nnx.Intermediate)
        sown: Any = forward(nnx.merge(model.graph, state))[1]
        own = sown["layers"]["attention"]["attention_heads"][0]

        def of_layer(both: tuple[Array, Array]) -> Array:
            return heads.coarse_weights(*both, SPANS, is_causal=True)[0]

        return jax.lax.map(of_layer, (own["query"], own["key"]))

    return np.asarray(blocks(model.state, jnp.asarray(tokens[None])))


def _zoom(bench: _Bench, number: int) -> Part:
    """Weights ``[L,N,SPANS,SPANS]`` among the ``places [SPANS]`` of the longest text that a needle is about.

    The first two tokens, the needle and what is around it, and the question with its answer.
    """
    longest = max(bench.options.lengths)
    reader, prompt = bench.reader(longest), bench.prompts(number, longest)[bench.options.depths // 2]
    tokens, around = prompt.tokens, prompt.start - 4
    parts = [(0, 2), (around, around + ROWS), (longest - (SPANS - ROWS - 2), longest)]
    places = np.concatenate([np.arange(*part) for part in parts])
    cache, at, found = reader.empty(), 0, []
    for start, stop in parts:
        cache, at = reader.read(cache, tokens[at:start]), start
        found.append(reader.rows(cache, tokens[start:stop])[..., places])
    return {"weights": np.concatenate(found, 2), "places": places, "tokens": tokens[places]}


# ---- what is told


def _findings(config: Config, tokenizer: Any, found: dict[str, Any], seconds: float) -> Findings:
    metrics = long_metrics.metrics_of(config, found)
    twin, each = found["twins"][0], found["each"]
    roles = _roles(found)
    statistics = {name: np.stack([one["patterns"][name] for one in (twin, found)])[None] for name in head_scores.ALL}
    retrieval = [twin["scores"], found["scores"]]
    scores = {"retrieval": np.stack(retrieval)[None], **{name: statistics[name] for name in head_scores.TRACKED}}
    pictures = [np.stack([part["weights"] for part in one["pictures"]]) for one in (twin, found)]
    mean = np.stack([each.mean(0) for each in pictures])
    flat = [each.reshape(len(each), -1, *each.shape[3:]) for each in pictures]
    rows = jnp.ones(mean.shape[-1], bool)
    divergence = np.stack([np.asarray(heads.pattern_divergence(jnp.asarray(each.mean(0)), rows)) for each in flat])
    noise = np.stack([np.asarray(evaluate.noise_floor(*map(jnp.asarray, each[[0, -1]]), rows)) for each in flat])
    examples = [np.stack([pictures[i][0], one["zoom"]["weights"]]) for i, one in enumerate((twin, found))]
    profile = np.stack([np.asarray(_profiles(each)) for each in mean])
    spans = mean.shape[-1]
    return Findings(
        name=config.name,
        description=config.description,
        config=dataclasses.asdict(config),
        environment=devices.environment(seconds),
        seeds=[config.language.seed],
        places=["answers"],
        tokens=[_span_names(config.long.pictured, spans), _words(found["zoom"], tokenizer)],
        metric_steps=np.zeros(0, int),
        metrics={},
        look_steps=np.array([0, 1]),  # the twin, the model
        scores=scores,
        statistics=statistics,
        offsets=np.arange(1 - spans, spans) * (config.long.pictured // spans),
        offset_profile=profile[None],
        example_steps=np.array([0, 1]),
        example_weights=np.stack(examples),
        mean_weights=mean,
        divergence=divergence[None],
        noise=noise[None],
        accuracy=each["whole"][None],
        ablated=each["each"][None],
        groups={},
        paths={},
        heads=evaluate.head_rows([config.language.seed], roles),
        curves=long_metrics.curves(config, found),
        grids=long_metrics.grids(config, found),
        controls=long_metrics.controls(config, metrics),
        claims=long_metrics.verdicts(config, metrics),
    )


def _roles(found: dict[str, Any]) -> heads.Roles:
    """The role of every head ``[1,L,N]``, tested against the twins'; weak if it is not among its model's strongest."""

    def of(one: dict[str, Any]) -> dict[str, np.ndarray]:
        return {"retrieval": one["scores"], **{name: one["patterns"][name] for name in PATTERNS[1:]}}

    own, twins = of(found), [of(twin) for twin in found["twins"]]
    null = {name: np.stack([twin[name] for twin in twins]) for name in PATTERNS}
    return heads.roles({name: score[None] for name, score in own.items()}, null, baseline=own)


def _profiles(weights: np.ndarray) -> Array:
    """``[L,N,O]``: the mean weight at each distance, in spans."""
    flat = jnp.asarray(weights).reshape(-1, *weights.shape[2:])
    return jax.vmap(heads.offset_profile)(flat).reshape(*weights.shape[:2], -1)


def _span_names(length: int, spans: int) -> list[str]:
    ends = [-(-i * length // spans) for i in range(spans + 1)]
    return [f"{start}-{end - 1}" for start, end in zip(ends, ends[1:], strict=False)]


def _words(zoom: Part, tokenizer: Any) -> list[str]:
    return [tokenizer.decode([int(token)], skip_special_tokens=False) for token in zoom["tokens"]]
