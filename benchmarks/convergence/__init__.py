"""Trains with every method at its best learning rate, and compares losses."""
