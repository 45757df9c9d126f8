"""Circuits beside those of TransformerLens and circuitkit: the same tiny models, tokens and metric, where installed."""

import importlib.metadata
import json
import sys

import numpy as np
import pytest

from jattn import circuits, interop
from jattn_experiments.bench import circuit_peers

V, T, B = 31, 6, 2
RIGHT, OTHER = 3, 7
QUIET = {"progress": False}
KINDS = ("gpt2", "rotary", "grouped")  # circuitkit refuses a folder whose name has "llama" in it
pytestmark = [
    pytest.mark.slow,
    # What the peers and what they import warn of says nothing about jattn.
    pytest.mark.filterwarnings("ignore"),
]


def metric(logits, tokens):
    return logits[-1, RIGHT] - logits[-1, OTHER]


def tokens_of(seed=0):
    """The last token is never changed, as at the end of a question."""
    rng = np.random.default_rng(seed)
    clean = rng.integers(0, V - 2, (B, T))
    corrupt = clean.copy()
    corrupt[:, [0, 3]] = (corrupt[:, [0, 3]] + rng.integers(1, V - 2, (B, 2))) % (V - 2)
    return clean, corrupt


def write_tokenizer(folder):
    """Words are numbers; the last one is padding. Without a token at the begin, what is read is what was drawn."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({str(i): i for i in range(V)}, unk_token="0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": str(V - 1), "eos_token": str(V - 2)}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """``of(kind)``: the folder of a tiny random model, and that model in jattn."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    made = {}

    def of(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            torch.manual_seed(0)
            if kind == "gpt2":
                sizes = {"n_layer": 3, "n_head": 4, "n_embd": 16, "n_positions": 32, "n_ctx": 32}
                config = transformers.GPT2Config(
                    vocab_size=V, **sizes, bos_token_id=V - 2, eos_token_id=V - 2, initializer_range=0.3
                )
                model = transformers.GPT2LMHeadModel(config)
            else:
                sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16, "intermediate_size": 24}
                config = transformers.LlamaConfig(
                    vocab_size=V, **sizes, num_key_value_heads=2 if kind == "grouped" else 4,
                    max_position_embeddings=32, initializer_range=0.3,
                )  # fmt: skip
                model = transformers.LlamaForCausalLM(config)
            with torch.no_grad():  # biases and norms that are not zeros and ones
                for parameter in model.parameters():
                    parameter += 0.1 * torch.randn_like(parameter)
            model.save_pretrained(folder)
            write_tokenizer(folder)
            made[kind] = folder, interop.load(folder, **QUIET)
        return made[kind]

    return of


def close(found, expected, **tolerances):
    """To 1e-4 of each, but no closer than float32 can sum: 1e-6 of the largest."""
    tolerances = {"rtol": 1e-4, "atol": 1e-6 * np.abs(expected).max(), **tolerances}
    np.testing.assert_allclose(found, expected, **tolerances)


# TransformerLens 4: an edge for each position, the gradient at the corrupt tokens, scores toward the clean ones, and no
# grouped keys. So jattn's clean tokens are its corrupt ones, and its edges are summed over positions.


@pytest.fixture(scope="module")
def bridges(models):
    # circuitkit, which needs 3.8, refuses to be imported after it, so 3.8 is not imported here.
    if not any(one.version.startswith("4.") for one in importlib.metadata.distributions(name="transformer-lens")):
        pytest.skip("TransformerLens 4 is not installed")
    analysis = pytest.importorskip("transformer_lens.tools.analysis.attribution_patching")
    from transformer_lens.model_bridge import TransformerBridge

    made = {}

    def of(kind):
        if kind not in made:
            made[kind] = TransformerBridge.boot_transformers(str(models(kind)[0]), device="cpu")
            made[kind].eval()
        return made[kind], analysis

    return of


def name_in_lens(node):
    at = f"{node.layer}" if node.head is None else f"{node.layer}.{node.head}"
    kinds = {"attn_head_out": "head", "mlp_out": "mlp", "mlp_in": "mlp", "q_input": "query", "k_input": "key"}
    whole = {"embed": "embedding", "logits": "logits"}
    return whole.get(node.kind) or f"{kinds.get(node.kind, 'value')} {at}"


def torch_metric(logits):
    return logits[0, -1, RIGHT] - logits[0, -1, OTHER]


