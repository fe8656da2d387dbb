"""A checkpoint that all ranks write together: whole on all of them, or an error on all of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_dlion.checkpoint import whole as whole_checkpoint
from hf_dlion.checkpoint.durable import sync_folder, sync_tree
from hf_dlion.checkpoint.rank_files import require
from hf_dlion.optimizer import DistributedLion
from hf_dlion.ranks.header import Disagreement


@contextmanager
def saving(optimizer: object, folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Makes `folder` a checkpoint that is taken for whole only when all ranks have written it.

    Every rank enters and leaves together: the ranks meet four times, in one header each (unlike
    `save_momentum`, which waits for nobody). While they write, `folder` holds a file
    `checkpoint-is-incomplete.txt`; when all of them are done, what was written is on the disk and
    the file is renamed `checkpoint-is-complete.txt`. `hf_dlion.last_whole_checkpoint` looks at
    that. A folder that is written to again counts as incomplete meanwhile, so give every
    checkpoint its own.

    Args:
        optimizer: A DistributedLion, or Accelerate's wrapper around one.
        folder: Created if it does not exist.

    Yields:
        `folder`, as a path.

    Raises:
        Disagreement: On the other ranks if one fails, or on every rank if one takes a step while
            another saves.
        TypeError: If `optimizer` is another optimizer.

    Example:
        >>> import tempfile, torch, hf_dlion
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = hf_dlion.DistributedLion(model.named_parameters())
        >>> output_dir = tempfile.mkdtemp()
        >>> with saving(optimizer, f"{output_dir}/checkpoint_100") as folder:
        ...     if optimizer.rank == 0:
        ...         torch.save(optimizer.state_dict(), folder / "optimizer.bin")
        ...     path = hf_dlion.save_momentum(optimizer, folder)
        >>> hf_dlion.last_whole_checkpoint(output_dir) == str(folder)
        True
    """
    save, folder = Save(require(optimizer)), Path(folder)
    with save.part():
        whole_checkpoint.begin(folder)
    with save.part():
        yield folder
    with save.part():
        save.sync(folder)
    with save.part():
        whole_checkpoint.finish(folder)


class Save:
    """The parts of a save, after each of which all ranks meet."""

    def __init__(self, lion: DistributedLion) -> None:
        """Starts before the first part.

        Args:
            lion: Whose ranks meet.
        """
        self._lion = lion
        self._told = False

    @contextmanager
    def part(self) -> Iterator[None]:
        """Runs a part of the save, which may hold other parts, and has all ranks meet after it.

        What fails in a part is raised on every rank where the ranks next meet: there the failing
        rank joins the others, whichever part they are in, and raises its own error.
        """
        try:
            yield
        except Exception as error:
            self._meet(error)
            raise
        self._meet(None)

    def sync(self, folder: Path) -> None:
        """Waits for the disk, on one rank of each machine.

        A part of its own, after the one in which the ranks write: what another rank writes later
        would not be on the disk.
        """
        if self._lion.rank == 0 or os.environ.get("LOCAL_RANK") == "0":
            sync_tree(folder)
            # That holds the name of the checkpoint itself.
            sync_folder(folder.parent)

    def _meet(self, failure: Exception | None) -> None:
        if self._told:
            return
        try:
            self._lion._engine.meet_to_save(failure)
        except Disagreement:
            self._told = True
            if failure is None:
                raise
