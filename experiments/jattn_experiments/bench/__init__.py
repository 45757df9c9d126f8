"""jattn's speed and memory compared with its peers."""
