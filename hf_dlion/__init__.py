"""Distributed Lion for Hugging Face and torch: ranks exchange signs instead of gradients.

Words used throughout: *direction* u; *sign* s of it; *packed* (64 signs in a word); *vote* (what
a rank sends); *verdict* (what every rank applies); *exchange* (votes in, verdict out); *abstain*
(cast no vote on a row); *tie*; *wire bytes* (what a rank hands to a collective and another host
must receive).

"Rule S4" and the like, here and in the tests, are sections of docs/rule.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_dlion.checkpoint.access import unwrap
from hf_dlion.checkpoint.momentum_file import CheckpointError
from hf_dlion.checkpoint.rank_files import load_momentum, save_momentum
from hf_dlion.checkpoint.save import saving
from hf_dlion.checkpoint.whole import last_whole_checkpoint
from hf_dlion.exchange import LostRank, WireStats
from hf_dlion.optimizer import DistributedLion
from hf_dlion.options import Options
from hf_dlion.ranks.agreement import Disagreement

if TYPE_CHECKING:
    from hf_dlion import accelerate, trainer
    from hf_dlion.trainer import DistributedLionCallback, optimizer_cls_and_kwargs, register

__version__ = "0.1.0"
__all__ = [
    "CheckpointError",
    "Disagreement",
    "DistributedLion",
    "DistributedLionCallback",
    "LostRank",
    "Options",
    "WireStats",
    "__version__",
    "accelerate",
    "last_whole_checkpoint",
    "load_momentum",
    "optimizer_cls_and_kwargs",
    "register",
    "save_momentum",
    "saving",
    "trainer",
    "unwrap",
]

# These need transformers or accelerate, which plain torch users of this package do not load.
_LATE_MODULES = ("accelerate", "trainer")
_LATE_NAMES = ("DistributedLionCallback", "optimizer_cls_and_kwargs", "register")


def __getattr__(name: str) -> Any:
    if name in _LATE_MODULES:
        return import_module(f"hf_dlion.{name}")
    if name in _LATE_NAMES:
        return getattr(import_module("hf_dlion.trainer"), name)
    raise AttributeError(f"module 'hf_dlion' has no attribute {name!r}")
