"""Distributed Lion for Hugging Face and torch: ranks exchange 1-bit votes instead of gradients.

docs/rule.md defines what every step computes and sends.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_dlion import accelerate
    from hf_dlion.checkpoint import CheckpointError, load_momentum, save_momentum
    from hf_dlion.optimizer import DistributedLion
    from hf_dlion.ranks.header import Disagreement
    from hf_dlion.ranks.stats import WireStats
    from hf_dlion.ranks.wire import LostRank
    from hf_dlion.trainer.registration import optimizer_cls_and_kwargs, register

__version__ = "0.2.0.dev0"
__all__ = [
    "CheckpointError",
    "Disagreement",
    "DistributedLion",
    "LostRank",
    "WireStats",
    "__version__",
    "accelerate",
    "load_momentum",
    "optimizer_cls_and_kwargs",
    "register",
    "save_momentum",
]

# Names are imported at their first use: a plain training loop needs no safetensors, transformers
# or accelerate, and the help of a command needs no torch.
_LATE = {
    "Disagreement": "ranks.header",
    "DistributedLion": "optimizer",
    "LostRank": "ranks.wire",
    "WireStats": "ranks.stats",
    **dict.fromkeys(("CheckpointError", "load_momentum", "save_momentum"), "checkpoint"),
    **dict.fromkeys(("optimizer_cls_and_kwargs", "register"), "trainer.registration"),
}


def __getattr__(name: str) -> Any:
    if name == "accelerate":
        return import_module("hf_dlion.accelerate")
    if name in _LATE:
        return getattr(import_module(f"hf_dlion.{_LATE[name]}"), name)
    raise AttributeError(f"module 'hf_dlion' has no attribute {name!r}")
