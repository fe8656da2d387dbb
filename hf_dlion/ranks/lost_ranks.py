"""Finds the ranks that were lost, of which a backend's error names none.

A rank that gets such an error writes a key into the rendezvous store. A rank that waits looks for
such keys now and then, so it neither waits for its own error nor is taken for lost. A store may
also be lost, with the rank that serves it, so no call of it is waited for without a limit.

A rank that raises isn't lost: its error waits for the next header (`peers`).
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

T = TypeVar("T")

# Seconds between two looks for reports, and those for which a rank that has reported waits for the
# reports of others.
LOOK_S, REPORTS_S = 0.5, 2.0
# Seconds after which a store is given up.
_STORE_S = 1.0

_numbers = itertools.count(1)
# A number for each default group of this process, because a store may outlive it; see `note_world`.
_worlds: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
# Default groups whose store didn't answer.
_mute: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def note_world() -> int | None:
    """Returns the number of the default group; None if there is no group.

    An optimizer calls this when it is made, and before its first header. Numbers are given in
    order, so they are equal on all ranks if all had an optimizer in each earlier group. If not, a
    lost rank is named later, by the backend's own error.
    """
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if world is None:
        return None
    if world not in _worlds:
        _worlds[world] = next(_numbers)
    return _worlds[world]


def was_reported(group: dist.ProcessGroup) -> bool:
    """Returns whether a rank of the group has called `report`; needs no other rank."""
    key = _key(group, "any")
    return bool(_ask(lambda store: store.check([key])))


def report(group: dist.ProcessGroup) -> list[int]:
    """Reports that this rank has lost one of a group; returns the ranks that haven't reported.

    Returns all other ranks if the store doesn't answer. Takes up to `REPORTS_S` seconds, unless all
    ranks but one have reported.
    """
    ranks = dist.get_process_group_ranks(group)
    silent = [rank for rank in ranks if rank != dist.get_rank()]

    def write(store: Any) -> bool:
        store.set(_key(group, str(dist.get_rank())), "lost")
        store.set(_key(group, "any"), "lost")
        return True

    if len(silent) == 1 or not _ask(write):
        return silent
    deadline = time.monotonic() + REPORTS_S
    while len(silent) > 1 and time.monotonic() < deadline:

        def still_silent(store: Any) -> list[int]:
            return [rank for rank in ranks if not store.check([_key(group, str(rank))])]

        if (answer := _ask(still_silent)) is None:
            break
        silent = answer
        time.sleep(0.1)
    return silent


def _key(group: dist.ProcessGroup, name: str) -> str:
    members = "-".join(map(str, dist.get_process_group_ranks(group)))
    return f"hf_dlion/lost/{note_world()}/{members}/{name}"


def _ask(question: Callable[[Any], T]) -> T | None:
    """Returns the answer of the default group's store; None if there is no answer in time."""
    world = dist.group.WORLD
    if world is None or world in _mute:
        return None
    answers: list[T] = []

    def ask() -> None:
        try:
            answers.append(question(distributed_c10d._get_default_store()))
        except Exception:  # The store is lost, or this torch has another name for it.
            return

    thread = threading.Thread(target=ask, daemon=True, name="hf_dlion store")
    thread.start()
    thread.join(_STORE_S)
    if not answers:
        _mute.add(world)
        return None
    return answers[0]
