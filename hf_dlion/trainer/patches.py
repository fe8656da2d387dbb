"""The wrappers around methods of Trainer and TrainingArguments.

Every rank enters these methods, so the ranks can meet in them. The wrappers do nothing if the
Trainer's optimizer is not a DistributedLion. A save with its meetings, in which a failure on one
rank is raised on all:

    _save_checkpoint
      save_model                      rank 0 writes the weights                     meeting
      _save_optimizer_and_scheduler   rank 0 writes the common state
      _save_rng_state                 every rank writes RNG state and momentum      2 meetings
      ...                             rank 0 writes trainer_state.json and
                                      deletes older checkpoints                     meeting

With FSDP2, ranks that wait for one another's shards don't meet, and only failures in writing the
momentum are raised on all.

With local steps (`vote_every` above 1), what is saved are the weights that all ranks have. To save
exchanges nothing, so it changes nothing in the run.
"""

from __future__ import annotations

import functools
import os
import pkgutil
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import transformers
from accelerate.utils import gather_object
from transformers import Trainer, TrainingArguments
from transformers.utils import logging

from hf_dlion.accelerate import is_sharded, replicas_of
from hf_dlion.checkpoint import NAME, CheckpointError, find_optimizer, load_momentum, save_momentum
from hf_dlion.optimizer import DistributedLion
from hf_dlion.ranks.header import Kind
from hf_dlion.trainer.callback import exchange_rest, prepare, put_first, refuse
from hf_dlion.trainer.optim_args import (
    OPTIM_NAME,
    as_text,
    check_optim_name,
    only_ours,
    parse_optim_args,
)

logger = logging.get_logger(__name__)

# What transformers writes last into a checkpoint.
TRAINER_STATE = "trainer_state.json"
_INSTALLED = "_hf_dlion_installed"

# Trainers in a save, and whether the other ranks know of a failure in it.
_told: WeakKeyDictionary[Trainer, bool] = WeakKeyDictionary()


def missing(what: str) -> RuntimeError:
    """Returns the error for a version of transformers that lacks `what`."""
    return RuntimeError(
        f"hf_dlion needs {what}, which transformers {transformers.__version__} doesn't have; it "
        f"works with transformers 5.2 to 5.23. Without Trainer, use DistributedLion with "
        f"Accelerate or in a loop of your own"
    )


def internal(path: str) -> Any:
    """Returns what "module:name" is in transformers.

    Raises:
        RuntimeError: If it isn't there.
    """
    try:
        return pkgutil.resolve_name(f"transformers.{path}")
    except (ImportError, AttributeError) as error:
        raise missing(path.replace(":", ".")) from error


def install() -> None:
    """Wraps the methods, once per process.

    Raises:
        RuntimeError: If this version of transformers lacks one of them; nothing is wrapped then.
    """
    if hasattr(Trainer, _INSTALLED):
        return
    for name in _AROUND:
        internal(f"trainer:Trainer.{name}")
    _wrap(TrainingArguments, "__post_init__", _check_arguments)
    for name, around in _AROUND.items():
        _wrap(Trainer, name, around)
    setattr(Trainer, _INSTALLED, True)


def _wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(self, functools.partial(original, self), *args, **kwargs)

    setattr(owner, name, wrapper)


def _check_arguments(args: TrainingArguments, original: Callable[[], None]) -> None:
    check_optim_name(
        str(getattr(args.optim, "value", args.optim)),
        [str(name.value) for name in internal("training_args:OptimizerNames")],
    )
    _check_optim_args(args)
    original()


def _check_optim_args(args: TrainingArguments) -> None:
    given: Any = args.optim_args
    if isinstance(given, Mapping):
        args.optim_args = as_text(given)
    if args.optim == OPTIM_NAME:
        parse_optim_args(args.optim_args, {})


