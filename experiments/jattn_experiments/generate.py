"""``jattn generate``: a language model on jattn's modules continues a text and prints while it writes."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from jattn_experiments import config
from jattn_experiments.model_files import model_file
from jattn_experiments.runs.terminal import fail, refusing

END = "<|im_end|>"


def generate_command(arguments: Sequence[str]) -> int:
    """Continues a text with SmolLM2 or any other language model that jattn.interop loads."""
    parser = config.Parser(prog="jattn generate", description=generate_command.__doc__)
    parser.add_argument("text", type=str, nargs="?", default="", help="text to continue, or to answer with --chat")
    parser.add_argument(
        "--model", type=str, default="smollm2", help="smollm2, gemma3, a GGUF file or the folder of a saved model"
    )
    parser.add_argument("--tokens", type=int, default=100, help="largest number of tokens to write")
    parser.add_argument("--chat", action="store_true", help="treat the text as a message in a conversation (ChatML)")
    assistant = "You are a helpful AI assistant."
    parser.add_argument("--system", type=str, default=assistant, help="with --chat: the system message")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 takes the likeliest token; higher values sample"
    )
    parser.add_argument("--top_k", type=int | None, default=None, help="sample only from this many likeliest tokens")
    parser.add_argument(
        "--top_p",
        type=float | None,
        default=None,
        help="sample only from the likeliest tokens with this total probability",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed for sampling")
    parser.add_argument(
        "--dtype", type=str, default="float32", help="dtype of the weights: float32, bfloat16 or float16"
    )
    options = parser.parse_args(arguments)
    if not options.text:
        return fail('text: expected a text to continue, as in jattn generate "Once upon a time"')
    if options.tokens < 1:
        return fail(f"--tokens: expected at least 1, got {options.tokens}")
    if not 0 <= options.seed < 2**32:
        return fail(f"--seed: expected 0 to 2^32 - 1, got {options.seed}")
    if options.dtype not in ("float32", "bfloat16", "float16"):
        return fail(f"--dtype: expected float32, bfloat16 or float16, got {options.dtype!r}")
    with refusing("--model", ValueError):
        source = model_file(options.model)
    # slow to import: a wrong option should not wait for JAX
    import jax

    from jattn import interop

    started = time.perf_counter()
    with refusing("--model", ValueError, OSError, ImportError):
        tokenizer, model = interop.tokenizer(source), interop.load(source, dtype=options.dtype)
    loaded = time.perf_counter()
    text = interop.chatml([("system", options.system), ("user", options.text)]) if options.chat else options.text
    ends = [tokenizer.token_to_id(token) for token in (END, "<|endoftext|>", "</s>")]
    try:
        steps = interop.stream(
            model,
            [tokenizer.encode(text).ids],
            options.tokens,
            stop=[end for end in ends if end is not None],
            key=jax.random.key(options.seed),
            **{name: options[name] for name in ("temperature", "top_k", "top_p")},
        )
    except ValueError as wrong:
        return fail(str(wrong))
    print(text if not options.chat else "", end="", flush=True)
    tokens: list[int] = []
    for part in _parts(tokenizer, steps, tokens):
        print(part, end="", flush=True)
    now = time.perf_counter()
    print(
        f"\n\n{len(tokens)} tokens in {now - loaded:.1f} s, including compilation; loaded in {loaded - started:.1f} s"
    )
    return 0


def _parts(tokenizer: Any, steps: Iterator[Any], tokens: list[int]) -> Iterator[str]:
    """The text of each token, in whole characters only; appends to ``tokens``."""
    shown = ""
    for (token,) in steps:
        tokens.append(int(token))
        text = tokenizer.decode(tokens)
        # Part of a character is decoded as a replacement character, which the next token may complete.
        part = "" if text.endswith("\N{REPLACEMENT CHARACTER}") else text[len(shown) :]
        shown += part
        yield part
    if tokens and (rest := tokenizer.decode(tokens)[len(shown) :]):
        yield rest
