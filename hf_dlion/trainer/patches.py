"""Wrappers around methods of Trainer.

`train` is wrapped in the class. While a Trainer trains, other methods are wrapped in the object,
whether a subclass overrides them or not. The wrappers do nothing if the optimizer is not a
DistributedLion. Every rank enters these methods, so the ranks can meet in them. A save has these
meetings, in which a failure on one rank is raised on all:

    _save_checkpoint
      save_model                      rank 0 writes the weights                     meeting
      _save_optimizer_and_scheduler   rank 0 writes the common state, without momenta
      _save_rng_state                 every rank writes RNG state and momentum      3 meetings
      ...                             rank 0 writes trainer_state.json and
                                      deletes older checkpoints                     meeting

A load of `resume_from_checkpoint` has these, and momenta come last:

    _load_from_checkpoint             every rank reads the weights                meeting
    _load_optimizer_and_scheduler     every rank reads the common state           meeting
    _load_scaler                      every rank reads the scaler and its momentum  meetings

With FSDP2, ranks wait for one another's shards and can't meet, so only a failure to write momenta
is raised on all of them.

With local steps (`vote_every` above 1), evaluations, saves, and the end of training begin with an
exchange, before callbacks at the end of their step. Between two exchanges, callbacks in
`_CALLBACK_EVENTS` and a user's own `save_model`, `evaluate`, and `predict` see the weights of the
last exchange.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from transformers import DefaultFlowCallback, Trainer, TrainerCallback
from transformers.utils import logging

import hf_dlion.ddp as ddp
from hf_dlion.accelerate import replicas_of, shards_model
from hf_dlion.checkpoint import (
    NAME,
    CheckpointError,
    find_lion,
    load_for,
    momenta_apart,
    save_momentum,
)
from hf_dlion.optimizer import DistributedLion
from hf_dlion.ranks.header import Kind
from hf_dlion.trainer.arguments import check_optim_args, internal
from hf_dlion.trainer.attach import attach, refuse
from hf_dlion.trainer.callback import DistributedLionCallback
from hf_dlion.trainer.optim_args import OPTIM_NAME, only_ours

logger = logging.get_logger(__name__)

# The file that transformers writes last into a checkpoint.
TRAINER_STATE = "trainer_state.json"
# Callbacks that never look at weights between two exchanges.
_NEVER_LOOK = (
    *("transformers.", "hf_dlion.", "llamafactory.train.callbacks.", "swift.trainers.patcher."),
    *("swift.callbacks.perf_log.", "swift.callbacks.early_stop.", "axolotl.telemetry.callbacks."),
    *("axolotl.utils.callbacks.tokens_per_second.", "axolotl.utils.callbacks.profiler."),
    *("axolotl.utils.callbacks.GCCallback", "axolotl.utils.callbacks.LossWatchDogCallback"),
    "axolotl.utils.callbacks.SaveModelOnFirstStepCallback",
    "axolotl.utils.callbacks.SkipEvalOnResumeCallback",
)
_INSTALLED = "_hf_dlion_installed"


def install() -> None:
    """Wraps the classes' methods, once per process.

    Raises:
        RuntimeError: If this version of transformers lacks one of the methods that are wrapped now
            or later. No method is wrapped then.
    """
    if hasattr(Trainer, _INSTALLED):
        return
    for name in ("train", *_TRAINER_METHODS):
        internal(f"trainer:Trainer.{name}")
    for name in _CALLBACK_EVENTS:
        internal(f"trainer_callback:CallbackHandler.{name}")
    original = Trainer.train

    @functools.wraps(original)
    def train(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        return _train(self, functools.partial(original, self), *args, **kwargs)

    Trainer.train = train  # type: ignore[method-assign]
    setattr(Trainer, _INSTALLED, True)


def _train(
    trainer: Trainer,
    original: Callable[..., Any],
    resume_from_checkpoint: str | bool | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    check_optim_args(trainer.args)  # They may have changed since they were made.
    if _uses_lion(trainer):
        refuse(trainer)
        searches = bool(trainer.hp_search_backend)
        if searches and trainer.optimizer_cls_and_kwargs is not None:
            raise ValueError(
                "hyperparameter_search changes TrainingArguments, which optimizer_cls_and_kwargs "
                "has already read: call hf_dlion.register() and set optim='dlion' instead"
            )
        model: Any = trainer.model  # None after a trial of a hyperparameter search.
        is_bare = model is not None and ddp.wrapper_in(trainer.model_wrapped) is None
        if is_bare and trainer.args.world_size > 1 and not shards_model(trainer.accelerator):
            # Otherwise, Trainer wouldn't wrap a model in DDP that it has evaluated or compiled.
            trainer.model_wrapped, model._is_accelerate_prepared = model, False
        resume_from_checkpoint = _agreed_checkpoint(trainer, resume_from_checkpoint)
    elif idle := only_ours(trainer.args.optim_args):
        optim = getattr(trainer.args.optim, "value", trainer.args.optim)
        logger.warning_once(
            f"optim={optim!r} ignores {', '.join(idle)} in "
            f"optim_args={trainer.args.optim_args!r}. To use DistributedLion, set "
            f"optim={OPTIM_NAME!r}"
        )
    # For every Trainer, because a subclass may make its optimizer only later.
    handler, callback = trainer.callback_handler, DistributedLionCallback(trainer)
    handler.callbacks.insert(0, callback)  # Before those that report its entries.
    with _wrapped(trainer):
        try:
            return original(resume_from_checkpoint, *args, **kwargs)
        finally:
            # A cycle with the Trainer would keep the model until Python collects garbage.
            if callback in handler.callbacks:
                handler.callbacks.remove(callback)
            # on_train_end isn't reached after an exception, and another Trainer may use the model.
            if (lion := find_lion(trainer.optimizer)) is not None:
                lion.detach()


@contextlib.contextmanager
def _wrapped(trainer: Trainer) -> Iterator[None]:
    """Wraps methods of one object, also those that a subclass overrides without `super()`."""
    owners: Any = (trainer, _TRAINER_METHODS), (trainer.callback_handler, _CALLBACK_EVENTS)
    with contextlib.ExitStack() as unwrap:
        for owner, arounds in owners:
            for name, around in arounds.items():
                wrapper = functools.partial(around, trainer, getattr(owner, name))
                unwrap.callback(_unwrap, owner, name, wrapper, vars(owner).get(name))
                setattr(owner, name, wrapper)
        yield


def _unwrap(owner: Any, name: str, wrapper: Any, own: Any) -> None:
    """Takes a wrapper off an object; `own` is a method that a user had set in the object."""
    if vars(owner).get(name) is not wrapper:  # A user has set another one meanwhile.
        return
    if own is None:
        delattr(owner, name)
    else:
        setattr(owner, name, own)


def _uses_lion(trainer: Trainer) -> bool:
    if trainer.optimizer is not None:
        return find_lion(trainer.optimizer) is not None
    if trainer.optimizer_cls_and_kwargs is not None:
        cls = trainer.optimizer_cls_and_kwargs[0]
        return isinstance(cls, type) and issubclass(cls, DistributedLion)
    return bool(trainer.args.optim == OPTIM_NAME)


def _create_optimizer(
    trainer: Trainer, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Makes the optimizer vote between FSDP2's replicas, whose mesh isn't in the arguments.

    Trainer calls this before it wraps the model, even if there is an optimizer.
    """
    check_optim_args(trainer.args)  # A trial of a hyperparameter search may have set them.
    if (lion := find_lion(trainer.optimizer)) is not None:
        # After "out of memory" Trainer makes a new DDP wrapper, which copies rank 0's weights.
        lion.detach()
    replicas = replicas_of(trainer.accelerator)
    if replicas is None or trainer.optimizer is not None or not _uses_lion(trainer):
        return original(*args, **kwargs)
    chosen = trainer.optimizer_cls_and_kwargs
    cls, options = chosen or trainer.get_optimizer_cls_and_kwargs(trainer.args)
    trainer.optimizer_cls_and_kwargs = cls, {**options, "replicate": replicas}
    try:
        return original(*args, **kwargs)
    finally:  # The next training may have other arguments.
        trainer.optimizer_cls_and_kwargs = chosen