@pytest.mark.parametrize("kind", ["gpt2", "rotary"])
def test_scores_are_those_of_transformer_lens(models, bridges, kind):
    import torch

    (_, model), (bridge, analysis), (clean, corrupt) = models(kind), bridges(kind), tokens_of()
    graph, config = circuits.graph_of(model), analysis.EdgeAttributionConfig(granularity="edge")
    theirs = analysis.attribution_patch(bridge, torch.tensor(clean), torch.tensor(corrupt), torch_metric, config)
    expected, seen = np.zeros(graph.edges.shape), np.zeros(graph.edges.shape, bool)
    writers, readers = graph.writers, graph.readers
    for (writer, reader), score in theirs.edge_scores.items():
        at = readers.index(name_in_lens(reader)), writers.index(name_in_lens(writer))
        expected[at] += score
        seen[at] = True
    np.testing.assert_array_equal(seen, graph.edges)
    found = circuits.edge_attribution(model, corrupt, clean, metric, **QUIET)
    close(found.scores, expected)


@pytest.mark.parametrize("kind", ["gpt2", "rotary"])
def test_a_circuit_is_that_of_transformer_lens(models, bridges, kind):
    import torch

    (_, model), (bridge, analysis), (clean, corrupt) = models(kind), bridges(kind), tokens_of(1)
    clean, corrupt, graph = clean[:1], corrupt[:1], circuits.graph_of(model)
    with analysis._edge_hook_flags(bridge):
        names = analysis._edge_hook_names(graph.num_layers)
        cache = analysis.cache_activation_and_gradient(
            bridge, torch.tensor(corrupt), torch_metric, names_filter=names, compute_gradient=False
        )
    every = analysis.enumerate_edges(bridge, cache)
    for share in (0.3, 0.8):
        chosen = graph.edges & (np.random.default_rng(0).random(graph.edges.shape) < share)
        pairs = {(graph.writers[w], graph.readers[r]) for r, w in np.argwhere(chosen)}
        kept = [(writer, reader) for writer, reader in every if (name_in_lens(writer), name_in_lens(reader)) in pairs]
        theirs = analysis.faithfulness(bridge, torch.tensor(clean), torch.tensor(corrupt), torch_metric, kept)
        change = theirs.full_metric - theirs.corrupt_metric
        found = circuits.run_circuit(model, clean, corrupt, chosen, metric)
        np.testing.assert_allclose(found, theirs.corrupt_metric + theirs.recovered * change, atol=1e-5 * abs(change))
        assert abs(found[0] - theirs.full_metric) > 1e-2 * abs(change)  # something is cut


def test_transformer_lens_takes_no_grouped_keys(models, bridges):
    import torch

    (bridge, analysis), (clean, corrupt) = bridges("grouped"), tokens_of()
    config = analysis.EdgeAttributionConfig(granularity="edge")
    with pytest.raises(ValueError, match="GQA/MQA"):
        analysis.attribution_patch(bridge, torch.tensor(clean), torch.tensor(corrupt), torch_metric, config)


# circuitkit: a key and a value for each head that reads one, so jattn's are their sums. Its text is tokenised, and
# a mean over a batch is divided by the size of the batch twice.


class Examples(list):
    templated = True  # no token is put before the text


def in_batches(clean, corrupt, size):
    text = lambda rows: [" ".join(map(str, row)) for row in rows]
    return Examples(
        (text(clean[i : i + size]), text(corrupt[i : i + size]), np.zeros(len(clean[i : i + size])))
        for i in range(0, len(clean), size)
    )


@pytest.fixture(scope="module")
def kits(models):
    circuitkit = pytest.importorskip("circuitkit")
    made = {}

    def of(kind):
        if kind not in made:
            made[kind] = circuitkit.load_model(str(models(kind)[0]), dtype="float32", device="cpu")
        return made[kind]

    return of


def batch_metric(logits, clean_logits, lengths, labels):
    return logits[:, -1, RIGHT] - logits[:, -1, OTHER]


def of_kit(graph, theirs, r, w):
    """circuitkit's edges that are one of jattn's: more than one where heads share a key."""
    shared = graph.num_heads // graph.num_kv_heads
    kind, _, at = graph.writers[w].partition(" ")
    layer, _, head = at.partition(".")
    writer = {"embedding": "input", "head": f"a{layer}.h{head}", "mlp": f"m{layer}"}[kind]
    kind, _, at = graph.readers[r].partition(" ")
    layer, _, head = at.partition(".")
    if kind in ("logits", "mlp"):
        names = ["logits" if kind == "logits" else f"m{layer}"]
    elif kind == "query":
        names = [f"a{layer}.h{head}<q>"]
    else:
        names = [f"a{layer}.h{int(head) * shared + i}<{kind[0]}>" for i in range(shared)]
    return [theirs.edges[f"{writer}->{name}"] for name in names]


