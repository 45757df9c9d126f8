"""Experiments that show what attention heads learn: one config in, one report out.

``tasks``, ``model``, ``train`` and ``run``, in this order, make up an experiment. Around them:

- ``config``: the schema of an experiment, and how it is read; the files are in ``configs`` at the top of a checkout;
- ``runs``: the folder of a run, its checkpoints, its devices, its findings;
- ``measure``: looks at heads, evaluation, claims, and pretrained models (``model_files``: where they are);
- ``report``: the page and figures of a run;
- ``bench``: jattn compared with its peers, one file per suite.

``commands`` and ``__main__`` are the command line. A table in docs/architecture.md says who may import whom.
"""
