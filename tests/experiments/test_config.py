"""Configs: what is read, what is rejected, and the error messages."""

import dataclasses
import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_experiments import config, tasks

CONFIGS = sorted(config.CONFIGS.glob("*.yaml"))


def load(tmp_path, *texts_and_options):
    """Loads a config from texts and options; each text with a newline is written to its own file."""
    arguments = []
    for index, text in enumerate(texts_and_options):
        if "\n" in text:
            (tmp_path / f"{index}.yaml").write_text(text)
            arguments += ["--config", str(tmp_path / f"{index}.yaml")]
        else:
            arguments += text.split()
    return config.load(arguments)


BASE = "name: base\ntrain: {steps: 100, batch: 4}\ncontrols: {one_head: {model.num_heads: 1, train.steps: 60}}\n"


def test_files_layer_and_options_win(tmp_path):
    settings, out, *_ = load(tmp_path, BASE, "train: {steps: 200}\nmodel: {position: rotary}\n", "--train.batch 8")
    assert (settings.train.steps, settings.train.batch, settings.model.position) == (200, 8, "rotary")
    assert out == Path("runs/base")
    assert load(tmp_path, BASE, "--out elsewhere")[1] == Path("elsewhere")


def test_a_control_is_the_config_with_its_overrides(tmp_path):
    settings = load(tmp_path, BASE).config
    control = config.variants(settings)["one_head"]
    assert (control.model.num_heads, control.train.steps, control.train.batch) == (1, 60, 4)
    assert control.controls == {} and control.claims == []
    assert dataclasses.replace(control.model, num_heads=4) == settings.model


@pytest.mark.slow
def test_a_sweep_is_a_product_of_values(tmp_path):
    words = "--sweep=model.num_heads=1,4 --sweep model.position=rotary,none --check"
    settings, _, check, *_ = load(tmp_path, BASE, words)
    assert check and not load(tmp_path, BASE).check
    points = itertools.product((1, 4), ("rotary", "none"))
    names = [f"model.num_heads={heads},model.position={position}" for heads, position in points]
    assert list(config.variants(settings)) == ["one_head", *names]
    last = config.variants(settings)[names[-1]]
    assert (last.model.num_heads, last.model.position, last.train.steps) == (4, "none", 100)
    assert last.sweep == {} and last.controls == {} and last.name == f"base/{names[-1]}"
    same = load(tmp_path, BASE, "sweep: {model.num_heads: [1, 4], model.position: [rotary, none]}\n").config
    assert same == settings


def test_a_value_of_a_sweep_brings_others_along(tmp_path):
    values = "[1, {model.num_heads: 2, train.steps: 60}]"
    settings = load(tmp_path, BASE, f"sweep: {{model.num_heads: {values}, model.position: [none]}}\n").config
    points = config.variants(settings)
    assert list(points) == ["one_head", *(f"model.num_heads={heads},model.position=none" for heads in (1, 2))]
    varied = [(one.model.num_heads, one.model.position, one.train.steps) for one in list(points.values())[1:]]
    assert varied == [(1, "none", 100), (2, "none", 60)]
    words = ["--sweep", f"model.num_heads={values[1:-1]}", "--sweep", "model.position=none"]
    assert config.load(["--config", str(tmp_path / "0.yaml"), *words]).config == settings


def test_processes_are_no_part_of_the_config(tmp_path):
    words = "--distributed --coordinator host:1234 --num_processes 2 --process_id 1"
    request = load(tmp_path, BASE, words)
    assert request.processes == ("host:1234", 2, 1, None) and request.config == load(tmp_path, BASE).config
    assert load(tmp_path, BASE, "--distributed").processes == (None, None, None, None)
    assert load(tmp_path, BASE).processes is None


