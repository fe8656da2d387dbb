"""The command `hf-dlion`: predictions and a doctor.

`cli` is the command, `arguments` and `report` are what its three parts share.
"""
