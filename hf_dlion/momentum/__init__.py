"""Where momenta live, how ranks share them out and average them, and how they are saved.

In: torch's optimizer state. Out: this rank's momentum of each parameter, or its share of it.
"""
