"""Which of Trainer's older checkpoints go, once the new one is on the disk."""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import trainer as transformers_trainer
from transformers.trainer_utils import sort_checkpoints

from hf_dlion.checkpoint.durable import sync_folder, sync_tree
from hf_dlion.checkpoint.whole import TRAINER_STATE

_ROTATE = "rotate_checkpoints"

# The checkpoint that is being written, if one is.
_written: list[Path] = []


def wrap_rotation() -> bool:
    """Has Trainer's rotation come here within `rotation_after`; returns whether Trainer has one.

    It is a function of Trainer's module, not a method; elsewhere it does what it always did.
    """
    original = getattr(transformers_trainer, _ROTATE, None)
    if not callable(original):
        return False

    @functools.wraps(original)
    def rotate(
        output_dir: str,
        save_total_limit: int | None = None,
        best_model_checkpoint: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if _written and Path(output_dir) == _written[-1].parent:
            _rotate(_written[-1], save_total_limit, best_model_checkpoint)
        else:
            original(output_dir, save_total_limit, best_model_checkpoint, *args, **kwargs)

    setattr(transformers_trainer, _ROTATE, rotate)
    return True


@contextlib.contextmanager
def rotation_after(folder: Path) -> Iterator[None]:
    """Has Trainer's rotation keep a checkpoint, which Trainer writes in this context."""
    _written.append(folder)
    try:
        yield
    finally:
        _written.pop()


def _rotate(written: Path, limit: int | None, best: str | None) -> None:
    """Deletes what there is no room for: half checkpoints first, then the oldest; never `written`.

    Trainer would keep the highest number where the times of the folders say nothing, although it
    may be what a crash left half, and delete the one just written.
    """
    # What was written since the ranks met: the mark of the end.
    sync_tree(written)
    sync_folder(written.parent)
    if limit is None or limit <= 0:
        return
    found = [Path(path) for path in sort_checkpoints(str(written.parent), use_mtime=True)]
    kept = {written} if best is None else {written, Path(best)}
    # Only the mark is looked at: to read the files of all ranks at every save would take long.
    half_first = sorted(found, key=lambda path: (path / TRAINER_STATE).exists())
    victims = [path for path in half_first if path not in kept]
    for path in victims[: max(0, len(found) - max(limit, len(kept)))]:
        with contextlib.suppress(OSError):
            # First, so that what is left of it, if this process is killed, is not taken for whole.
            (path / TRAINER_STATE).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
