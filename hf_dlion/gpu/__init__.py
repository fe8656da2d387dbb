"""Routes of votes and verdicts between ranks, and the collectives that carry them."""
