"""The tests of the whole repository."""
