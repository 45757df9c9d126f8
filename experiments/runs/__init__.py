"""What every run has: its folder and what lies in it, its devices, and the terminal it speaks to."""
