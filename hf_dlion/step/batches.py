"""Which rank went on to another batch without a step: counts of backward passes (rule S12).

    rank 0:  backward                        step
    rank 1:  backward  zero_grad  backward   step      from here on a batch ahead of rank 0

`if not isfinite(norm): continue` does that. After DDP's all-reduce all ranks see one gradient and
skip together; here each sees its own.
"""

from __future__ import annotations


class Batches:
    """Counts backward passes since the last step, and those that followed dropped gradients.

    A rank that skipped a step differs from the others in both counts. One that accumulates more
    passes differs in the first alone, and one that drops some of equally many in the second alone.
    A rank whose gradients are dropped just before a step abstains, and is not compared.

    Of a model in a DDP wrapper only the passes count in which DDP would have reduced: one rank may
    look at gradients through the bare model, or drop what it accumulated under no_sync().

    Attributes:
        passes: Backward passes.
        dropped: How often all gradients were dropped and another pass followed.
    """

    def __init__(self) -> None:
        """Starts before the first forward."""
        self.passes = self.dropped = 0
        # Whether there is a wrapper, and whether it ran forward since the last pass.
        self._wrapped = self._forward = False
        # Whether there are gradients of a pass that counts, and whether some were dropped.
        self._holds = self._lacks = False

    def note_forward(self, sync: bool) -> None:
        """Takes note of a wrapper's forward pass; `sync` is False under no_sync()."""
        if not self._wrapped:
            # What came before the wrapper was no training.
            self._wrapped = True
            self.passes = self.dropped = 0
            self._holds = self._lacks = False
        self._forward |= sync

    def note_pass(self) -> None:
        """Takes note of the first gradient of a backward pass."""
        if self._forward or not self._wrapped:
            self._forward = False
            self.passes += 1
            self.dropped += self._lacks
            self._holds, self._lacks = True, False

    def note_dropped(self) -> None:
        """Takes note that all gradients were dropped."""
        self._lacks |= self._holds
        self._holds = False

    def note_step(self) -> None:
        """Takes note that a step was taken with the gradients that were there."""
        self._holds = self._lacks = False

    def taken(self) -> tuple[int, int]:
        """Returns `passes` and `dropped`, zeros if no gradients are left, and starts them anew."""
        counts = (self.passes, self.dropped) if self._holds else (0, 0)
        self.passes = self.dropped = 0
        return counts
