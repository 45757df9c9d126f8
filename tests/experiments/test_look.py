"""``jattn look`` with a tiny language model: its page, and its errors. Of runs: test_replicate.py."""

import numpy as np
import pytest

from jattn import attention_weights, interop
from jattn_experiments.__main__ import main
from tests.web_page import embedded, weights_of

pytestmark = pytest.mark.usefixtures("as_experiments_run")


@pytest.mark.slow
def test_the_page_shows_the_heads_on_the_text(tiny, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("abcab 12 abcab 12 abcab")
    out = tmp_path / "page.html"
    words = ["look", "--model", tiny, "--model", tiny, "--text", str(text), "--tokens", "9", "--out", str(out)]
    assert main(words) == 0
    assert "9 tokens" in (output := capsys.readouterr().out) and output.endswith(f"page: {out}\n")
    page = out.read_text(encoding="utf-8")
    model, tokenizer = interop.load(tiny), interop.tokenizer(tiny)
    ids = tokenizer.encode(text.read_text()).ids[:9]
    layers = interop.look(model, np.array([ids]))
    weights = np.concatenate([attention_weights(one["query"], one["key"], is_causal=True)[0] for one in layers])
    np.testing.assert_allclose(weights_of(page, 0, 0), weights, atol=2e-5)
    (view,) = embedded(page)["views"]
    assert [token.strip() for token in view["queries"]] == [tokenizer.decode([i]).strip() for i in ids]
    assert [frame["title"] for frame in view["frames"]] == ["tiny", "tiny"]


@pytest.mark.parametrize(("options", "message"), [
    ([], "expected either --run (the folder of a run) or --model and --text"),
    (["--run", "x", "--model", "smollm2"], "expected either --run"),
    (["--model", "TINY"], "--text: expected a file with the text"),
    (["--model", "TINY", "--text", "nowhere.txt"], "--text: [Errno 2]"),
    (["--model", "TINY", "--text", "EMPTY"], "--text: expected a text with at least one token, got '"),
    (["--model", "TINY", "--text", "TEXT", "--tokens", "0"], "--tokens: expected at least 1, got 0"),
    (["--model", "nowhere", "--text", "TEXT"], "--model: expected smollm2, gemma3, a GGUF file or the folder"),
    (["--model", "TINY", "--text", "TEXT", "--out", "no/folder/x.html"], "--out: [Errno 2]"),
])  # fmt: skip
def test_bad_options_are_one_line(tiny, options, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("abc")
    (tmp_path / "empty.txt").write_text("")
    files = {"TINY": tiny, "TEXT": "text.txt", "EMPTY": "empty.txt"}
    assert main(["look", *(files.get(word, word) for word in options)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1
