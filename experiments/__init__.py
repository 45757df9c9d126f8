"""Experiments that show what attention heads learn: one config in, one report out.

``tasks``, ``model``, ``train`` and ``run``, in this order, are an experiment from end to end. Around them:

- ``config``: what an experiment is, as data, and how it is read; the files themselves are in configs/;
- ``runs``: what every run has: its folder, its checkpoints, its devices, what it found;
- ``measure``: looks at heads, evaluation, claims, and models that were trained elsewhere;
- ``report``: the page and the pictures of what a run found;
- ``bench``: jattn beside its peers, a file a suite;
- ``results``: what was kept of runs and benchmarks.

``commands`` and ``__main__`` are the command line. Who may import whom is a table in tests/test_floors.py.
"""
