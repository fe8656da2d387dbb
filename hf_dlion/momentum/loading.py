"""Loading a state dict into an optimizer: checked first, restored before the user's hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.optim import Optimizer

from hf_dlion.momentum.group_entry import with_entry_from_groups
from hf_dlion.momentum.state_dict import check_state

Own = Mapping[str, Any]


@contextlib.contextmanager
def checked_loading(
    optimizer: Optimizer, version: int, restore: Callable[[Mapping[str, Any], Own | None], None]
) -> Iterator[None]:
    """Makes torch's `load_state_dict`, called inside, check a state dict and restore from it.

    As hooks, so that what the user's own hooks return is checked and restored.

    Args:
        optimizer: The one that loads.
        version: Of the states that it reads.
        restore: Called after torch's part with the state dict and its entry "dlion", which is None
            for an empty state without one.

    Raises:
        ValueError: If the state dict does not fit; nothing is changed then.
    """
    found: dict[str, Any] = {}

    def check(_: Optimizer, hooked: dict[str, Any]) -> dict[str, Any]:
        placed = with_entry_from_groups(hooked)
        own = check_state(placed, optimizer.param_groups, version)
        found.update(state_dict=placed, own=own)
        return placed

    def take(_: Optimizer) -> None:
        restore(found["state_dict"], found["own"])

    before = optimizer.register_load_state_dict_pre_hook(check)
    after = optimizer.register_load_state_dict_post_hook(take, prepend=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()
