"""Soak test: random calls of jattn compared with an independent reference, for any length of time. ``make soak``."""
