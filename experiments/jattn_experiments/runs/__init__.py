"""The parts that all runs share: a folder and its contents, devices, and terminal output."""
