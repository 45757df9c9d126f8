"""Finished measurements, kept in files so that a stopped run can resume."""

import hashlib
import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from jattn_experiments.runs.folder import Damaged, write_atomically

Part = dict[str, np.ndarray]


class KeptParts:
    """The parts of a run, each measured once and kept in ``folder``.

    ``tell`` takes ``description=`` when a part starts and ``advance=1`` when it is done.
    """

    def __init__(self, folder: Path, tell: Callable[..., None]):
        self.folder, self._tell = folder, tell

    def check_texts(self, arrays: Iterable[np.ndarray]) -> None:
        """Raises ``Damaged`` if these tokens, which all parts use, are not those of the stopped run."""
        tokens = np.concatenate([np.ravel(tokens) for tokens in arrays]).astype(np.int32)
        digest = np.frombuffer(hashlib.sha256(tokens.tobytes()).digest(), np.uint8)
        if (self.part("texts", lambda: {"digest": digest})["digest"] != digest).any():
            raise Damaged(
                f"{self.folder} was measured on other texts, perhaps by another version; choose another --out"
            )

    def part(self, name: str, measure: Callable[..., Part], *arguments: Any) -> Part:
        """What ``measure(*arguments)`` returns, or what it returned before the run was stopped.

        Raises ``Damaged`` if the kept file cannot be read.
        """
        file = self.folder / f"{name}.npz"
        if not file.exists():
            self._tell(description=name)
            arrays = io.BytesIO()
            np.savez_compressed(arrays, **measure(*arguments))
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, arrays.getvalue())
        self._tell(advance=1)
        content = io.BytesIO(file.read_bytes())
        try:
            with np.load(content) as kept:
                return {key: kept[key] for key in kept}
        except Exception:  # NumPy and zipfile raise many types for a damaged archive
            raise Damaged(f"{file}: the file is damaged; remove it to measure this part again") from None
