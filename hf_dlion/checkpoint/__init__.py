"""Saving and loading a momentum per rank, so that what a crash leaves is never taken for whole.

In: an optimizer and a folder. Out: files of all ranks, or one error on all of them.
"""
