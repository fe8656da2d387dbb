"""Which optimizer a rank steps: where several have one layout, all ranks must step the same one."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

from hf_dlion.ranks.fingerprint import digest

# For each process group: what its ranks' optimizers of one layout, and of equal values, have
# counted when they first met.
_meetings: weakref.WeakKeyDictionary[Any, dict[Hashable, dict[tuple[int, ...], None]]] = (
    weakref.WeakKeyDictionary()
)

_count = itertools.count(1)


def new_number() -> int:
    """Returns the next number of this process's optimizers."""
    return next(_count)


class Which:
    """Tells an optimizer from others of its layout.

    Each process counts its optimizers, so ranks that make them in one order find counts that rise
    together, whatever else some of them have made between.

    Attributes:
        number: From `new_number`.
        met: Tells what all ranks have made of their numbers when they met first; 0 before that.
    """

    def __init__(self, number: int) -> None:
        """Has met no other rank's."""
        self.number, self.met = number, 0

    def marked(self, layout: int) -> int:
        """Returns a layout's hash that no other optimizer of the same layout has."""
        return digest((layout, self.met))

    def meet(self, numbers: Sequence[int], kind: Hashable, group: Any) -> bool:
        """Returns whether ranks that meet hold one another's; remembers their first meeting.

        Args:
            numbers: Every rank's.
            kind: Equal where optimizers could be taken for one another: layout and values.
            group: The process group; held weakly.
        """
        if self.met:  # Then `met` itself tells them apart.
            return True
        kinds = _meetings.setdefault(group, {})
        earlier = kinds.setdefault(kind, {})
        for other in earlier:
            later = [mine > theirs for mine, theirs in zip(numbers, other, strict=True)]
            if any(later) != all(later):
                return False
        earlier[tuple(numbers)] = None
        self.met = digest(numbers)
        return True
