"""Saves and loads what differs between ranks: their momenta."""

from hf_dlion.checkpoint.momentum_file import NAME, CheckpointError
from hf_dlion.checkpoint.save_load import (
    find_lion,
    load_for,
    load_momentum,
    momenta_apart,
    save_momentum,
)

__all__ = [
    "NAME",
    "CheckpointError",
    "find_lion",
    "load_for",
    "load_momentum",
    "momenta_apart",
    "save_momentum",
]
