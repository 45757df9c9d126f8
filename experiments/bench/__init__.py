"""How fast jattn is and how much memory it takes, beside its peers."""
