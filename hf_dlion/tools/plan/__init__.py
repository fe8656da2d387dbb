"""Predicts what a training step costs under each method, before anybody buys a network.

`cost` holds the formulas, `machine` and `link` measure their constants, `model` says what is
trained, `methods` puts these together, `table` goes over nodes and links, and `validate` holds
predictions to a measured run.
"""
