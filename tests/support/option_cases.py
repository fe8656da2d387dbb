"""Values of every option, good and bad."""

from __future__ import annotations

import math
from typing import Any

import torch

EXAMPLES = {
    "local_group": ("node", "node"),
    "aggregation": ("average", "average"),
    "ties": ("zero", "zero"),
    "bits": ("4", 4),
    "level_scale": ("tensor", "tensor"),
    "exchange": ("two_phase", "two_phase"),
    "overlap": ("true", True),
    "stochastic_rounding": ("false", False),
    "momentum_dtype": ("bfloat16", torch.bfloat16),
    "seed": ("7", 7),
    "max_abstained_steps": ("3", 3),
    "checkpoint": ("mean", "mean"),
    "check_replicas_every": ("50", 50),
    "on_divergence": ("repair", "repair"),
    "momentum_sync_every": ("10", 10),
    "momentum_sync": ("auto", "auto"),
    "momentum_sync_dtype": ("float32", torch.float32),
    "momentum_sync_budget": ("20000", 20_000),
    "full_precision": ("*.bias;*norm*", "*.bias;*norm*"),
    "warmup_full_steps": ("5", 5),
}

# What an option has no effect without.
NEEDS = {
    "level_scale": ("bits",),
    "on_divergence": ("check_replicas_every",),
    "momentum_sync": ("momentum_sync_every",),
    "momentum_sync_dtype": ("momentum_sync_every",),
    "momentum_sync_budget": ("momentum_sync_every", "momentum_sync"),
}


def needed(name):
    """Returns what makes an option effective, as keyword arguments."""
    return {other: EXAMPLES[other][1] for other in NEEDS.get(name, ())}


BAD_OPTIONS: list[tuple[str, Any, type[Exception]]] = [
    ("lr", -1e-3, ValueError),
    ("lr", math.nan, ValueError),
    ("lr", math.inf, ValueError),
    ("lr", "0.1", TypeError),
    ("lr", None, TypeError),
    ("lr", torch.ones(2), TypeError),
    ("betas", (1.0, 0.99), ValueError),
    ("betas", (0.9, 1.0), ValueError),
    ("betas", (-0.1, 0.99), ValueError),
    ("betas", (0.9, math.nan), ValueError),
    ("betas", 0.9, TypeError),
    ("betas", (0.9,), TypeError),
    ("betas", (0.9, 0.99, 0.999), TypeError),
    ("betas", ("0.9", 0.99), TypeError),
    ("weight_decay", -0.1, ValueError),
    ("weight_decay", math.nan, ValueError),
    ("weight_decay", "0.1", TypeError),
    ("aggregation", "median", ValueError),
    ("aggregation", 3, TypeError),
    ("ties", "random", ValueError),
    ("ties", None, TypeError),
    ("bits", 3, ValueError),
    ("bits", 0, ValueError),
    ("bits", 16, ValueError),
    ("bits", True, TypeError),
    ("bits", "4", TypeError),
    ("exchange", "ring", ValueError),
    ("exchange", True, TypeError),
    ("stochastic_rounding", 1, TypeError),
    ("stochastic_rounding", "yes", TypeError),
    ("momentum_dtype", torch.int8, ValueError),
    ("momentum_dtype", torch.complex64, ValueError),
    ("momentum_dtype", "bfloat16", TypeError),
    ("momentum_sync_every", -1, ValueError),
    ("momentum_sync_every", True, TypeError),
    ("momentum_sync", 3, TypeError),
    ("momentum_sync", "", ValueError),
    ("momentum_sync_dtype", torch.float16, ValueError),
    ("momentum_sync_dtype", "bfloat16", TypeError),
    ("momentum_sync_budget", 0.5, TypeError),
    ("full_precision", "*.bias", ValueError),
    ("full_precision", [1], TypeError),
    ("warmup_full_steps", -1, ValueError),
    ("process_group", "gloo", TypeError),
    ("process_group", 0, TypeError),
    ("seed", -1, ValueError),
    ("seed", 2**64, ValueError),
    ("seed", 1.5, TypeError),
    ("seed", True, TypeError),
    ("max_abstained_steps", 0, ValueError),
    ("max_abstained_steps", -1, ValueError),
    ("max_abstained_steps", 2.0, TypeError),
    ("checkpoint", "rank0", ValueError),
    ("checkpoint", None, TypeError),
    ("check_replicas_every", -1, ValueError),
    ("check_replicas_every", True, TypeError),
    ("check_replicas_every", None, TypeError),
    ("on_divergence", "ignore", ValueError),
    ("on_divergence", None, TypeError),
]
