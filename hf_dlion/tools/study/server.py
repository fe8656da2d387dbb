"""What the Distributed Lion paper's methods would exchange with a parameter server.

The paper has a server between the workers (Liu et al. 2024, arXiv 2404.00438, algorithm 1), and
compares the bits per iteration that a worker sends to it and gets back. They are counted here as
the logarithm of how many values there are. Without a server, `Result.bits_per_step` is what really
left a rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from hf_dlion.tools.study.compressors import DENSITY

FULL = 32.0

# Of each method of the paper: bits per parameter on the way up and down, from the number of
# workers n. A sum of n signs takes n + 1 values, one of n ternary numbers 2 n + 1. Of the sparse
# methods values count, and positions do not.
_BITS: dict[str, Callable[[int], tuple[float, float]]] = {
    "adamw": lambda n: (FULL, FULL),
    "lion": lambda n: (FULL, FULL),
    "terngrad": lambda n: (math.log2(3), math.log2(2 * n + 1)),
    "graddrop": lambda n: (DENSITY * FULL, FULL),
    "dgc": lambda n: (DENSITY * FULL, FULL),
    "average": lambda n: (1.0, math.log2(n + 1)),
    "majority": lambda n: (1.0, 1.0),
}


def server_bits(method: str, workers: int) -> float | None:
    """Returns bits per parameter and iteration of a worker, both ways; None for other methods.

    Args:
        method: A name in `methods.METHODS`.
        workers: Number of workers.

    >>> server_bits("majority", 4), server_bits("lion", 4), server_bits("bits8", 4)
    (2.0, 64.0, None)
    """
    of_method = _BITS.get(method)
    return None if of_method is None else sum(of_method(workers))
