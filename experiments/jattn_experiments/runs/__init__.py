"""What every run has: a folder and its contents, devices, and terminal output."""
