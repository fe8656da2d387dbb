"""Benchmarks that anyone can run, each beside what a user would pick instead.

`codec` times the work on either side of the wire, `exchange` the wire, `train` a whole training
step, and `memory` weighs one. `emulate` builds slow networks out of network namespaces, `ranks`
starts the processes, `clock` takes the times.
"""
