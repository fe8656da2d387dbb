"""Votes out, verdicts back: collectives between ranks."""
