"""Experiments that show what attention heads learn: one config in, one report out.

``tasks``, ``model``, ``train`` and ``run``, in this order, make up an experiment. Around them:

- ``schema`` and ``config``: what a config may say, and how it is read; the files are in a checkout's ``configs``;
- ``runs``: the folder of a run, its checkpoints, its devices, its findings;
- ``measure``: evaluation, claims, and pretrained models (``model_files``: where they are);
- ``run_page``: the page and figures of a run;
- ``bench``: jattn compared with its peers, one file per suite.

``commands`` and ``__main__`` are the command line. Imports point down, in the order of docs/architecture.md.
"""