def _train(
    trainer: Trainer,
    original: Callable[..., Any],
    resume_from_checkpoint: str | bool | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    # For every Trainer: a subclass may make its optimizer only later.
    put_first(trainer)
    _check_optim_args(trainer.args)  # They may have changed since they were made.
    if _uses_lion(trainer):
        refuse(trainer)
        resume_from_checkpoint = _agreed_checkpoint(trainer, resume_from_checkpoint)
    elif idle := only_ours(trainer.args.optim_args):
        logger.warning_once(
            f"optim_args={trainer.args.optim_args!r} with optim={str(trainer.args.optim)!r}: only "
            f"DistributedLion has {', '.join(idle)}, so this has no effect; set "
            f"optim={OPTIM_NAME!r} to use it"
        )
    try:
        return original(resume_from_checkpoint, *args, **kwargs)
    finally:
        # on_train_end isn't reached after an exception, and another Trainer may use the model.
        if (lion := find_optimizer(trainer.optimizer)) is not None:
            lion.detach()


def _uses_lion(trainer: Trainer) -> bool:
    if trainer.optimizer is not None:
        return find_optimizer(trainer.optimizer) is not None
    if trainer.optimizer_cls_and_kwargs is not None:
        cls = trainer.optimizer_cls_and_kwargs[0]
        return isinstance(cls, type) and issubclass(cls, DistributedLion)
    return bool(trainer.args.optim == OPTIM_NAME)


def _create_optimizer(
    trainer: Trainer, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Makes the optimizer vote between FSDP2's replicas, whose mesh the arguments don't know.

    Trainer calls this before it wraps the model, also if there is an optimizer.
    """
    if (lion := find_optimizer(trainer.optimizer)) is not None:
        # After "out of memory" Trainer makes a new DDP wrapper, which copies rank 0's weights.
        lion.detach()
    replicas = replicas_of(trainer.accelerator)
    if replicas is None or trainer.optimizer is not None or not _uses_lion(trainer):
        return original(*args, **kwargs)
    given = trainer.optimizer_cls_and_kwargs
    cls, options = given or trainer.get_optimizer_cls_and_kwargs(trainer.args)
    trainer.optimizer_cls_and_kwargs = cls, {**options, "replicate": replicas}
    try:
        return original(*args, **kwargs)
    finally:  # The next training may have other arguments.
        trainer.optimizer_cls_and_kwargs = given


def _agreed_checkpoint(trainer: Trainer, resume: str | bool | None) -> str | None:
    """Returns the folder to resume from, the same on all ranks, which all call this.

    Raises:
        CheckpointError: If it isn't the same, or `output_dir` isn't; ranks would mix up the
            collectives that follow.
        ValueError: If `resume` is True, and no checkpoint is complete.
    """
    folder, failure = str(resume) if resume else None, None
    if resume is True:
        try:
            folder = _newest_complete(str(trainer.args.output_dir))
        except ValueError as error:
            failure = error
    # Also where the first save would fail, which may be hours away.
    output = trainer.args.output_dir if trainer.args.save_strategy != "no" else ""
    places = gather_object([str(output)])
    if len(set(places)) > 1:
        ranks = "; ".join(f"rank {rank}: {own}" for rank, own in enumerate(places))
        raise CheckpointError(
            f"ranks have different output_dirs ({ranks}), and save one checkpoint together: pass "
            f"the same path on every rank"
        )
    told = gather_object([str(failure or folder)])
    if len(set(told)) > 1:
        ranks = "; ".join(f"rank {rank}: {own}" for rank, own in enumerate(told))
        raise CheckpointError(
            f"ranks were told to resume differently ({ranks}): pass the same "
            f"resume_from_checkpoint on every rank, and use an output_dir that all nodes share"
        )
    if failure is not None:
        raise failure
    return folder


def _newest_complete(folder: str) -> str:
    """Returns the checkpoint of the highest step that a save completed.

    Raises:
        ValueError: If there is none.
    """
    found = {}
    for entry in os.listdir(folder) if os.path.isdir(folder) else []:
        match = re.fullmatch(r"checkpoint-(\d+)", entry)
        if match and os.path.isfile(os.path.join(folder, entry, TRAINER_STATE)):
            found[int(match[1])] = os.path.join(folder, entry)
    if not found:
        raise ValueError(
            f"resume_from_checkpoint=True finds no complete checkpoint: no folder "
            f"{folder}/checkpoint-<step> holds a {TRAINER_STATE}"
        )
    return found[max(found)]


def _save_checkpoint(
    trainer: Trainer, original: Callable[..., None], *args: Any, **kwargs: Any
) -> None:
    lion = find_optimizer(trainer.optimizer)
    if lion is None:
        original(*args, **kwargs)
        return
    _told[trainer], failure = False, None
    try:
        with lion.common_weights():
            original(*args, **kwargs)
        if trainer.args.enable_jit_checkpoint:
            # Every rank's just-in-time callback has made this file, and fails if another rank
            # removes it between its look and its own removal.
            step = f"checkpoint-{trainer.state.global_step}"
            mark = Path(trainer._get_output_dir(trial=None), step, "checkpoint-is-incomplete.txt")
            mark.unlink(missing_ok=True)
    except BaseException as error:
        if _told[trainer] or is_sharded(trainer.accelerator):
            raise
        failure = error
    finally:
        del _told[trainer]
    lion.meet(Kind.SAVE, failure)


def _save_model(
    trainer: Trainer,
    original: Callable[..., None],
    output_dir: str | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    lion, failure = find_optimizer(trainer.optimizer), None
    if lion is None:
        original(output_dir, *args, **kwargs)
        return
    if trainer not in _told or output_dir is None:
        with lion.common_weights():  # Meets nobody: a user may save on rank 0 alone.
            original(output_dir, *args, **kwargs)
        return
    try:
        # Trainer calls a checkpoint the best if its folder exists, which all ranks must find.
        os.makedirs(output_dir, exist_ok=True)
        if trainer.args.should_save:
            # That of an earlier save must not call a partial one complete.
            Path(output_dir, TRAINER_STATE).unlink(missing_ok=True)
        original(output_dir, *args, **kwargs)
    except BaseException as error:
        if is_sharded(trainer.accelerator):
            raise
        failure = error
    # Now, because Trainer may have a barrier next, where nobody would hear of a failure.
    _told[trainer] = True
    lion.meet(Kind.WEIGHTS, failure)
    _told[trainer] = False


def _save_rng_state(trainer: Trainer, original: Callable[[str], None], output_dir: str) -> None:
    lion, failure = find_optimizer(trainer.optimizer), None
    if lion is None:
        original(output_dir)
        return
    try:
        original(output_dir)
    except BaseException as error:
        failure = error
    scaler = _scaler(trainer)
    state = None if scaler is None else scaler.state_dict()
    if trainer in _told:
        _told[trainer] = True
    save_momentum(lion, output_dir, scaler=state, failure=failure)
    if trainer in _told:
        _told[trainer] = False


def _load_optimizer_and_scheduler(
    trainer: Trainer, original: Callable[[str | None], None], checkpoint: str | None
) -> None:
    lion = find_optimizer(trainer.optimizer)
    if lion is None and checkpoint is not None and _holds(checkpoint, NAME):
        raise CheckpointError(
            f"{checkpoint} was saved with DistributedLion, whose state "
            f"{type(trainer.optimizer).__name__} can't load: resume with optim={OPTIM_NAME!r}, or "
            f"load the model's weights from there and train without resume_from_checkpoint. If "
            f"another optimizer saved there later, delete its {NAME}_* files"
        )
    if lion is not None:
        prepare(lion, trainer)  # Loading meets, and with FSDP2 it takes a step.
    try:
        original(checkpoint)
    except BaseException as error:
        if lion is not None and not is_sharded(trainer.accelerator):
            lion.meet(Kind.LOAD, error)  # The other ranks are in `load_momentum`.
        raise


def _load_scaler(
    trainer: Trainer, original: Callable[[str | None], None], checkpoint: str | None
) -> None:
    lion, failure = find_optimizer(trainer.optimizer), None
    if lion is None or checkpoint is None:
        original(checkpoint)
        return
    try:
        original(checkpoint)
    except BaseException as error:
        failure = error
    if failure is None and not _holds(checkpoint, "optimizer") and not _holds(checkpoint, NAME):
        lion.meet(Kind.LOAD, None)  # Other ranks may find momenta.
        logger.warning_once(
            f"{checkpoint} holds weights only (save_only_model), so momenta aren't loaded"
        )
        return
    state, scaler = load_momentum(lion, checkpoint, failure=failure), _scaler(trainer)
    if state is not None and scaler is not None:
        scaler.load_state_dict(state)  # Trainer has given rank 0's to every rank.


def _load_best_model(trainer: Trainer, original: Callable[[], None]) -> None:
    if (lion := find_optimizer(trainer.optimizer)) is not None:
        exchange_rest(lion)  # The load may find no file, and then this model stays.
        lion.detach()  # Anchors that are kept would later replace what is loaded.
    original()


def _holds(folder: str, name: str) -> bool:
    return any(entry.startswith(name) for entry in os.listdir(folder))


def _scaler(trainer: Trainer) -> Any:
    return getattr(trainer.accelerator, "scaler", None)


_AROUND: dict[str, Callable[..., Any]] = {
    "train": _train,
    "create_optimizer": _create_optimizer,
    "_save_checkpoint": _save_checkpoint,
    "save_model": _save_model,
    "_save_rng_state": _save_rng_state,
    "_load_optimizer_and_scheduler": _load_optimizer_and_scheduler,
    "_load_scaler": _load_scaler,
    "_load_best_model": _load_best_model,
}
