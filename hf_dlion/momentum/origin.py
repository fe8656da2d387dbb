"""Whose momentum an optimizer holds: this rank's own, that of all ranks, or another rank's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_dlion.options.warn_once import warn_once


class MomentumOrigin:
    """Remembers what made the momenta, so a rank that lost its own says so."""

    def __init__(self) -> None:
        """Starts with momenta that are this rank's own."""
        self._averaged_at: int | None = None
        self._saved_by: int | None = None

    def averaged(self, steps: int) -> None:
        """Notes that after step `steps` all ranks hold the mean."""
        self._averaged_at, self._saved_by = steps, None

    def loaded(self, own: Mapping[str, Any]) -> None:
        """Notes that the momenta come from a state dict whose entry "dlion" is `own`."""
        self._averaged_at = None
        alone = own.get("world_size", 1) == 1
        self._saved_by = None if alone else own.get("rank")

    def entry(self, steps: int, rank: int, world_size: int) -> dict[str, int | None]:
        """Returns what a state dict says of it: "rank" is None if the momentum is that of all."""
        common = self._averaged_at == steps
        # Another rank's, loaded and not stepped yet, remains that rank's.
        made_by = rank if self._saved_by is None else self._saved_by
        return {"rank": None if common else made_by, "world_size": world_size}

    def warn_if_foreign(self, rank: int) -> None:
        """Warns, once per process, if this rank goes on with the momentum of another one."""
        if self._saved_by not in (None, rank):
            warn_once(
                "momentum",
                f"rank {rank} goes on with the momentum that rank {self._saved_by} saved, its own "
                f"is lost: call hf_dlion.load_momentum after load_state_dict, use "
                f"hf_dlion.register() or hf_dlion.accelerate.attach, or call "
                f"synchronize_momentum() before saving",
            )
        self._saved_by = None
