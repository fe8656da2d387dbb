"""One step: who votes on what, what is sent, what is applied.

In: gradients, momenta, and the ranks. Out: moved parameters, the same on every rank.
"""
