"""How votes travel, and the one place that hands bytes to a collective."""
