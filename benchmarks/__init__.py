"""Scripts behind the tables and pictures of docs/results, run from a checkout.

`step_time.py` times a training step with each method, on real ranks or on emulated hosts.
`codec.py` times the work next to the network. `plot.py` draws step times. `convergence` trains with
each method at its best learning rate. `methods.py` has the methods that run on real ranks.
"""
