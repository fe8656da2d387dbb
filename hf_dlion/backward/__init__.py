"""What runs during forward and backward: DDP's hook, and votes that leave before the step.

In: DDP wrappers and gradients that become ready. Out: gradients that stay local, early votes.
"""
