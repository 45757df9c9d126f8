"""The soak: drawn calls of jattn against a reference of its own, for as long as one likes. ``make soak``."""