@pytest.mark.parametrize("text, message", [
    ("--replicate 0", "replicate: expected > 0, got 0"),
    ("--replicate_seed 5", "replicate_seed: expected --replicate as well"),
    ("--replicate 2 --sweep train.first_seed=7,8", "replicate: expected no sweep of train.first_seed, because fresh seeds replace it"),
    ("--replicate 5 --replicate_seed 1", "replicate_seed: expected seeds that were not used (the run uses 0 to 4), got 1"),
    ("controls: {a: {train.first_seed: 40}}\nreplicate: 2\nreplicate_seed: 42\n", "replicate_seed: expected seeds that were not used (control a uses 40 to 44), got 42"),
    ("--train.keep -1", "train.keep: expected >= 0, got -1"),
    ("--model.window 0", "model.window: expected > 0, got 0"),
    ("--model.kernel_scale 0", "model.kernel_scale: expected > 0, got 0.0"),
    ("--model.causal false", "model.causal: expected false for task.kind=histogram, which also counts later tokens, and true for others, got False"),
    ("--model.tied true", "model.tied: expected false, because this task's answers are not single tokens, got True"),
    ("--task.kind markov --task.prior doubly_stochastic --task.symbols 3", "task.symbols: expected at least 2, and exactly 2 with task.prior=doubly_stochastic, got 3"),
    ("--task.kind recall --task.pairs 9 --task.length 32", "task.pairs: expected at most 7 (a quarter of task.length, half of task.symbols), got 9"),
    ("--task.kind text --task.symbols 32 --task.length 32", "task.symbols: expected more than task.length=32, because all words may differ, got 32"),
    ("--sweep", "sweep: expected --sweep OPTION=VALUE,VALUE, each option once, got '--sweep'"),
    ("--sweep model.num_heads", "sweep: expected --sweep OPTION=VALUE,VALUE, each option once, got '--sweep model.num_heads'"),
    ("--sweep model.num_headz=1", "sweep: model.num_headz: no such option; did you mean model.num_heads?"),
    ("--sweep model.num_heads=2,0", "sweep: model.num_heads: expected > 0, got 0"),
    ("--sweep=model.num_heads", "sweep: expected --sweep OPTION=VALUE,VALUE, each option once"),
    ("--sweep model.num_heads=1 --sweep model.num_heads=2", "sweep: expected --sweep OPTION=VALUE,VALUE, each"),
    ("--sweep model.num_heads=1,1", "sweep.model.num_heads: expected distinct numbers or words"),
    ("--sweep task.offsets=[1,2],[3]", "sweep.task.offsets: expected distinct numbers or words"),
    ("sweep: {model.num_heads: []}\n", "sweep.model.num_heads: expected distinct numbers or words"),
    ("sweep: {model.num_heads: [1, {train.steps: 60}]}\n", "or {model.num_heads: VALUE, OPTION: VALUE} to change other options along with a value, got [1, {'train.steps': 60}]"),
    ("sweep: {model.num_heads: [{model.num_heads: 2, train.seeds: 2}]}\n", "numbers or words (and no train.seeds)"),
    ("sweep: {model.num_heads: [{model.num_heads: 2, 1: 2}]}\n", "expected names that are text (quote them in YAML)"),
    ("sweep: {model.num_heads: [{model.num_heads: 2, train.steps: 9}], train.steps: [3]}\n", "sweep.train.steps: two values of the same point set train.steps"),
    ("--sweep train.seeds=1,2", "sweep.train.seeds: expected distinct numbers or words (and no train.seeds)"),
    ("controls: {..: {model.num_heads: 2}}\n", "controls: expected names of letters, digits, '_' and '-', got '..'"),
    ("name: base/..\n", "name: expected only letters, digits, '_' and '-', got 'base/..'"),
    ("--sweep num_heads=2", "sweep: 'num_heads' is not an option; expected SECTION.OPTION"),
    ("--train.entropy_after 400", "train.entropy_after: expected 0 to 1, got 400"),
    ("--train.entropy_below 0", "train.entropy_below: expected a loss in nats > 0, or null for any loss, got 0.0"),
    ("--train.entropy_penalty -1", "train.entropy_penalty: expected >= 0, got -1.0"),
    ("--task.kind shift_bank --task.offsets [1,1]", "task.offsets: expected distinct numbers >= 1"),
    ("--task.kind shift_bank --train.place_weights [1]", "train.place_weights: expected 4 numbers > 0"),
    ("--task.kind induction --task.longest 17 --task.shortest 4", "task.longest: expected at most 16"),
    ("--task.kind reverse", "task.kind: expected one of copy, copy_string, histogram, hop, induction, markov, "),
    ("--task.kind skills --task.symbols 15", "task.symbols: expected at least half of task.length"),
    ("--mesh.heads 0", "mesh.heads: expected > 0, got 0"),
    ("--mesh.data 3", "mesh.data: expected a divisor of train.batch=4, got 3"),
    ("--mesh.data 4 --evaluate.batch 6", "mesh.data: expected a divisor of evaluate.batch=6, got 4"),
    ("--model.num_heads 6 --mesh.heads 4", "mesh.heads: expected a divisor of model.num_heads=6, got 4"),
    ("--model.num_heads 12 --model.num_kv_heads 6 --mesh.heads 4", "mesh.heads: expected a divisor or a multiple of model.num_kv_heads=6, got 4"),
    ("--mesh.sequence 5", "mesh.sequence: expected 2 * mesh.sequence to be a divisor of 32, the tokens of a sequence of task.kind=copy, got 5"),
    (
        "--task.kind markov --mesh.sequence 2",
        "mesh.sequence: expected 1 with task.kind in ('markov', 'recall', 'histogram') and "
        "model.position=relative_keys, because they need whole sequences, got 2",
    ),
    ("--task.kind copy_string --mesh.sequence 2", "mesh.sequence: expected 2 * mesh.sequence to be a divisor of 41, the tokens"),
    ("--mesh.heads 4", "controls.one_head: mesh.heads: expected a divisor of model.num_heads=1, got 4"),
    ("--evaluate.look_length 16", "evaluate.look_length: expected null, because only task.kind=shift_bank takes it, got 16"),
    ("--task.kind shift_bank --evaluate.look_length 16", "evaluate.look_length: expected null with model.position=learned, which encodes absolute positions, got 16"),
    ("--task.kind shift_bank --model.position relative --evaluate.look_length 7", "evaluate.look_length: expected more than the largest of task.offsets=[1, 2, 4, 7] and at most 32, got 7"),
    ("--process_id 1", "process_id: expected --distributed as well"),
    ("--distributed --process_id 0 --num_processes 2", "coordinator: missing; expected either all of coordinator, num_processes and process_id, or none of them"),
    ("--distributed --coordinator here --num_processes 2 --process_id 1", "coordinator: expected HOST:PORT, got 'here'"),
    ("--distributed --coordinator a:1 --num_processes 2 --process_id 2", "process_id: expected >= 0 and < num_processes=2, got 2"),
    ("train: {stepz: 3}\n", "train.stepz: no such option; did you mean train.steps?"),
    ("--train.stepz 3", "train.stepz: no such option; did you mean train.steps?"),
    ("--train.steps abc", "train.steps: expected int, got abc"),
    ("--train.steps -3", "train.steps: expected > 0, got -3"),
    ("--train.learning_rate .nan", "train.learning_rate: expected > 0, got nan"),
    ("--model.position circular", "model.position: expected Literal['none', 'sinusoidal', 'learned', "),
    ("--model.num_kv_heads 3", "model.num_kv_heads: expected a divisor of model.num_heads=4, got 3"),
    ("--task.length 30", "task.length: expected a multiple of 4 that is at least 12, got 30"),
    ("--task.longest 2", "task.longest: expected at least task.shortest=4, got 2"),
    ("--train.warmup 100", "train.warmup: expected >= 0 and < train.steps=100 (fewer steps need a shorter warm-up, such as 10), got 100"),
    ("--train.steps 20", "train.warmup: expected >= 0 and < train.steps=20 (fewer steps need a shorter warm-up, such as 2), got 50"),
    ("--train.first_seed 4294967296", "train.first_seed: expected 0 to 4294967291 (2**32 - train.seeds=5), got 4294967296"),
    ("--train.first_seed 4294967292", "train.first_seed: expected 0 to 4294967291"),
    ("--train.first_seed -1", "train.first_seed: expected 0 to 4294967291"),
    ("--train.learning_rate 1e400", "train.learning_rate: expected a finite float32 number, got inf"),
    ("--train.learning_rate 1e39", "train.learning_rate: expected a finite float32 number, got 1e+39"),
    ("--train.learning_rate nan", "train.learning_rate: expected float, got nan"),
    ("--train.weight_decay .inf", "train.weight_decay: expected a finite float32 number, got inf"),
    ("--train.place_weights [1,1,.inf,1]", "train.place_weights: expected a finite float32 number, got inf"),
    ("controls: {a: {train.clip: 1e400}}\n", "controls.a.train.clip: expected a finite float32 number, got inf"),
    ("claims: [{name: a, statement: b, metric: c, needed: 1, at_most: .nan}]\n", "claims.a.at_most: expected a finite float32 number, got nan"),
    ("--model.position rotary --model.rotary_base 1", "model.rotary_base: expected more than 1 for rotary positions, got 1.0"),
    ("controls: {3: {model.num_heads: 2}}\n", "controls: expected names that are text (quote them in YAML), got 3"),
    ("controls: {a: {3: 2}}\n", "controls.a: expected names that are text (quote them in YAML), got 3"),
    ("sweep: {on: [2]}\n", "sweep: expected names that are text (quote them in YAML), got True"),
    ("train: {steps: 300}\nmodel: {num_heads: 2}\ntrain: {batch: 8}\n", "train: given twice in one YAML file, in lines 1 and 3"),
    ("train:\n  batch: 4\n  batch: 8\n", "batch: given twice in one YAML file, in lines 2 and 3"),
    ("x: &again [*again]\n", "config: expected a few levels of nesting, got thousands; probably a YAML alias"),
    ("--train.place_weights [1,2]", "train.place_weights: expected 4 numbers > 0, one for each place"),
    ("--train.look_every 15", "train.look_every: expected a multiple of train.log_every=10, got 15"),
    ("train: 7\n", "train: expected options, got 7"),
    ("controls: {a: {model.num_headz: 1}}\n", "controls.a: model.num_headz: no such option"),
    ("controls: {a: {model.num_heads: 0}}\n", "controls.a: model.num_heads: expected > 0, got 0"),
    ("controls: {a: {num_heads: 1}}\n", "controls.a: 'num_heads' is not an option; expected SECTION.OPTION"),
    ("claims: [{name: a, statement: b, metric: c, needed: 1}]\n", "claims.a: expected either at_least or at_most"),
    ("claims: [{name: a, statement: b, metric: c, needed: 9, at_most: 1}]\n", "claims.a.needed: expected 1 to"),
    ("claims: [{name: a, statement: b, metric: c, minus: d, needed: 1, at_most: 1}]\npretrained: {folder: here, groups: [[a, b], [c, d]]}\n", "claims.a.minus: expected null, because nothing is trained, got 'd'"),
    ("claims: [{name: a, statement: b, metric: c, needed: 9, at_most: 1}]\n", "drop all claims with --claims '[]'"),
    ("--claims.accuracy.needed 3", "claims.accuracy.needed: no such option; pass the whole list of claims, such as --claims '[]' for none"),
    ("claims: [{nam: a}]\n", "nam: no such option; did you mean name?"),
    ("--config nowhere.yaml", "nowhere.yaml"),
    ("train: {steps: 3\n:\n", "Problems parsing config"),
    ("--out", "--out: expected one argument"),
    ("surplus", "unrecognized arguments: surplus"),
])  # fmt: skip
def test_what_is_wrong_is_said_in_one_line(tmp_path, capsys, text, message):
    with pytest.raises(SystemExit) as stopped:
        load(tmp_path, BASE, text)
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert message in error and error.startswith("error: ") and error.count("\n") == 1, error


