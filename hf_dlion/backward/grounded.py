"""What stands for a step's flight before its first message leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from hf_dlion.backward.flight import Flight


class Grounded:
    """No message of the coming step has left yet.

    Attributes:
        began: Whether one may have.
    """

    began = False

    def begun(self, begin: Callable[[], Flight]) -> Flight:
        """Returns what the step's first message leaves with: a flight that begins now."""
        return begin()

    def disturb(self) -> None:
        """Does nothing: no vote is on its way."""

    def unknown(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Returns all of the parameters: nobody has looked at their gradients."""
        return list(params)


GROUNDED = Grounded()
