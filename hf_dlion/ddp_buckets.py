"""DDP's buckets, which have the size of all gradients: freed while gradients stay on their rank.

Both functions give a wrapper a new reducer, as its `__setstate__` does. It has no hook, so the
caller registers one. They must not be called in backward, which the reducer takes part in.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def can_be_freed(ddp: DistributedDataParallel) -> bool:
    """Returns whether a wrapper may get another reducer.

    Not with a static graph, which counts backward passes, and DDP's own mixed precision, whose
    hooks name parameters by their place in the reducer.
    """
    return not ddp.static_graph and ddp.mixed_precision is None


@torch.inference_mode(False)  # Buckets serve later backwards, too.
def free(ddp: DistributedDataParallel) -> set[Tensor]:
    """Frees the buckets; returns the parameters whose gradients they had.

    The new reducer has one of a single number, because it needs a parameter.
    """
    buckets = ddp.reducer._get_zeros_like_grad_buckets()
    reduced = {param for bucket in buckets for param in bucket.parameters()}
    nothing = nn.Parameter(torch.zeros(1, device=next(iter(reduced)).device))
    _make_reducer(ddp, [nothing], [False], {})
    return reduced


@torch.inference_mode(False)
def restore(ddp: DistributedDataParallel, reduced: AbstractSet[Tensor]) -> None:
    """Makes the buckets again, of the parameters that `free` returned."""
    # DDP takes what is trainable, but these may be frozen now, and others unfrozen.
    flags = {param: param.requires_grad for param in ddp.module.parameters()}
    try:
        for param in flags:
            param.requires_grad_(param in reduced)
        untyped: Any = ddp
        params, are_sparse = untyped._build_params_for_reducer()
        names = untyped._build_debug_param_to_name_mapping(params)
        _make_reducer(ddp, params, are_sparse, names)
    finally:
        for param, flag in flags.items():
            param.requires_grad_(flag)


def _make_reducer(
    ddp: DistributedDataParallel,
    params: Sequence[nn.Parameter],
    are_sparse: Sequence[bool],
    names: dict[int, str],
) -> None:
    untyped: Any = ddp
    untyped._ddp_init_helper(params, are_sparse, names, False)
    # Accelerate's regional compilation trains a copy of the wrapper, which keeps the original.
    if isinstance(original := vars(ddp).get("_orig_mod"), DistributedDataParallel):
        original.reducer, original.logger = ddp.reducer, ddp.logger
