"""The checkpoint from which a Trainer resumes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from transformers import Trainer

from hf_dlion.checkpoint.agreed import agreed_checkpoint
from hf_dlion.checkpoint.momentum_file import CheckpointError
from hf_dlion.exchange import Wire, WireStats


def whole_checkpoint_for(trainer: Trainer, resume: Any) -> Any:
    """Returns what Trainer shall resume from, after checking on all ranks that it is whole.

    Every rank must call it. Bytes per rank: a few `Wire.gather_objects` on the default group.

    Args:
        trainer: About to train.
        resume: As given to `train(resume_from_checkpoint=...)`: True for the newest whole one,
            None or False for none.

    Raises:
        CheckpointError: On every rank, if the checkpoint that was named is not whole, or none is,
            or if the ranks were given different things.
    """
    args = trainer.args

    def gather(value: Any) -> list[Any]:
        if not (dist.is_available() and dist.is_initialized()):
            return [value]
        group = dist.group.WORLD
        assert group is not None, "an initialised torch.distributed has a default group"
        return Wire(group, WireStats(), args.device).gather_objects(value)

    def ranks_of(world_size: int) -> Iterable[int]:
        # Where each node has a disk of its own, the files of the others are not on it.
        everyone = range(world_size)
        if not args.save_on_each_node or world_size != args.world_size:
            return everyone
        first = args.process_index - args.local_process_index
        return everyone[first : first + int(os.environ.get("LOCAL_WORLD_SIZE", world_size))]

    _check_alike(gather("nothing" if not resume else "True" if resume is True else "a name"))
    if not resume:
        return resume
    named = None if resume is True else resume
    found = agreed_checkpoint(gather, args.process_index, named, str(args.output_dir), ranks_of)
    # Of no checkpoint at all Trainer says so itself.
    return resume if found is None else found


def _check_alike(asked: list[str]) -> None:
    """Raises if some ranks resume and others do not: they would enter different collectives."""
    if len(set(asked)) > 1:
        ranks = {what: [rank for rank, own in enumerate(asked) if own == what] for what in asked}
        told = ", ".join(f"{what} on ranks {some}" for what, some in ranks.items())
        raise CheckpointError(
            f"cannot resume: resume_from_checkpoint is {told}; give all ranks the same"
        )
