"""What masks and score functions are made of: pytrees, checks, look-ups, and traced functions."""
