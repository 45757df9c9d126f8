"""The findings of one run: everything that the report, the figures and the claims read.

Axes: ``R`` seeds, ``E`` logged steps, ``P`` steps of looks at the heads (the first is 0, before training),
``L`` layers, ``N`` heads, ``T`` tokens, ``O`` offsets, ``A`` places (read-outs), ``X`` steps of the examples' weights,
``I`` examples.
"""

import dataclasses
import hashlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jattn_experiments.runs.folder import Damaged, read_json, write_together


@dataclasses.dataclass(frozen=True)
class Findings:
    """One finished run. Arrays are NumPy; ``[R,2,...]`` arrays hold untrained, then trained.

    Untrained models have random parameters, even if training started from others (``train.start``).
    """

    name: str  # of the experiment, as in its config
    description: str  # a short text for the top of the report
    config: dict[str, Any]  # the resolved config
    environment: dict[str, str | None]  # versions, the commit of jattn, device, seconds
    seeds: list[int]
    places: list[str]  # read-outs, e.g. ["one back", "five back", "mirror", "same key"]
    tokens: list[list[str]]  # labels of the T tokens of each of the I examples
    metric_steps: np.ndarray  # [E]
    metrics: Mapping[str, np.ndarray]  # name -> [R,E]; "loss", "accuracy", ...
    look_steps: np.ndarray  # [P]
    scores: Mapping[str, np.ndarray]  # name -> [R,P,L,N], in [0, 1]
    # name -> [R,2,L,N]: jattn.heads.statistics at the end; in [0, 1] except distance (tokens) and max_logit (a score)
    statistics: Mapping[str, np.ndarray]
    offsets: np.ndarray  # [O] key position minus query position
    offset_profile: np.ndarray  # [R,2,L,N,O] mean weight at each offset
    example_steps: np.ndarray  # [X] steps of example_weights
    example_weights: np.ndarray  # [X,I,L,N,T,T] weights of the first seed on each example
    mean_weights: np.ndarray  # [2,L,N,T,T] weights of the first seed, averaged over a batch
    divergence: np.ndarray  # [R,2,L*N,L*N] Jensen-Shannon / ln 2 between heads' mean patterns
    # [R,2,L*N] the same for each head, between two halves of the batch: the noise floor of divergence
    noise: np.ndarray
    accuracy: np.ndarray  # [R,A] per place, whole model
    ablated: np.ndarray  # [R,L,N,A] per place, one head switched off
    groups: Mapping[str, np.ndarray]  # role -> [R,A] per place, all heads of that role switched off
    # into "key", "query" -> [L,N]: how much the mean score of induction heads falls if they read a head's output
    # from another sequence there; empty unless measured
    paths: Mapping[str, np.ndarray]
    # rows {seed, layer, head, role, score, null, p_value}: null is the score that heads without the role may reach, a
    # quantile over heads that cannot have it; the role is "mixed" if no score passes its null
    heads: list[dict[str, Any]]
    curves: Mapping[str, Mapping[str, list[list[float]]]]  # "Y over X" -> line label -> [[x, y per seed ...], ...]
    # title -> {"rows", "columns": names, "values": [[...], ...]}: maps of numbers from 0 to 1
    grids: Mapping[str, Mapping[str, Any]]
    controls: list[dict[str, Any]]  # rows {name, metric, values (per seed), parameters}
    # rows {name, statement, metric, side, threshold, values, reference, reference_name, seeds, passed, failed, needed,
    # holds}: values per seed, reference what they are compared with (untrained models, or what reference_name says),
    # passed and failed the seeds, side "at least" or "at most"
    claims: list[dict[str, Any]]
    # a line for each option that differs from jattn's config of the same name
    changed: list[str] = dataclasses.field(default_factory=list)

    @property
    def title(self) -> str:
        """The name for people to read, marked if options differ from jattn's config of the same name."""
        return plain(self.name) + " (changed)" * bool(self.changed)

    def save(self, folder: Path) -> None:
        """Writes ``claims.json``, ``findings.npz`` (arrays) and ``findings.json`` (the rest) into ``folder``."""
        plain, arrays = {}, {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                arrays[field.name] = value
            elif field.name in NAMED:
                arrays |= {f"{field.name}/{key}": array for key, array in value.items()}
            else:
                plain[field.name] = value
        content = io.BytesIO()
        np.savez_compressed(content, **arrays)
        plain = {"sha256": _digest(plain, content.getvalue())} | plain
        texts = {
            name: json.dumps(part, indent=1).encode() for name, part in (("claims", self.claims), ("findings", plain))
        }
        write_together(
            {
                folder / "claims.json": texts["claims"],
                folder / "findings.npz": content.getvalue(),
                folder / "findings.json": texts["findings"],  # last: without it, unfinished
            }
        )

    @classmethod
    def load(cls, folder: Path) -> "Findings":
        """Reads what ``save`` wrote.

        Raises:
            FileNotFoundError: the run has not finished.
            Damaged: a file was altered.
            TypeError: another version wrote the files.
        """
        fields = read_json(folder / "findings.json", dict, "the findings of a run")
        content = (folder / "findings.npz").read_bytes()
        if fields.pop("sha256", None) != _digest(fields, content):
            raise Damaged(f"{folder / 'findings.json'}: the findings are damaged, or from another version")
        fields = {name: {} for name in NAMED} | fields
        with np.load(io.BytesIO(content)) as arrays:
            for name in arrays:
                field, _, key = name.partition("/")
                if key:
                    fields[field][key] = arrays[name]
                else:
                    fields[field] = arrays[name]
        return cls(**fields)


def _digest(plain: dict[str, Any], arrays: bytes) -> str:
    """SHA-256 of the contents of ``findings.json`` and ``findings.npz``."""
    return hashlib.sha256(json.dumps(plain).encode() + arrays).hexdigest()


NAMED = ("metrics", "scores", "statistics", "groups", "paths")  # fields that map names to arrays


def plain(name: object) -> str:
    """A name for people to read."""
    return str(name).replace("_", " ")