def _agreed_checkpoint(trainer: Trainer, resume: str | bool | None) -> str | None:
    """Returns the folder to resume from; every rank must call this.

    Raises:
        CheckpointError: If the ranks have different folders to resume from, with which they would
            mix up the collectives that follow, or to save to.
        ValueError: If `resume` is True, and no checkpoint is complete.
    """
    folder = str(resume) if resume else None
    failure: Exception | None = None
    if resume is True:
        try:
            folder = _newest_complete(str(trainer.args.output_dir))
        except (OSError, ValueError) as error:
            failure = error
    # Checked now, because the first save may be hours away.
    output_dir = trainer.args.output_dir if trainer.args.save_strategy != "no" else ""
    _check_equal("output_dir", str(output_dir), "pass the same path on every rank")
    _check_equal(
        "the checkpoint to resume from",
        str(failure or folder),
        "pass the same resume_from_checkpoint on every rank, and use an output_dir that all nodes "
        "share",
    )
    if failure is not None:
        raise failure
    return folder


def _check_equal(name: str, value: str, remedy: str) -> None:
    values = gather_object([value])
    if len(set(values)) > 1:
        by_rank = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
        raise CheckpointError(f"{name} differs between ranks ({by_rank}): {remedy}")


def _newest_complete(folder: str) -> str:
    """Returns the checkpoint of the highest step that a save completed, or raises ValueError."""
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
    lion = find_lion(trainer.optimizer)
    if lion is None:
        original(*args, **kwargs)
        return
    lion.exchange_now()
    with lion.peers.together(Kind.SAVE, can_meet=not shards_model(trainer.accelerator)):
        original(*args, **kwargs)
        if trainer.args.enable_jit_checkpoint:
            # Every rank's just-in-time callback makes this file and later removes it, which can
            # fail if two ranks remove it at the same time. So each rank removes it before.
            step = f"checkpoint-{trainer.state.global_step}"
            mark = Path(trainer._get_output_dir(trial=None), step, "checkpoint-is-incomplete.txt")
            mark.unlink(missing_ok=True)


