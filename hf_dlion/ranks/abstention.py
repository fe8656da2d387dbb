"""Ranks that abstain from whole steps, and for how long that may go on (rule S10)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_dlion.codec import codec_for
from hf_dlion.options.warn_once import warn_once


class Abstentions:
    """Counts, for every rank, the steps from which it abstained.

    All ranks count from the same headers, so all raise together. A state dict does not carry
    the counts, and loading one does not change them: a resumed process starts at none.

    Attributes:
        steps: For each rank, the number of steps from which it abstained.
        in_a_row: For each rank, how many of them were the last ones, without one in between.
    """

    def __init__(self, world_size: int, limit: int, voter: str = "rank") -> None:
        """Starts at none.

        Args:
            world_size: Number of ranks.
            limit: Steps in a row after which `note` raises; after half of them it warns.
            voter: What a rank is called here.
        """
        self._limit, self._voter = limit, voter
        self.steps = [0] * world_size
        self.in_a_row = [0] * world_size

    def note(self, finite: Sequence[bool]) -> int:
        """Counts one step and returns how many ranks abstained.

        Args:
            finite: For each rank, whether its gradients were finite.

        Raises:
            RuntimeError: If a rank reached the limit.
        """
        for other, good in enumerate(finite):
            self.steps[other] += not good
            self.in_a_row[other] = 0 if good else self.in_a_row[other] + 1
        self._raise_at_limit()
        return sum(not good for good in finite)

    def warn(self, rank: int, *, others: bool) -> None:
        """Warns of the step just counted, once per process; to be called at its end.

        Where warnings are errors, the step has been taken on this rank as on the others then.

        Args:
            rank: This rank, which warns of its own abstention.
            others: Whether it also warns of ranks that have abstained for half of the limit.
        """
        if self.in_a_row[rank]:
            warn_once(
                "abstention",
                f"gradients of {self._voter} {rank} hold a NaN or an Inf: it abstains from this "
                f"step and keeps its momentum; said once, `optimizer.wire.abstentions` goes on "
                f"counting",
            )
        if others:
            self._warn_at_half()

    def _raise_at_limit(self) -> None:
        stuck = [other for other, count in enumerate(self.in_a_row) if count >= self._limit]
        if stuck:
            raise RuntimeError(
                f"gradients of {self._voter} {_told(stuck)} held a NaN or an Inf in "
                f"{self._limit} steps in a row (max_abstained_steps={self._limit}): lower the "
                f"learning rate, check that {self._voter}'s data, or raise max_abstained_steps"
            )

    def _warn_at_half(self) -> None:
        half = self._limit // 2
        stuck = [other for other, count in enumerate(self.in_a_row) if count == half]
        # Of one step the first warning has just told.
        if stuck and half > 1:
            warn_once(
                f"abstention {self._voter} {_told(stuck)}",
                f"gradients of {self._voter} {_told(stuck)} held a NaN or an Inf in {half} steps "
                f"in a row, so that the others train without; at {self._limit} "
                f"(max_abstained_steps) all ranks raise",
            )


def _told(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def all_finite(
    grads: Sequence[Tensor], scale: Tensor | None = None, found_inf: Tensor | int | None = None
) -> bool:
    """Returns whether no gradient holds a NaN or an Inf; waits for each device once.

    Args:
        grads: Dense gradients of any floating dtype, on any devices.
        scale: GradScaler's, by which they are divided first, in place; None if they have been.
        found_inf: Not 0 if GradScaler saw a NaN or an Inf, the number 0 where it saw no gradient;
            None if it did not look.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        by_device.setdefault(grad.device, []).append(grad)
    # All devices are at work before the first is waited for.
    flags = [codec_for(device).all_finite(own, scale) for device, own in by_device.items()]
    if found_inf is not None:
        flags.append(torch.as_tensor(found_inf).view(()) == 0)
    together: dict[torch.device, list[Tensor]] = {}
    for flag in flags:
        together.setdefault(flag.device, []).append(flag)
    return all([bool(torch.stack(own).all()) for own in together.values()])
