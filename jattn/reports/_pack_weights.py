"""Packs as many of a report's weights as fit into the page, as compressed bytes.

``data.js`` reads them. All weights: ``[h,T,S]``, in one or two bytes. The largest of each query: their keys
``[k,h,T]``, in two bytes, or four if a key is beyond 65535; their weights ``[k,h,T]``, in two bytes; and the coarse
picture ``[h,Q,K]``, in one.
"""

import base64
import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from jattn.reports._kept_weights import COARSE_BITS, LEAST_BITS_OF_LARGEST, STAGES


@dataclasses.dataclass(frozen=True)
class Frame:
    """The weights of all heads ``h`` on one sequence, from one model at one time.

    title: the name among the frames of its view. step: of training, or None. numbers: the index of the page's Numbers.
    weights: ``[h,T,S]``; or None, and ``top [h,T,k]``, ``keys [h,T,k]`` and ``coarse [h,Q,K]``, as in ``Looked``.
    span: the queries and keys in a block of ``coarse``.
    heads: the names of the heads if they are not the page's own: the matched heads, or "–" where there is no match.
    """

    title: str
    weights: np.ndarray | None
    top: np.ndarray | None = None
    keys: np.ndarray | None = None
    coarse: np.ndarray | None = None
    span: tuple[float, float] = (1.0, 1.0)
    step: int | None = None
    numbers: int = 0
    heads: Sequence[str] | None = None


def pack(frames: Sequence[Frame], room: int) -> tuple[list[dict[str, Any]], list[str], float]:
    """The page's data on each frame, the bytes in base64, and the largest weight of all.

    Beyond ``room`` characters, weights lose digits, and then the smallest are dropped, as few as needed.
    """
    arrays = [array for frame in frames for array in (frame.weights, frame.top) if array is not None]
    top = max(float(np.max(np.nan_to_num(array), initial=0.0)) for array in arrays)
    top = top if top > 0 else 1.0
    parts: list[tuple[str, dict[str, Any]]] = []
    for stage in STAGES:
        parts = [_packed(frame, top, *stage) for frame in frames]
        if sum(len(blob) for blob, _ in parts) <= room:
            break
    entries = [{"blob": f"blob-{i}", "top": top, **entry} for i, (_, entry) in enumerate(parts)]
    return entries, [blob for blob, _ in parts], top


def _packed(frame: Frame, top: float, bits: int, dropped: float, first: int) -> tuple[str, dict[str, Any]]:
    """The bytes of a frame, and how the page reads them."""
    least = float(f"{dropped * top:.2g}")  # with the digits shown by the page
    entry: dict[str, Any] = {"title": frame.title, "step": frame.step, "numbers": frame.numbers, "dropped": least}
    notes = []
    if frame.weights is not None:
        weights = _coded(np.where(frame.weights >= least, frame.weights, 0.0), top, bits)
        shown, parts, entry["k"] = frame.weights, [weights], 0
    else:
        assert frame.top is not None and frame.keys is not None and frame.coarse is not None
        shown, bits = frame.top, max(bits, LEAST_BITS_OF_LARGEST)
        kept = np.where((frame.top >= least) | (np.arange(frame.top.shape[-1]) < first), frame.top, 0.0)
        weights = np.moveaxis(_coded(kept, top, bits).astype("<u2"), -1, 0)
        keys = np.where(weights > 0, np.moveaxis(frame.keys, -1, 0), 0)
        wide = int(np.max(keys, initial=0)) > 0xFFFF
        parts = [keys.astype("<u4" if wide else "<u2"), weights, _coded(frame.coarse, 1.0, COARSE_BITS)]
        entry |= {"k": len(weights), "wide": wide, "side": list(frame.coarse.shape[1:]), "span": list(frame.span)}
        notes.append(
            f"Zoomed out, the picture shows blocks of tokens; zoomed in, the {len(weights)} largest weights of each "
            "query. Grey cells are not kept: the read-out gives an upper bound."
        )
    if undefined := int(np.isnan(shown).any(-1).sum()):
        notes.append(f"NaN: the weights of {undefined} queries (counted over all heads) are drawn as 0.")
    if bits < 16:
        notes.append(f"Weights are rounded to 1/{2**bits - 1} of the largest.")
    if dropped:
        others = f", unless they are among a query's {first} largest," if first and entry["k"] else ""
        notes.append(f"Weights below {least:.2g}{others} are left out to keep the page small.")
    whole = b"".join(np.ascontiguousarray(part).tobytes() for part in parts)
    entry |= {"bits": bits, "note": " ".join(notes)} | ({} if frame.heads is None else {"heads": list(frame.heads)})
    return base64.b64encode(zlib.compress(whole, 6)).decode(), entry


def _coded(weights: np.ndarray, top: float, bits: int) -> np.ndarray:
    """Weights as fractions of ``top``, in two bytes, or one for 8 bits."""
    codes = np.rint(np.clip(np.nan_to_num(weights) / top, 0.0, 1.0) * (2**bits - 1))
    return codes.astype("u1" if bits == 8 else "<u2")
