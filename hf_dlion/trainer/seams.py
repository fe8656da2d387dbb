"""Where Trainer lets a momentum per rank, parameter names and log entries in.

Each method below is one that every rank enters, whatever asked for it. In particular a momentum is
saved where Trainer saves the random state of every rank: `save_strategy` steps, epoch and best, a
callback that sets `should_save` and a just-in-time checkpoint all come through there, and
`save_only_model` does not. The wrappers act only where the optimizer is a DistributedLion.

Every rank must enter a save: the ranks meet in it four times, in one header each, so that a
checkpoint is finished, and older ones are deleted, only when the files of all ranks are there and
on the disk, and so that what fails on one rank is raised on all of them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import transformers
from torch import Tensor
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

import hf_dlion.checkpoint.rank_files as momenta
from hf_dlion.checkpoint.rank_files import unwrap
from hf_dlion.checkpoint.save import Save
from hf_dlion.checkpoint.whole import INCOMPLETE, TRAINER_STATE
from hf_dlion.optimizer import DistributedLion
from hf_dlion.options.naming import named_by
from hf_dlion.trainer.callback import DistributedLionCallback
from hf_dlion.trainer.resume import whole_checkpoint_for
from hf_dlion.trainer.rotation import rotation_after, wrap_rotation
from hf_dlion.trainer.unsupported import refuse_unsupported

OPTIMIZER_FILE = "optimizer.pt"

_INSTALLED = "_hf_dlion_seams"

# This rank's GradScaler state, between the two methods that load the optimizer and the scaler.
_scaler_states: WeakKeyDictionary[Trainer, dict[str, Any]] = WeakKeyDictionary()

# The save that a Trainer is in the middle of.
_saves: WeakKeyDictionary[Trainer, Save] = WeakKeyDictionary()


def missing_seam(what: str) -> RuntimeError:
    """Returns the error for a transformers that lacks `what`."""
    return RuntimeError(
        f"hf_dlion needs {what}, which transformers {transformers.__version__} does not have; "
        "it works with transformers 5.2 to 5.23. Without Trainer, use DistributedLion in a loop of "
        "your own or with Accelerate"
    )


def install_seams() -> None:
    """Wraps Trainer's methods, once per process.

    Raises:
        RuntimeError: If Trainer lacks one of them; nothing is wrapped then.
    """
    if _INSTALLED in vars(Trainer):
        return
    for name, (_, parameters) in _SEAMS.items():
        method = vars(Trainer).get(name)
        if not inspect.isfunction(method):
            raise missing_seam(f"Trainer.{name}")
        if tuple(inspect.signature(method).parameters)[1 : 1 + len(parameters)] != parameters:
            raise missing_seam(f"Trainer.{name}({', '.join(parameters)})")
    if not wrap_rotation():
        raise missing_seam("transformers.trainer.rotate_checkpoints")
    for name, (around, _) in _SEAMS.items():
        _wrap(name, around)
    setattr(Trainer, _INSTALLED, True)


def _wrap(name: str, around: Callable[..., Any]) -> None:
    original = vars(Trainer)[name]

    @functools.wraps(original)
    def wrapper(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        return around(self, functools.partial(original, self), *args, **kwargs)

    setattr(Trainer, name, wrapper)


def _around_train(
    trainer: Trainer,
    original: Callable[..., Any],
    resume_from_checkpoint: str | bool | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if _trains_with_lion(trainer):
        refuse_unsupported(trainer)
        # Here too, for a subclass that creates the optimizer all by itself.
        _put_callback_first(trainer.callback_handler)
        resume_from_checkpoint = whole_checkpoint_for(trainer, resume_from_checkpoint)
    return original(resume_from_checkpoint, *args, **kwargs)


def _trains_with_lion(trainer: Trainer) -> bool:
    if trainer.optimizer is not None:
        return unwrap(trainer.optimizer) is not None
    if trainer.optimizer_cls_and_kwargs is not None:
        cls = trainer.optimizer_cls_and_kwargs[0]
        return isinstance(cls, type) and issubclass(cls, DistributedLion)
    return bool(trainer.args.optim == "dlion")


def _around_create_optimizer(
    trainer: Trainer, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    named = [] if trainer.model is None else list(trainer.model.named_parameters())
    # Trainer makes groups without names, and options may select by name.
    with named_by(named):
        optimizer = original(*args, **kwargs)
    lion = unwrap(optimizer)
    if lion is not None:
        _name_parameters(lion, named)
        _put_callback_first(trainer.callback_handler)
        if trainer.model_wrapped is trainer.model:
            # Trainer goes on to make a DDP wrapper, while an old one of another batch size or of an
            # earlier training may still be alive.
            lion._engine.hooks.search()
    return optimizer


def _name_parameters(lion: DistributedLion, named: Sequence[tuple[str, Tensor]]) -> None:
    """Adds the names to an optimizer that was made before."""
    if any("param_names" in group for group in lion.param_groups):
        return
    names = {parameter: name for name, parameter in named}
    if all(p in names for group in lion.param_groups for p in group["params"]):
        for group in lion.param_groups:
            group["param_names"] = [names[p] for p in group["params"]]


def _put_callback_first(handler: Any) -> None:
    present = [cb for cb in handler.callbacks if isinstance(cb, DistributedLionCallback)]
    for callback in present:
        handler.callbacks.remove(callback)
    handler.callbacks.insert(0, present[0] if present else DistributedLionCallback())


def _around_save_checkpoint(
    trainer: Trainer, original: Callable[..., Any], model: Any, trial: Any
) -> None:
    lion = unwrap(trainer.optimizer)
    if lion is None:
        original(model, trial)
        return
    name = f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
    folder = Path(trainer._get_output_dir(trial=trial), name)
    _saves[trainer] = save = Save(lion)
    try:
        with save.part(), rotation_after(folder):
            # Rank 0 writes it last: without it no older state is taken for what is being written.
            (folder / TRAINER_STATE).unlink(missing_ok=True)
            original(model, trial)
            # Trainer's just-in-time checkpoint puts it there and takes it away, on every rank: one
            # that looks and another that removes it meanwhile would end the job.
            (folder / INCOMPLETE).unlink(missing_ok=True)
    finally:
        del _saves[trainer]


def _part_of_save(trainer: Trainer) -> AbstractContextManager[None]:
    return _saves[trainer].part() if trainer in _saves else nullcontext()


def _sync(trainer: Trainer, output_dir: str) -> None:
    """Waits for the disk when all ranks have written, before the mark that they have."""
    if trainer in _saves:
        with _saves[trainer].part():
            _saves[trainer].sync(Path(output_dir))


def _around_save_model(
    trainer: Trainer,
    original: Callable[..., Any],
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
        # Nothing follows that all ranks enter.
        _sync(trainer, output_dir)


def _around_save_optimizer_and_scheduler(
    trainer: Trainer, original: Callable[..., Any], output_dir: str
) -> None:
    lion = unwrap(trainer.optimizer)
    if lion is not None and lion.options.checkpoint == "mean":
        # Before rank 0 writes its state, which is then every rank's.
        lion.synchronize_momentum()
        momenta.remove_momentum(output_dir)
    original(output_dir)


def _around_save_rng_state(trainer: Trainer, original: Callable[..., Any], output_dir: str) -> None:
    lion = unwrap(trainer.optimizer)
    # Rank 0 goes on to write trainer_state.json, and to delete older checkpoints.
    with _part_of_save(trainer):
        original(output_dir)
        if lion is not None and lion.options.checkpoint != "mean":
            momenta.save_momentum(lion, output_dir, scaler=_scaler(trainer))
    _sync(trainer, output_dir)


def _around_load_optimizer_and_scheduler(
    trainer: Trainer, original: Callable[..., Any], checkpoint: str | None
) -> None:
    lion = unwrap(trainer.optimizer)
    if lion is None or checkpoint is None:
        original(checkpoint)
        return
    failure: Exception | None = None
    try:
        original(checkpoint)
    except Exception as error:
        # The others must hear of it before this rank leaves, or they wait for it.
        failure = error
    state = momenta.resume_momentum(lion, Path(checkpoint, OPTIMIZER_FILE), failure=failure)
    if state is not None:
        _scaler_states[trainer] = state


def _around_load_scaler(
    trainer: Trainer, original: Callable[..., Any], checkpoint: str | None
) -> None:
    original(checkpoint)
    state = _scaler_states.pop(trainer, None)
    if state is not None and _scaler(trainer) is not None:
        # Trainer has just given every rank the state of rank 0.
        _scaler(trainer).load_state_dict(state)


def _scaler(trainer: Trainer) -> Any:
    return getattr(trainer.accelerator, "scaler", None)


# The methods that are wrapped, by what, and the parameters that the wrappers rely on.
_SEAMS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "train": (_around_train, ("resume_from_checkpoint",)),
    "create_optimizer": (_around_create_optimizer, ()),
    "_save_checkpoint": (_around_save_checkpoint, ("model", "trial")),
    "save_model": (_around_save_model, ("output_dir", "_internal_call")),
    "_save_optimizer_and_scheduler": (_around_save_optimizer_and_scheduler, ("output_dir",)),
    "_save_rng_state": (_around_save_rng_state, ("output_dir",)),
    "_load_optimizer_and_scheduler": (_around_load_optimizer_and_scheduler, ("checkpoint",)),
    "_load_scaler": (_around_load_scaler, ("checkpoint",)),
}
