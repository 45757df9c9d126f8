"""Tests custom kernels with a conformance table: values, log-sum-exp and gradients against float64.

Every jattn implementation passes the table, except that ``"cudnn"`` and ``"splash"`` reject the case of keys that share
a large common component: their kernels compute a row's sum from the rounded output. ``check`` runs the table, with or
without pytest; as one test per case::

    @pytest.mark.parametrize("name", jattn.testing.CASES)
    def test_my_kernel(name):
        jattn.testing.check(MyKernel(), {name: jattn.testing.CASES[name]})
"""

from jattn.testing._cases import AT_SIZE, CASES, Case
from jattn.testing._check import Outcome, check, examine

__all__ = ["AT_SIZE", "CASES", "Case", "Outcome", "check", "examine"]
