"""PyTorch's attention as a contestant of the attention benchmark. PyTorch is imported only when it is called."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from jattn.score_mods import alibi_slopes
from jattn_experiments.bench import timing
from jattn_experiments.bench.problems import CAP, CASES, WINDOW, Problem, document_ids

if TYPE_CHECKING:
    import torch

Attention = Callable[..., "torch.Tensor"]  # (query, key, value) -> output


@dataclasses.dataclass(frozen=True)
class InTorch:
    """PyTorch's attention on ``[B,N,T,H]``, its kernels' layout; ``flex`` means FlexAttention."""

    name: str
    device: str
    flex: bool = False
    dtypes: tuple[str, ...] = ("float32", "bfloat16")

    @property
    def cases(self) -> tuple[str, ...]:
        """Supported cases."""
        return tuple(case for case in CASES if case != "t5" and (self.flex or case != "softcap"))

    def matrices(self, problem: Problem) -> int:
        """All heads share a mask, and the whole batch shares ALiBi's array for each head."""
        if self.flex or problem.case in ("full", "causal"):
            return 0
        return problem.num_heads if problem.case == "alibi" else 1

    def inputs(self, problem: Problem) -> "list[torch.Tensor]":
        """Query, key and value as tensors that require gradients."""
        import torch

        def tensor(x: np.ndarray) -> torch.Tensor:
            x = np.ascontiguousarray(np.swapaxes(x, 1, 2))
            x = torch.from_numpy(x).to(self.device, getattr(torch, problem.dtype))
            return x.requires_grad_()

        return [tensor(x) for x in problem.arrays()[:3]]

    def repeated(self, problem: Problem, passes: str) -> Callable[..., Any]:
        """Like ``InJax``'s."""
        import torch

        torch.set_num_threads(timing.cores())
        if self.device == "cuda":
            torch.set_float32_matmul_precision("high")  # TF32, as JAX uses for float32 on a GPU
        tensors = self.inputs(problem)
        attention = torch_flex(problem, self.device) if self.flex else torch_sdpa(problem, self.device)

        def run(times: int = 1) -> Any:
            with torch.no_grad() if passes == "forward" else contextlib.nullcontext():
                for _ in range(times):
                    output = attention(*tensors)
                    if passes == "both":
                        output = torch.autograd.grad(torch.sin(output).sum(), tensors)
            if self.device == "cuda":
                torch.cuda.synchronize()
            return output

        return run


def torch_sdpa(problem: Problem, device: str) -> Attention:
    """``scaled_dot_product_attention``. A case without an argument of its own becomes an array added to the scores."""
    import torch

    attention = torch.nn.functional.scaled_dot_product_attention
    if problem.case in ("full", "causal"):
        return lambda *tensors: attention(*tensors, is_causal=problem.case == "causal")
    position = np.arange(problem.length, dtype=np.float32)
    offset = position[None, :] - position[:, None]
    if problem.case == "alibi":
        added = np.where(offset <= 0, alibi_slopes(problem.num_heads)[:, None, None] * offset, -np.inf)[None]
    elif problem.case == "window":
        added = np.where((offset <= 0) & (offset >= -WINDOW), np.float32(0), -np.inf)
    else:
        ids = document_ids(problem.length)
        added = np.where((offset <= 0) & (ids[None, :] == ids[:, None]), np.float32(0), -np.inf)
    mask = torch.from_numpy(added).to(device, getattr(torch, problem.dtype))
    return lambda *tensors: attention(*tensors, attn_mask=mask)


def torch_flex(problem: Problem, device: str) -> Attention:
    """FlexAttention, compiled: masks and score functions are functions of indices, as in jattn."""
    import torch
    from torch.nn.attention import flex_attention

    slopes = torch.from_numpy(alibi_slopes(problem.num_heads)).to(device)
    ids = torch.from_numpy(document_ids(problem.length)).to(device)
    mask_mods = {
        "causal": lambda b, h, q, kv: kv <= q,
        "window": lambda b, h, q, kv: (kv <= q) & (kv >= q - WINDOW),
        "segments": lambda b, h, q, kv: (kv <= q) & (ids[q] == ids[kv]),
    }
    score_mods = {
        "alibi": lambda score, b, h, q, kv: score - slopes[h] * (q - kv),
        "softcap": lambda score, b, h, q, kv: CAP * torch.tanh(score / CAP),
    }
    mask_mod = mask_mods.get({"alibi": "causal", "segments-traced": "segments"}.get(problem.case, problem.case))
    options: dict[str, Any] = {"score_mod": score_mods.get(problem.case)}
    if mask_mod is not None:
        lengths = (problem.length, problem.length)
        options["block_mask"] = flex_attention.create_block_mask(mask_mod, None, None, *lengths, device=device)
    compiled = torch.compile(flex_attention.flex_attention)
    return lambda *tensors: compiled(*tensors, **options)
