"""Files that are whole after a crash, a power cut included, or not there at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

# What file systems answer that cannot synchronise a folder, or need not.
_NOT_FOR_FOLDERS = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EACCES)


def replace_file(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Has `write` fill a file that takes the place of `path` once it is on the disk.

    Until then `path` holds what it held before. What a killed process left of an earlier attempt
    is removed.

    Args:
        path: Written by one process at a time.
        write: Gets the file, open for writing.

    Raises:
        OSError: If the file cannot be written; `path` is as it was.
    """
    for stale in path.parent.glob(f".{path.name}.*.tmp"):
        stale.unlink(missing_ok=True)
    # In the same folder, because a rename is atomic only within one file system.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Waits until the names of the files in a folder are on the disk."""
    descriptor: int | None = None
    try:
        descriptor = os.open(folder, os.O_RDONLY)  # Windows refuses even this.
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_FOR_FOLDERS:
            raise
    finally:
        if descriptor is not None:
            os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Waits until all files below a folder are on the disk, whichever process wrote them.

    Raises:
        OSError: If one of them cannot be written: some disks say only now that they are full.
    """
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                descriptor = os.open(Path(place, name), os.O_RDONLY)
            except FileNotFoundError:
                continue  # Another rank's temporary file.
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_folder(Path(place))


def sync_checkpoint(folder: Path) -> None:
    """Waits until a checkpoint is on the disk: all files below it, and its own name.

    Raises:
        OSError: As `sync_tree`.
    """
    sync_tree(folder)
    sync_folder(folder.parent)
