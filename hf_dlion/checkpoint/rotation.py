"""Which older checkpoints are deleted once a new one is on the disk, and how they go."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path

from hf_dlion.checkpoint.whole import is_unfinished

# How the names of what is being deleted start. They have a number, because Accelerate without us
# looks for one in all names, and an underscore first, because Trainer uploads no such folder with
# the model.
DELETED = "_deleted_"


def delete_superseded(
    written: Path,
    found: Sequence[Path],
    limit: int | None,
    *,
    best: Path | None = None,
    ignore_errors: bool = False,
) -> None:
    """Deletes the checkpoints over `limit`: unfinished ones first, then the oldest.

    To be called by one process of each disk, when `written` is whole and on the disk.

    Args:
        written: The checkpoint that was just written; never deleted, whatever its name or age.
        found: All checkpoints that count, `written` too, the oldest first.
        limit: So many may stay; None or 0 for all.
        best: Another one that is never deleted.
        ignore_errors: Whether one that cannot be deleted stays without an error.

    Raises:
        OSError: If one cannot be deleted.
    """
    if limit is None or limit <= 0:
        return
    kept = {written} if best is None else {written, best}
    # By names alone: to read the files of all ranks at every save would take long.
    unfinished_first = sorted(found, key=_seems_unfinished, reverse=True)
    doomed = [path for path in unfinished_first if path not in kept]
    for path in doomed[: max(0, len(found) - max(limit, len(kept)))]:
        with contextlib.suppress(OSError) if ignore_errors else contextlib.nullcontext():
            remove(path)


def remove(checkpoint: Path) -> None:
    """Deletes a checkpoint; a job that is killed meanwhile leaves nothing that is named like one.

    Raises:
        OSError: If it cannot be deleted.
    """
    if checkpoint.is_symlink():
        checkpoint.unlink()
        return
    # A killed job left some; one that cannot be deleted (a file in use on NFS) keeps its name.
    for left in checkpoint.parent.glob(f"{DELETED}[0-9]*"):
        shutil.rmtree(left, ignore_errors=True)
    taken = {path.name for path in checkpoint.parent.glob(f"{DELETED}[0-9]*")}
    names = (f"{DELETED}{number}" for number in itertools.count())
    doomed = checkpoint.with_name(next(name for name in names if name not in taken))
    # At once; files would go one by one, and those that are left could be taken for a whole one.
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)


def _seems_unfinished(checkpoint: Path) -> bool:
    """Returns whether a checkpoint is unfinished, or cannot be looked at: somebody deletes it."""
    try:
        return is_unfinished(checkpoint)
    except OSError:
        return True
