"""What a run found, as a page and as pictures."""