@pytest.mark.parametrize("method", ["eap", "eap-ig"])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_circuitkit(models, kits, kind, method):
    model, kit, (clean, corrupt) = models(kind)[1], kits(kind), tokens_of()
    from circuitkit.backends.eap.attribute import attribute
    from circuitkit.backends.eap.graph import Graph

    graph = circuits.graph_of(model)
    found = circuits.edge_attribution(model, clean, corrupt, metric, method=method, steps=4, **QUIET)
    name = {"eap": "EAP", "eap-ig": "EAP-IG-inputs"}[method]
    for size in (1, B):
        theirs = Graph.from_model(kit)
        summed = lambda *given: batch_metric(*given).sum()
        attribute(kit, theirs, in_batches(clean, corrupt, size), summed, name, ig_steps=4, quiet=True)
        expected, seen = np.zeros(graph.edges.shape), []
        for r, w in np.argwhere(graph.edges):
            edges = of_kit(graph, theirs, r, w)
            expected[r, w] = sum(float(edge.score) for edge in edges)
            seen += [edge.name for edge in edges]
        assert sorted(seen) == sorted(theirs.edges)
        close(found.scores, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_circuit_is_that_of_circuitkit(models, kits, kind):
    model, kit, (clean, corrupt) = models(kind)[1], kits(kind), tokens_of(1)
    from circuitkit.backends.eap.evaluate import evaluate_graph
    from circuitkit.backends.eap.graph import Graph

    graph = circuits.graph_of(model)
    every = np.stack([graph.edges, np.zeros_like(graph.edges)])
    whole, none = circuits.run_circuit(model, clean, corrupt, every, metric)
    change = np.abs(whole - none).max()
    for share in (0.3, 0.8):
        chosen = graph.edges & (np.random.default_rng(0).random(graph.edges.shape) < share)
        theirs = Graph.from_model(kit)
        for r, w in np.argwhere(chosen):
            for edge in of_kit(graph, theirs, r, w):
                edge.in_graph = True
        theirs.nodes_in_graph[:] = True
        expected = evaluate_graph(kit, theirs, in_batches(clean, corrupt, B), batch_metric, quiet=True)
        found = circuits.run_circuit(model, clean, corrupt, chosen, metric)
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-5 * change)
        assert np.abs(found - whole).max() > 1e-2 * change  # something is cut


# The benchmark: made-up numbers, and jattn alone on a tiny model.


def test_the_benchmark_asks_a_fresh_process(tmp_path, monkeypatch):
    small = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 12}
    circuit_peers.write_model(tmp_path, 1, {**circuit_peers.SIZES, **small, "vocab_size": 2100})
    found = circuit_peers.timed({"jattn": sys.executable, "no such tool": sys.executable}, str(tmp_path), 4, 2)
    assert found["jattn"]["first"] > 0 and len(found["jattn"]["seconds"]) == 2
    assert found["no such tool"]["failed"].startswith("KeyError")
    rows = circuit_peers.peaks(sys.executable, "jattn", str(tmp_path), 256)
    assert [row["length"] for row in rows] == [128, 256] and all(row["peak"] > 2**20 for row in rows)
    with monkeypatch.context() as patch:
        patch.setattr(circuit_peers, "LIMIT", 2**20)
        rows = circuit_peers.peaks(sys.executable, "jattn", str(tmp_path), 256)
    assert [row["length"] for row in rows] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert {row["reason"] for row in rows} == {circuit_peers.OVER}


def test_the_tables_say_what_failed(tmp_path):
    ours = {"first": 9.0, "median": 2.0, "seconds": [2.0, 2.0], "cpu": [3.0, 3.0]}
    theirs = {"first": 1.0, "median": 5.0, "seconds": [5.0], "cpu": [6.0]}
    refused = {"median": None, "seconds": [], "cpu": [], "failed": "ValueError: no"}
    contents = {
        "environment": {"cores": "2"},
        "times": [{"model": "m", "length": 8, "tools": {"jattn": ours, "circuitkit": theirs, "lens": refused}}],
        "peaks": [
            {"model": "m", "tool": "jattn", "length": 8, "peak": 3 * 2**30, "seconds": 4.0},
            {"model": "m", "tool": "jattn", "length": 16, "result": "failed", "reason": circuit_peers.OVER},
        ],
    }
    circuit_peers.write(contents, tmp_path)
    text = (tmp_path / "circuit_peers.md").read_text()
    assert "| m | 8 | circuitkit | 1.00 | 5.00 | 2.50 | 5.00 | 6.00 |  |" in text
    assert "| m | 8 | lens | - | - | - | - | - | ValueError: no |" in text
    assert "| m | jattn | 8 | 3.00 | 4.00 |  |" in text and "| m | jattn | 16 | - | - | more than 8 GiB |" in text
    assert json.loads((tmp_path / "circuit_peers.json").read_text()) == contents
