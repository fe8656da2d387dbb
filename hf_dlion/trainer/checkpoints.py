"""Trainer's checkpoints: a momentum per rank in them, each whole on all ranks or an error on all.

The wrappers around Trainer's methods that save and load. A momentum is saved where Trainer saves
the random state of every rank: `save_strategy` steps, epoch and best, a callback that sets
`should_save` and a just-in-time checkpoint all come through there, and `save_only_model` does not.

Every rank must enter a save. Its parts are those of `hf_dlion.checkpoint.save`, and the ranks meet
four times:

1. Trainer's own mark of the end, trainer_state.json, is removed.
2. `save_model` writes the weights, and the ranks meet: Trainer may have a barrier next.
   `_save_optimizer_and_scheduler` writes rank 0's state; `_save_rng_state` those of all ranks, to
   which we add the momenta, and the ranks meet.
3. What all of them wrote is brought to the disk, and the ranks meet.
4. Rank 0 writes trainer_state.json.
5. Rank 0 calls `rotate_checkpoints`, which first brings 4 to the disk, and the ranks meet.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
import transformers
from transformers import Trainer

from hf_dlion.checkpoint import rank_files
from hf_dlion.checkpoint.access import lion_in
from hf_dlion.checkpoint.agreed import agreed_checkpoint
from hf_dlion.checkpoint.durable import sync_checkpoint
from hf_dlion.checkpoint.momentum_file import CheckpointError
from hf_dlion.checkpoint.rotation import delete_superseded
from hf_dlion.checkpoint.save import Save
from hf_dlion.checkpoint.whole import INCOMPLETE, TRAINER_STATE, TRAINERS_OPTIMIZERS
from hf_dlion.exchange import Wire, WireStats
from hf_dlion.options.parallelism import replicas_of
from hf_dlion.trainer.internals import PREFIX, internal_function

# One of Trainer's, bound to the Trainer.
Method = Callable[..., Any]

# The save that a Trainer is in the middle of.
_saves: WeakKeyDictionary[Trainer, Save] = WeakKeyDictionary()

# This rank's GradScaler state, between the two methods that load the optimizer and the scaler.
_scaler_states: WeakKeyDictionary[Trainer, dict[str, Any]] = WeakKeyDictionary()


def _around_save_checkpoint(trainer: Trainer, original: Method, model: Any, trial: Any) -> None:
    lion = lion_in(trainer.optimizer)
    if lion is None:
        original(model, trial)
        return
    name = f"{PREFIX}-{trainer.state.global_step}"
    folder = Path(trainer._get_output_dir(trial=trial), name)
    _saves[trainer] = save = Save(lion, folder)
    try:
        with save.part():
            # One of an earlier save must not stand for what is being written.
            (folder / TRAINER_STATE).unlink(missing_ok=True)
            # Trainer takes a new best one for its best only where its folder is, and for weights in
            # parts nobody has made that yet.
            folder.mkdir(parents=True, exist_ok=True)
            original(model, trial)
            # Trainer's just-in-time checkpoint puts it there and takes it away, on every rank: one
            # that looks and another that removes it meanwhile would end the job.
            (folder / INCOMPLETE).unlink(missing_ok=True)
    finally:
        del _saves[trainer]


def _part_of_save(trainer: Trainer) -> AbstractContextManager[None]:
    # A user may call these methods outside of a save, on one rank alone.
    return _saves[trainer].part() if trainer in _saves else nullcontext()


def _sync(trainer: Trainer) -> None:
    if trainer in _saves:
        _saves[trainer].sync()


def _around_save_model(
    trainer: Trainer,
    original: Method,
    output_dir: str | None = None,
    _internal_call: bool = False,
) -> None:
    if not _internal_call:
        original(output_dir, _internal_call)
        return
    # Before the barrier that Trainer enters next if there is a best model: rank 0 may fail before.
    with _part_of_save(trainer):
        original(output_dir, _internal_call)
    if trainer.args.save_only_model and output_dir is not None:
        _sync(trainer)  # Nothing follows that all ranks enter.


def _around_save_optimizer_and_scheduler(
    trainer: Trainer, original: Method, output_dir: str
) -> None:
    lion = lion_in(trainer.optimizer)
    if lion is not None and lion.options.checkpoint == "mean":
        # Before rank 0 writes its state, which is then every rank's.
        lion.synchronize_momentum()
        rank_files.remove_momentum(output_dir)
    try:
        original(output_dir)
    except BaseException:
        if trainer in _saves and replicas_of(trainer.accelerator) is not None:
            _saves[trainer].leave()  # The others may wait for this rank's part of the weights.
        raise


def _around_save_rng_state(trainer: Trainer, original: Method, output_dir: str) -> None:
    lion = lion_in(trainer.optimizer)
    # Rank 0 goes on to write trainer_state.json, and to delete older checkpoints.
    with _part_of_save(trainer):
        original(output_dir)
        if lion is not None and lion.options.checkpoint != "mean":
            rank_files.save_momentum(lion, output_dir, scaler=_scaler(trainer))
    _sync(trainer)


def wrap_rotation() -> None:
    """Has Trainer's rotation come here within a save.

    It is a function of Trainer's module, not a method; elsewhere it does what it always did. Where
    the times of the folders say nothing, Trainer alone would keep the highest number, which may be
    what a crash left half, and delete the one just written.

    Raises:
        RuntimeError: If transformers has no such rotation.
    """
    known = ("output_dir", "save_total_limit", "best_model_checkpoint")
    original = internal_function("trainer:rotate_checkpoints", known)
    known = ("output_dir", "checkpoint_prefix", "use_mtime")
    sort_checkpoints = internal_function("trainer_utils:sort_checkpoints", known)

    @functools.wraps(original)
    def rotate(
        output_dir: str,
        save_total_limit: int | None = None,
        best_model_checkpoint: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        written = [s.folder for s in _saves.values() if s.folder.parent == Path(output_dir)]
        if not written:
            original(output_dir, save_total_limit, best_model_checkpoint, *args, **kwargs)
            return
        sync_checkpoint(written[0])  # The mark of the end was written since the ranks met.
        if save_total_limit:
            found = [Path(path) for path in sort_checkpoints(output_dir, use_mtime=True)]
            best = Path(best_model_checkpoint) if best_model_checkpoint else None
            delete_superseded(written[0], found, save_total_limit, best=best, ignore_errors=True)

    setattr(transformers.trainer, "rotate_checkpoints", rotate)  # noqa: B010 (mypy)


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

    asked = gather("nothing" if not resume else "True" if resume is True else "a name")
    if len(set(asked)) > 1:  # They would enter different collectives.
        ranks = {what: [rank for rank, own in enumerate(asked) if own == what] for what in asked}
        told = ", ".join(f"{what} on ranks {some}" for what, some in ranks.items())
        raise CheckpointError(
            f"cannot resume: resume_from_checkpoint is {told}; give all ranks the same"
        )
    if not resume:
        return resume
    named = None if resume is True else resume
    found = agreed_checkpoint(gather, args.process_index, named, str(args.output_dir), ranks_of)
    # Of no checkpoint at all Trainer says so itself.
    return resume if found is None else found


def _around_load_optimizer_and_scheduler(
    trainer: Trainer, original: Method, checkpoint: str | None
) -> None:
    lion = lion_in(trainer.optimizer)
    if lion is None or checkpoint is None:
        original(checkpoint)
        return
    loaded = rank_files.load_common(
        lambda: original(checkpoint), at_once=replicas_of(trainer.accelerator) is not None
    )
    state = rank_files.resume_momentum(lion, checkpoint, TRAINERS_OPTIMIZERS, loaded=loaded)
    if state is not None:
        _scaler_states[trainer] = state


def _around_load_scaler(trainer: Trainer, original: Method, checkpoint: str | None) -> None:
    original(checkpoint)
    state = _scaler_states.pop(trainer, None)
    if state is not None and _scaler(trainer) is not None:
        # Trainer has just given every rank the state of rank 0.
        _scaler(trainer).load_state_dict(state)


def _scaler(trainer: Trainer) -> Any:
    return getattr(trainer.accelerator, "scaler", None)


# The methods that are wrapped, by what, and the parameters that the wrappers rely on.
SEAMS: dict[str, tuple[Method, tuple[str, ...]]] = {
    "_save_checkpoint": (_around_save_checkpoint, ("model", "trial")),
    "save_model": (_around_save_model, ("output_dir", "_internal_call")),
    "_save_optimizer_and_scheduler": (_around_save_optimizer_and_scheduler, ("output_dir",)),
    "_save_rng_state": (_around_save_rng_state, ("output_dir",)),
    "_load_optimizer_and_scheduler": (_around_load_optimizer_and_scheduler, ("checkpoint",)),
    "_load_scaler": (_around_load_scaler, ("checkpoint",)),
}
