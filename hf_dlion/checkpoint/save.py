"""A checkpoint that all ranks write together: whole on all of them, or an error on all of them.

A save has these parts. All ranks meet after each, in one header, and what failed on one of them is
raised on all:

1. begin: the folder is marked as incomplete. From here on a crash leaves nothing taken for whole.
2. write: every rank its own files, rank 0 also those that the ranks share.
3. sync: one rank of each machine waits until what all ranks wrote is on the disk.
4. finish: the mark changes to complete.
5. rotate: older checkpoints over a limit are deleted (`rotation.delete_superseded`).

`saving` does 1 to 4 around the body of a `with`. `hf_dlion.accelerate` does all of them around
`save_state`. Trainer has methods of its own for some of them:
`hf_dlion.trainer.checkpoints` adds the meetings. There 1 removes trainer_state.json, Trainer's own
mark of the end; 2 are two parts, the weights and the rest; and rank 0 does 4 and 5 in the last.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_dlion.checkpoint import whole
from hf_dlion.checkpoint.access import meet_to_save, unwrap
from hf_dlion.checkpoint.durable import sync_checkpoint
from hf_dlion.optimizer import DistributedLion
from hf_dlion.ranks.agreement import Disagreement


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

    Examples:
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
    save = Save(unwrap(optimizer), Path(folder))
    save.begin()
    with save.part():
        yield save.folder
    save.sync()
    save.finish()


class Save:
    """One save: its folder, and the parts after each of which all ranks meet.

    Attributes:
        folder: The checkpoint.
        begun: Whether it is marked.
        at_momenta: Whether this rank has come to its momentum, past the collectives of FSDP.
    """

    begun = at_momenta = False

    def __init__(self, lion: DistributedLion, folder: Path) -> None:
        """Starts before the first part.

        Args:
            lion: Whose ranks meet.
            folder: The checkpoint.
        """
        self.folder = folder
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

    def begin(self) -> None:
        """Marks the folder as incomplete, and makes it if there is none."""
        with self.part():
            whole.begin(self.folder)
        self.begun = True

    def leave(self) -> None:
        """Lets this rank raise what failed at once, and meet nobody.

        Where the others wait for it in collectives that are not ours, the end of its process is all
        that they can learn of.
        """
        self._told = True

    def sync(self) -> None:
        """Waits for the disk, on one rank of each machine.

        A part of its own, after the one in which the ranks write: what another rank writes later
        would not be on the disk.
        """
        with self.part():
            if self._lion.rank == 0 or os.environ.get("LOCAL_RANK") == "0":
                sync_checkpoint(self.folder)

    def finish(self) -> None:
        """Marks the folder as complete."""
        with self.part():
            whole.finish(self.folder)

    def _meet(self, failure: Exception | None) -> None:
        # The others are told once: they have left the save when this rank's error passes on
        # through the parts around the one that failed.
        if self._told:
            return
        try:
            meet_to_save(self._lion, failure)
        except Disagreement:
            self._told = True
            if failure is None:
                raise