def _save_model(
    trainer: Trainer,
    original: Callable[..., None],
    output_dir: str | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    lion = find_lion(trainer.optimizer)
    if lion is None:
        original(output_dir, *args, **kwargs)
        return
    # Trainer's own save passes `_internal_call=True`, by name or by position.
    if output_dir is None or not kwargs.get("_internal_call", any(args)):
        with lion.common_weights():  # No meeting, because a user may save on rank 0 alone.
            original(output_dir, *args, **kwargs)
        return
    # It ends here, because the other ranks may next wait at a barrier of Trainer, where they can't
    # meet this one.
    with lion.peers.together(Kind.WEIGHTS, can_meet=not shards_model(trainer.accelerator)):
        # Trainer calls a checkpoint the best if its folder exists, so all ranks must find it.
        os.makedirs(output_dir, exist_ok=True)
        if trainer.args.should_save:
            # The file of an earlier save would make a partial checkpoint look complete.
            Path(output_dir, TRAINER_STATE).unlink(missing_ok=True)
        with _on_each_node(trainer):
            original(output_dir, *args, **kwargs)
    # Shards of FSDP2 are written later.
    written = os.listdir(output_dir) or shards_model(trainer.accelerator)
    if not trainer.args.should_save and not written:
        logger.warning_once(
            f"{trainer.args.output_dir} doesn't hold the model that rank 0 saved, so this node has "
            f"a disk of its own, on which Trainer deletes no older checkpoints and can't resume. "
            f"Set save_on_each_node=True"
        )


@contextlib.contextmanager
def _on_each_node(trainer: Trainer) -> Iterator[None]:
    """Lets the first rank of each node save the model, as `save_on_each_node` says.

    From transformers 5.16 on, `save_pretrained` writes on rank 0 alone.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    asks = trainer.args.save_on_each_node and hasattr(model, "should_save_on_this_rank")
    if not asks or shards_model(trainer.accelerator):
        yield
        return
    model.should_save_on_this_rank = lambda is_main_process: is_main_process
    try:
        yield
    finally:
        del model.should_save_on_this_rank


def _save_optimizer_and_scheduler(
    trainer: Trainer, original: Callable[..., None], *args: Any, **kwargs: Any
) -> None:
    lion = find_lion(trainer.optimizer)
    if lion is None or shards_model(trainer.accelerator):  # torch saves all shards of momenta.
        original(*args, **kwargs)
        return
    with momenta_apart(lion):
        original(*args, **kwargs)


def _save_rng_state(trainer: Trainer, original: Callable[[str], None], output_dir: str) -> None:
    lion = find_lion(trainer.optimizer)
    if lion is None:
        original(output_dir)
        return
    with lion.peers.together(Kind.SAVE):
        original(output_dir)
    scaler = _scaler(trainer)
    save_momentum(lion, output_dir, scaler=None if scaler is None else scaler.state_dict())


def _load_from_checkpoint(
    trainer: Trainer, original: Callable[..., None], *args: Any, **kwargs: Any
) -> None:
    if not _uses_lion(trainer):
        original(*args, **kwargs)
        return
    model: Any = args[1] if len(args) > 1 else kwargs.get("model")
    failure: Exception | None = None
    with _same_parameters(trainer.model if model is None else model):
        if shards_model(trainer.accelerator):  # Ranks wait for one another's shards.
            original(*args, **kwargs)
            return
        try:
            original(*args, **kwargs)
        except Exception as error:
            failure = error
    # Otherwise, the other ranks would wait for this one where DDP wraps the model.
    failures = gather_object([failure and f"{type(failure).__name__}: {failure}"])
    if failure is not None:
        raise failure
    if any(failures):
        by_rank = "; ".join(f"rank {k}: {text}" for k, text in enumerate(failures) if text)
        raise CheckpointError(
            f"other ranks can't load the model's weights ({by_rank}): copy all files of the "
            f"checkpoint to every node"
        )


@contextlib.contextmanager
def _same_parameters(model: Any) -> Iterator[None]:
    """Keeps the parameters that train, and their dtypes, in a load of weights.

    PEFT turns adapters of 16 bits into float32, since 0.21 in new parameters.
    """
    trained = {name: (p, p.dtype) for name, p in model.named_parameters() if p.requires_grad}
    yield
    for name, param in [*model.named_parameters()]:
        own, dtype = trained.get(name, (param, param.dtype))
        if own is not param or dtype != param.dtype:
            own.data = param.data.to(dtype)
            own.requires_grad_(param.requires_grad)
            module, _, key = name.rpartition(".")
            model.get_submodule(module)._parameters[key] = own


def _load_optimizer_and_scheduler(
    trainer: Trainer, original: Callable[[str | None], None], checkpoint: str | None
) -> None:
    lion = find_lion(trainer.optimizer)
    if lion is None and checkpoint is not None and _holds(checkpoint, NAME):
        raise CheckpointError(
            f"{checkpoint} was saved with DistributedLion, whose state "
            f"{type(trainer.optimizer).__name__} can't load. Resume with optim={OPTIM_NAME!r}, or "
            f"load the model's weights from there and train without resume_from_checkpoint. If "
            f"another optimizer saved there later, delete its {NAME}_* files"
        )
    if lion is None:
        original(checkpoint)
        return
    attach(lion, trainer)  # Ranks meet in loading, and with FSDP2 loading takes a step.
    if checkpoint is None:
        original(checkpoint)
        return
    with lion.peers.together(Kind.LOAD, can_meet=not shards_model(trainer.accelerator)):
        original(checkpoint)


def _load_scaler(
    trainer: Trainer, original: Callable[[str | None], None], checkpoint: str | None
) -> None:
    lion = find_lion(trainer.optimizer)
    if lion is None or checkpoint is None:
        original(checkpoint)
        return
    # Ray Tune's checkpoints have no momentum files, and one process finds momenta in the state.
    has_state = lion.state and not lion.guards.lacks_momenta
    if has_state and trainer.args.world_size == 1 and not _holds(checkpoint, NAME):
        original(checkpoint)
        return
    with lion.peers.together(Kind.LOAD):
        original(checkpoint)
        has_momenta = _holds(checkpoint, "optimizer") or _holds(checkpoint, NAME)
    _check_equal(
        f"whether {checkpoint} has momenta",
        str(has_momenta),
        "copy all files of the checkpoint to every node, or delete those of another run",
    )
    if not has_momenta:
        logger.warning_once(
            f"{checkpoint} holds weights only (save_only_model), so momenta aren't loaded"
        )
        return
    state, scaler = load_for("Trainer", lion, checkpoint), _scaler(trainer)
    if state is not None and scaler is not None:
        scaler.load_state_dict(state)  # Replaces rank 0's, which Trainer gave to every rank.


def _after_exchange(
    trainer: Trainer, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if (lion := find_lion(trainer.optimizer)) is None:
        return original(*args, **kwargs)
    lion.exchange_now()
    return original(*args, **kwargs)


def _with_common_weights(
    trainer: Trainer, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    lion = find_lion(trainer.optimizer)
    with contextlib.nullcontext() if lion is None else lion.common_weights():
        return original(*args, **kwargs)


def _load_best_model(trainer: Trainer, original: Callable[[], None]) -> None:
    if (lion := find_lion(trainer.optimizer)) is None:
        original()
        return
    # If there is no file to load, ranks would keep different weights; if there is one, the rest of
    # the period would later replace what was loaded.
    lion.exchange_now()
    with _same_parameters(trainer.model):
        original()


def _end_of_step(event: str, trainer: Trainer, original: Callable[..., Any], *given: Any) -> Any:
    """Exchanges at the end of a step or epoch after which Trainer evaluates, saves, or stops.

    Before callbacks, so what they write into the weights holds in what is evaluated and saved.
    """
    lion = find_lion(trainer.optimizer)
    if lion is not None and lion.options.vote_every > 1:
        args, state, control = given
        planned, flow = copy.copy(control), DefaultFlowCallback()
        getattr(flow, event)(args, state, planned)
        if state.epoch and float(state.epoch).is_integer():  # The last step of an epoch.
            flow.on_epoch_end(args, state, planned)
        if planned.should_evaluate or planned.should_save or planned.should_training_stop:
            lion.exchange_now()
    return _event(event, trainer, original, *given)


def _event(
    event: str, trainer: Trainer, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Shows the weights of the last exchange to callbacks that may look at weights."""
    lion, callbacks = find_lion(trainer.optimizer), trainer.callback_handler.callbacks
    in_period = lion is not None and lion.local.period.steps
    looks = in_period and any([_may_look(callback, event) for callback in callbacks])
    with lion.common_weights() if lion is not None and looks else contextlib.nullcontext():
        return original(*args, **kwargs)


def _may_look(callback: TrainerCallback, event: str) -> bool:
    """Returns whether a callback may look at weights at an event, as TRL's, which copy them."""
    kind = type(callback)
    if getattr(getattr(callback, event), "__func__", None) is getattr(TrainerCallback, event):
        return False  # It does nothing.
    return not f"{kind.__module__}.{kind.__qualname__}".startswith(_NEVER_LOOK)


def _holds(folder: str, name: str) -> bool:
    return any(entry.startswith(name) for entry in os.listdir(folder))


def _scaler(trainer: Trainer) -> Any:
    return getattr(trainer.accelerator, "scaler", None)


_TRAINER_METHODS: dict[str, Callable[..., Any]] = {
    "create_optimizer": _create_optimizer,
    "_evaluate": _after_exchange,  # Also calls a subclass's own `evaluate`.
    "evaluate": _with_common_weights,  # The user's own calls.
    "predict": _with_common_weights,
    "_save_checkpoint": _save_checkpoint,
    "save_model": _save_model,
    "_save_optimizer_and_scheduler": _save_optimizer_and_scheduler,
    "_save_rng_state": _save_rng_state,
    "_load_from_checkpoint": _load_from_checkpoint,
    "_load_optimizer_and_scheduler": _load_optimizer_and_scheduler,
    "_load_scaler": _load_scaler,
    "_load_best_model": _load_best_model,
}
# Events of the Trainer's `callback_handler`.
_CALLBACK_EVENTS: dict[str, Callable[..., Any]] = {
    "on_step_end": functools.partial(_end_of_step, "on_step_end"),
    "on_epoch_end": functools.partial(_end_of_step, "on_epoch_end"),
    "on_epoch_begin": functools.partial(_event, "on_epoch_begin"),
    "on_log": functools.partial(_event, "on_log"),
}
