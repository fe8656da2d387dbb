"""What the tables and pictures of docs/results are made with, from a checkout.

`codec.py` times the work on either side of the wire, `exchange.py` the wire, `step_time.py` a whole
training step, and `memory.py` weighs one; `plot.py` draws. `convergence` trains with each method at
its best learning rate. `emulate` builds slow networks out of network namespaces, `ranks` starts the
processes, `rivals` are what one would otherwise take.
"""
