"""Checkpoints: a momentum per rank in them, and nothing half written ever taken for whole.

In: an optimizer, and a folder that all ranks save to or load from. Out: files of all ranks, loaded
momenta, or one error on all ranks.

- `save`: the parts of a save, after each of which all ranks meet; `rotation` is the last of them.
- `rank_files`: momenta saved, loaded, and averaged where other ranks load; `momentum_file` is one
  of their files, `durable` how any file gets onto the disk.
- `whole`: which checkpoints are whole; `agreed`: the one from which all ranks resume.
- `lion`: what all of this asks of an optimizer.
"""
