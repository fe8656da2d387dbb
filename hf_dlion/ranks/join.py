"""Ranks with different numbers of batches: `DistributedLion` in torch's `Join`.

    with Join([optimizer]):         rank 0:  step  step  step  step
        for batch in data:          rank 1:  step  step  (out of data: abstains, applies) ...
            ...
            optimizer.step()

A rank that has run out of data goes on taking part in the others' steps. It has no gradient, so
that it abstains from every parameter and keeps its momentum, and applies what the others voted for:
replicas stay equal, and the result is that of the rule.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch.distributed.algorithms.join import Joinable, JoinHook

from hf_dlion.options import Options


class JoinableOptimizer(Joinable):
    """What `Join` asks of an optimizer whose `step()` all ranks take together."""

    @property
    @abstractmethod
    def options(self) -> Options:
        """The optimizer's options."""

    @property
    @abstractmethod
    def _sharded(self) -> bool:
        """Whether parameters are sharded."""

    @abstractmethod
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the gradients."""

    @abstractmethod
    def step(self, closure: None = None) -> Any:
        """Takes one step together with all ranks."""

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Returns what `Join` calls on a rank that has run out of data.

        Args:
            kwargs: What the `Join` was given for all that it joins; not used.

        Raises:
            NotImplementedError: With `local_group` or sharded parameters: inside a node or a
                replica gradients are averaged, which takes every rank's backward pass.
        """
        if self._sharded:
            raise NotImplementedError(
                "Join does not work with sharded parameters: FSDP needs every rank of a replica in "
                "every forward and backward; give every rank as many batches"
            )
        if self.options.local_group not in (None, 1):
            raise NotImplementedError(
                f"Join does not work with local_group={self.options.local_group!r}: a rank without "
                f"data makes no backward pass, in which its node averages gradients; leave out "
                f"local_group, or give every rank as many batches"
            )
        return _StepsWithoutData(self)

    def _leave_join(self) -> None:
        """Tells no `Join` of this rank's steps from now on."""
        Joinable.__init__(self)


class _StepsWithoutData(JoinHook):
    """Takes part in the steps of the ranks that still have data."""

    def __init__(self, optimizer: JoinableOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        # The others would take this rank's steps for such with data, and wait for more of them.
        self._optimizer._leave_join()
        # What an accumulation left over when the data ended is no gradient of these steps.
        self._optimizer.zero_grad()
        self._optimizer.step()

    def post_hook(self, is_last_joiner: bool) -> None:
        # torch's own go on telling after the context; here that would be bytes for nothing.
        self._optimizer._leave_join()
