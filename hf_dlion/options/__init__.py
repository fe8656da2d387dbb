"""What a user may choose, and what it means for each parameter group.

In: keyword arguments of `DistributedLion`, `optim_args`, and torch's parameter groups.
Out: checked `Options`, names of parameters, and what is exchanged of each of them.
"""

from hf_dlion.options.groups import check_group
from hf_dlion.options.options import (
    BITS,
    SYNC_WORDS,
    Aggregation,
    CheckpointMode,
    ExchangeName,
    LevelScale,
    NodeName,
    OnDivergence,
    Options,
    Ties,
)

__all__ = [
    "BITS",
    "SYNC_WORDS",
    "Aggregation",
    "CheckpointMode",
    "ExchangeName",
    "LevelScale",
    "NodeName",
    "OnDivergence",
    "Options",
    "Ties",
    "check_group",
]