def test_a_missing_config_is_named(capsys):
    with pytest.raises(SystemExit) as stopped:
        config.load([])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "error: name: missing; expected a NAME from jattn list, or a YAML file\n"


def test_an_experiment_is_named_or_a_file(capsys, tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("train: {steps: 70}")
    for words in (["copy", str(mine)], ["copy", "--config", str(mine)], ["--config=copy", f"--config={mine}"]):
        loaded = config.load(words)
        assert (loaded.config.name, loaded.config.train.steps, str(loaded.out)) == ("copy", 70, "runs/copy"), words
    with pytest.raises(SystemExit):
        config.load(["cpy"])
    assert re.match(
        r"error: config: expected a YAML file or one of circuits, copy, .*, got 'cpy'\n$", capsys.readouterr().err
    )
    with pytest.raises(SystemExit):
        config.load([str(tmp_path / "none.yaml")])
    assert "none.yaml" in capsys.readouterr().err


def test_help_explains_every_field(capsys):
    with pytest.raises(SystemExit):
        config.load(["--help"])
    text = capsys.readouterr().out
    kinds = config.Task, config.Model, config.Train, config.Evaluate, config.Mesh
    names = [f"{kind.__name__.lower()}.{field.name}" for kind in kinds for field in dataclasses.fields(kind)]
    for name in [*names, "name", "description", "controls", "sweep", "claims", "check", *config.Processes._fields]:
        # an option, then its explanation before the type in brackets
        assert re.search(rf"--{re.escape(name)}[ ,][^(]*?\s{{2,}}[A-Za-z\"]\w+.*?\(", text, re.S), name


def test_differences_name_the_key_and_both_values(tmp_path):
    saved = dataclasses.asdict(load(tmp_path, BASE).config)
    now = dataclasses.asdict(load(tmp_path, BASE, "--train.steps 300", "controls: {}\n").config)
    assert config.differences(saved, saved) == []
    assert config.differences(saved, now) == ["controls.one_head was removed", "train.steps was 100, now 300"]
    claims = [{"name": name, "needed": needed} for name, needed in (("a", 1), ("b", 2))]
    now = saved | {"claims": [claims[1] | {"needed": 3}, {"name": "c"}]}
    lines = ["claims.a was removed", "claims.b.needed was 2, now 3", "claims.c was added"]
    assert config.differences(saved | {"claims": claims}, now) == lines
    assert config.differences(saved | {"claims": claims}, saved) == ["claims was removed"]
    twice = config.differences({"claims": claims}, {"claims": [claims[0], claims[0] | {"needed": 3}]})
    assert len(twice) == 1 and twice[0].startswith("claims was ")  # names that are not different say nothing


CLAIMS = """
train: {seeds: 10}
controls: {few: {train.seeds: 3}, same: {train.seeds: 10}, alike: {train.steps: 90}}
claims:
- {name: a, statement: "", metric: loss, needed: 9, at_most: 1.0}
- {name: b, statement: "", metric: "few:loss", needed: 2, at_most: 1.0}
- {name: c, statement: "", metric: "same:loss", needed: 9, at_most: 1.0}
- {name: d, statement: "", metric: "alike:loss", needed: 10, at_most: 1.0}
"""


@pytest.mark.parametrize("more, needed", [
    (["--train.seeds 3"], [3, 2, 9, 3]),  # 2.7 rounded up; controls with seeds of their own keep their count
    (["--train.seeds=20"], [18, 2, 9, 20]),
    (["train: {seeds: 5}\n"], [5, 2, 9, 5]),
    (["--train.steps 60"], [9, 2, 9, 10]),
    (["train: {seeds: 4}\nclaims: [{name: a, statement: b, metric: loss, needed: 2, at_most: 1}]\n"], [2]),
    (["train: {seeds: 2}\n", "claims: [{name: a, statement: b, metric: loss, needed: 2, at_most: 1}]\n", "--train.seeds 1"], [1]),
    (["--train.seeds 3 --claims []"], []),
])  # fmt: skip
def test_claims_need_as_many_passes_in_proportion(tmp_path, more, needed):
    assert [claim.needed for claim in load(tmp_path, BASE, CLAIMS, *more).config.claims] == needed


def test_a_shipped_config_takes_fewer_seeds_and_says_what_differs():
    settings = config.load(["copy", "--train.seeds", "3", "--mesh.data", "2", "--description", "Mine."]).config
    assert settings.train.seeds == 3 and {claim.needed for claim in settings.claims} == {3}
    assert config.changed_options(settings) == ["train.seeds was 10, now 3"]
    assert config.changed_options(dataclasses.replace(settings, name="mine")) == []
    assert config.changed_options(config.read(config.CONFIGS / "copy.yaml")) == []


@pytest.mark.slow_except("copy", "smollm2")
@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_the_configs_of_the_project_are_valid(file):
    assert config.read(file).name == file.stem


@pytest.mark.slow
def test_what_a_run_does_is_told_by_its_config():
    kinds = {file.stem: config.read(file).kind for file in CONFIGS}
    assert kinds.pop("minilm_heads") is config.Kind.SENTENCE_ENCODER
    assert kinds.pop("smollm2") is config.Kind.LANGUAGE_MODEL
    assert kinds.pop("long_heads") is kinds.pop("gemma3_heads") is config.Kind.LONG_TEXTS
    assert kinds.pop("circuits") is config.Kind.CIRCUITS
    assert set(kinds.values()) == {config.Kind.TRAINING}


@pytest.mark.slow
def test_copy_sources_hold_the_answers():
    task = tasks.CopyFromFourPlaces(length=16, symbols=7)
    batch = jax.tree.map(np.asarray, task.sample(jax.random.key(0), 50))
    keys, values = batch.tokens[..., 0], batch.tokens[..., 1]
    for half in (keys[:, :8], keys[:, 8:]):
        np.testing.assert_array_equal(np.sort(half, 1), np.tile(np.arange(8), (50, 1)))
    counts = batch.target_weights > 0
    np.testing.assert_array_equal(counts, batch.sources >= 0)
    assert counts.any((0, 2))[8:].sum() >= 6 and not counts[:, :8].any()
    np.testing.assert_array_equal(batch.real, np.tile(counts.any((0, 2)), (50, 1)))
    assert not batch.real[0, [8, 10]].any()  # there, one back or five back is the same place as the mirror
    for b, q in np.argwhere(counts[..., 0]):
        expected = [q - 1, q - 5, 15 - q, int(np.flatnonzero(keys[b, :8] == keys[b, q])[0])]
        assert batch.sources[b, q].tolist() == expected and len(set(expected)) == 4
        assert batch.targets[b, q].tolist() == values[b, expected].tolist()


@pytest.mark.slow
def test_copy_string_is_a_string_and_its_copy():
    task = tasks.CopyString(symbols=9, shortest=2, longest=6, farthest=12)
    batch = jax.tree.map(np.asarray, task.sample(jax.random.key(0), 60))
    lengths = set()
    for tokens, targets, weights, sources, real in zip(*batch[:5], strict=True):
        row = task.labels(tokens.tolist())
        n = row.index("SEP") - 1
        lengths.add(n)
        assert row[0] == "BOS" and row[1:n] == row[n + 2 : 2 * n + 1] and set(row[2 * n + 1 :]) <= {"·"}
        assert np.flatnonzero(weights[:, 0]).tolist() == list(range(n + 1, 2 * n + 1))
        assert targets[n + 1 : 2 * n + 1, 0].tolist() == tokens[1 : n + 1, 0].tolist()
        assert sources[n + 1 : 2 * n + 1, 0].tolist() == list(range(1, n + 1))
        assert real.sum() == 2 * n + 1
    assert lengths == set(range(2, 7))
    far = jax.jit(lambda n: task.sample_length(jax.random.key(1), 3, n))(jnp.asarray(12))
    assert far.tokens.shape == (3, 25, 1) and bool(far.real.all())
    assert task.probe(jax.random.key(1), 2).tokens.shape == (2, 9, 1)


def test_shift_bank_sources_are_as_far_back_as_they_say():
    task = tasks.ShiftBank(length=12, symbols=5, offsets=(1, 3, 6))
    batch = jax.tree.map(np.asarray, task.sample(jax.random.key(0), 20))
    assert task.places == ("1 back", "3 back", "6 back")
    np.testing.assert_array_equal(batch.target_weights[..., 0] > 0, np.tile(np.arange(12) >= 6, (20, 1)))
    for b, q in np.ndindex(20, 12):
        expected = [q - 1, q - 3, q - 6] if q >= 6 else [-1] * 3
        assert batch.sources[b, q].tolist() == expected
        if q >= 6:
            assert batch.targets[b, q].tolist() == batch.tokens[b, expected, 0].tolist()


@pytest.mark.slow
def test_induction_asks_for_what_followed_the_last_time():
    task = tasks.Induction(length=32, symbols=29, shortest=4, longest=7)
    batch = jax.tree.map(np.asarray, task.sample(jax.random.key(0), 200))
    kinds, periods, prefixes = set(), set(), set()
    for tokens, targets, weights, sources, _ in zip(*batch[:5], strict=True):
        row, queries = tokens[:, 0].tolist(), np.flatnonzero(weights[:, 0])
        for q in queries:
            last = max(i for i in range(q) if row[i] == row[q])
            assert sources[q, 0] == last + 1 and targets[q, 0] == row[last + 1]
            assert q == 31 or row[q + 1] == row[last + 1]  # it is also the next token
        again = [q for q in range(32) if row[q] in row[:q]]
        if queries.tolist() == list(range(16, 32, 2)):
            kinds.add("pairs")
            assert len(set(row)) == 16 and again == list(range(16, 32))
            pairs = list(zip(row[::2], row[1::2], strict=True))
            assert sorted(pairs) == sorted(2 * pairs[:8])
            assert row[:16] != row[16:]
        else:
            kinds.add("repeated")
            period = queries[0] - row.index(row[queries[0]])
            periods.add(period)
            prefixes.add(queries[0] - period)
            assert queries.tolist() == list(range(queries[0], 32)) == again
    assert kinds == {"pairs", "repeated"} and periods == set(range(4, 8)) and prefixes == set(range(19))
    probe = task.probe(jax.random.key(1), 3)
    assert (probe.sources == probe.sources[:1]).all() and (probe.tokens[0] != probe.tokens[1]).any()


@pytest.mark.slow
def test_skills_ask_for_four_different_tokens():
    task = tasks.Skills(length=24, symbols=13)
    batch = jax.tree.map(np.asarray, task.sample(jax.random.key(0), 100))
    orders = set()
    for tokens, targets, weights, sources, real in zip(*batch[:5], strict=True):
        row = tokens[:, 0].tolist()
        first, again = ([tuple(row[i : i + 2]) for i in range(start, start + 12, 2)] for start in (0, 12))
        assert len(set(row[:12])) == 12 and sorted(first) == sorted(again) and real.all()
        orders.add(tuple(first.index(pair) for pair in again))
        for q in range(24):
            places = [q - 3, q - 5, q - 7, row.index(row[q]) + 1]
            wanted = q >= 12 and q % 2 == 0 and len({row[place] for place in places}) == 4
            assert weights[q].tolist() == [float(wanted)] * 4
            if wanted:
                assert sources[q].tolist() == places and targets[q].tolist() == [row[place] for place in places]
                assert targets[q][3] == dict(first)[row[q]]
    assert len(orders) > 50 and (batch.target_weights.sum((1, 2)) > 0).mean() > 0.9


@pytest.mark.slow
def test_samples_depend_on_the_key_alone():
    kinds = (tasks.ShiftBank(16, 5), tasks.Induction(16, 16, 2, 8), tasks.Skills(16, 16))
    for task in (tasks.CopyFromFourPlaces(16, 4), tasks.CopyString(9, 2, 6, 12), *kinds):
        first, again, other = (task.sample(jax.random.key(seed), 4).tokens for seed in (0, 0, 1))
        np.testing.assert_array_equal(first, again)
        assert (first != other).any()
