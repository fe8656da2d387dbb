"""The command `hf-dlion`: benchmarks, predictions and the study of convergence.

`cli` is the command, `arguments` and `report` are what its three parts share.
"""
