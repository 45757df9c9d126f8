"""Measures heads and intervenes on them: what each head does, how heads differ, and what each is needed for.

From queries and keys, at any length: ``statistics``, ``divergence``, ``coarse_weights``, ``top_pairs``. From one weight
matrix: ``target_weight``, ``previous_token``, ``first_token``, ``induction``, ``entropy``, ``offset_profile``,
``pattern_divergence``. From the weights of answer tokens: ``retrieval_score``. From parameters: ``copying_score``,
``target_rank``, ``composition``, ``ov_circuit``, ``qk_circuit``, ``residual_contributions``. From a run:
``logit_attribution``, ``qk_attribution``, ``top_queries``. Interventions: ``ablate``, ``patch`` and its estimate
``attribution_patch``, ``path_patch``, ``importance``, ``forbid``. ``roles`` gives each head a label, tested against a
null distribution. ``collect`` returns the values sown by a model's layers.
"""

from jattn.heads._ablation import ablate, forbid, importance
from jattn.heads._circuits import (
    composition,
    copying_score,
    ov_circuit,
    qk_circuit,
    residual_contributions,
    target_rank,
)
from jattn.heads._collect import collect
from jattn.heads._dense_statistics import (
    entropy,
    first_token,
    induction,
    offset_profile,
    pattern_divergence,
    previous_token,
    target_weight,
)
from jattn.heads._divergence import divergence
from jattn.heads._logit_attribution import logit_attribution
from jattn.heads._patching import attribution_patch, patch
from jattn.heads._paths import path_patch, qk_attribution
from jattn.heads._retrieval import retrieval_score
from jattn.heads._roles import MIXED, WEAK, Roles, roles
from jattn.heads._statistics import OF_TOKENS, STATISTICS, coarse_weights, statistics
from jattn.heads._top_pairs import TopPairs, top_pairs
from jattn.heads._top_queries import TopQueries, top_queries

__all__ = [
    "MIXED",
    "OF_TOKENS",
    "STATISTICS",
    "WEAK",
    "Roles",
    "TopPairs",
    "TopQueries",
    "ablate",
    "attribution_patch",
    "coarse_weights",
    "collect",
    "composition",
    "copying_score",
    "divergence",
    "entropy",
    "first_token",
    "forbid",
    "importance",
    "induction",
    "logit_attribution",
    "offset_profile",
    "ov_circuit",
    "patch",
    "path_patch",
    "pattern_divergence",
    "previous_token",
    "qk_attribution",
    "qk_circuit",
    "residual_contributions",
    "retrieval_score",
    "roles",
    "statistics",
    "target_rank",
    "target_weight",
    "top_pairs",
    "top_queries",
]
