"""What a user may choose, and what it means for each parameter.

In: keyword arguments of `DistributedLion`, the text of `optim_args`, torch's parameter groups.
Out: checked values, indices and names of parameters, and how each is treated.

- `options`: every option, described and checked; `described` shows them in the optimizer's help.
- `groups`: what parameter groups may hold, and who is where; `params`: which parameters may.
- `selection`, `naming`: parameters chosen by name, and where names come from.
- `treatment`: whose gradients or momenta are averaged.
- `optim_args`: options written as text; `warn_once`: a warning that is given once.
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
