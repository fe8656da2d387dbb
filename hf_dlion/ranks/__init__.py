"""Who takes part: the ranks of a process group, the nodes they form, and what they agree on.

In: a process group, and what this rank says of itself before a step (its header).
Out: all ranks' headers, or one error on all of them; nodes; equal replicas.
"""
