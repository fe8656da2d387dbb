"""`DistributedLion` in an Accelerate loop.

`accelerator.prepare(model, optimizer, ...)` is enough to train. Checkpoints need one more line, or
`save_state` keeps the momentum of rank 0 only:

    hf_dlion.accelerate.attach(accelerator)
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dlion import checkpoint, whole_checkpoint
from hf_dlion.agreed_checkpoint import agreed_checkpoint
from hf_dlion.momentum_file import MOMENTUM_NAME
from hf_dlion.optimizer import DistributedLion
from hf_dlion.saving import Save

if TYPE_CHECKING:
    from accelerate import Accelerator

# Values of accelerate.DistributedType under which a rank does not hold the whole model, or under
# which somebody else reduces the gradients.
_UNSUPPORTED = {
    "FSDP": "FSDP",
    "DEEPSPEED": "DeepSpeed",
    "MEGATRON_LM": "Megatron-LM",
    "XLA": "torch_xla",
}
_ATTACHED = "_hf_dlion_attached"


def attach(accelerator: Accelerator) -> None:
    """Makes `save_state` and `load_state` keep the momentum of every rank; once is enough.

    Call it on every rank, any time before the first `save_state` or `load_state`. Optimizers that
    are not a DistributedLion are left alone. What the files hold and how another number of ranks
    loads them is in `hf_dlion.checkpoint`. With `checkpoint="mean"` the ranks average their momenta
    before rank 0 saves, and no such files are written.

    What fails on one rank in `save_state` is raised on all of them, a state counts as complete
    only when all ranks have written it (`hf_dlion.saving`), and `total_limit` deletes older ones
    only then. `load_state()` takes the newest whole one, and refuses one that is not.

    Raises:
        NotImplementedError: If the accelerator shards the model (FSDP, DeepSpeed, tensor parallel).
    """
    refuse_sharded(accelerator)
    if getattr(accelerator, _ATTACHED, False):
        return
    folders: list[str] = []
    saves: list[Save] = []

    def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        # Every rank calls this hook, before rank 0 writes the optimizers' states.
        with saves[0].part() if saves else nullcontext():
            whole_checkpoint.begin(Path(output_dir))
        for suffix, lion in _lions(accelerator):
            name = MOMENTUM_NAME + suffix
            if lion.options.checkpoint == "mean":
                lion.synchronize_momentum()
                checkpoint.remove_momentum(output_dir, name=name)
            else:
                checkpoint.save_momentum(lion, output_dir, name=name, scaler=accelerator.scaler)

    def remember(models: list[Any], input_dir: str) -> None:
        # The folder that load_state chose; it is too early to load, since rank 0's state follows.
        folders[:] = [input_dir]

    save_state, load_state = accelerator.save_state, accelerator.load_state

    @functools.wraps(save_state)
    def save_all(*args: Any, **kwargs: Any) -> Any:
        lions = _lions(accelerator)
        if not lions:
            return save_state(*args, **kwargs)
        saves[:] = [Save(lions[0][1])]
        try:
            with saves[0].part():
                with _all_kept(accelerator):
                    place = save_state(*args, **kwargs)
                saves[0].sync(Path(place))
            with saves[0].part():
                whole_checkpoint.finish(Path(place))
                _delete_superseded(accelerator)
        finally:
            saves.clear()
        return place

    @functools.wraps(load_state)
    def load_all(input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        failure: Exception | None = None
        input_dir = _whole(accelerator, input_dir)
        try:
            load_state(input_dir, *args, **kwargs)
        except Exception as error:  # The others hear of it below, instead of waiting for this rank.
            failure = error
        _load(accelerator, folders.pop() if folders else "", failure)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(remember)
    accelerator.save_state, accelerator.load_state = save_all, load_all
    setattr(accelerator, _ATTACHED, True)


@contextmanager
def _all_kept(accelerator: Accelerator) -> Iterator[None]:
    """Keeps Accelerate from deleting older states before the new one is written."""
    project = accelerator.project_configuration
    limit, project.total_limit = project.total_limit, None
    try:
        yield
    finally:
        project.total_limit = limit


def _delete_superseded(accelerator: Accelerator) -> None:
    project = accelerator.project_configuration
    if not project.automatic_checkpoint_naming or not project.total_limit:
        return
    if accelerator.is_main_process:
        names = whole_checkpoint.checkpoint_names(_automatic_folder(accelerator))
        for name in names[project.total_limit :]:
            shutil.rmtree(_automatic_folder(accelerator) / name)


def _automatic_folder(accelerator: Accelerator) -> Path:
    return Path(accelerator.project_dir, "checkpoints")


def _whole(accelerator: Accelerator, input_dir: str | None) -> str | None:
    """Returns the folder to load, after all ranks agreed that it is whole."""
    lions = _lions(accelerator)
    automatic = accelerator.project_configuration.automatic_checkpoint_naming
    if not lions or (input_dir is None and not automatic):
        return input_dir
    lion = lions[0][1]
    named = None if input_dir is None else Path(input_dir).expanduser()
    place = _automatic_folder(accelerator) if automatic else "."
    return agreed_checkpoint(lion.gather_objects, lion.rank, named, place)


def refuse_sharded(accelerator: Accelerator) -> None:
    """Refuses an accelerator whose ranks do not hold the whole model each.

    Raises:
        NotImplementedError: Naming what it does, and what works instead.
    """
    kind = _UNSUPPORTED.get(getattr(accelerator.distributed_type, "value", ""), "")
    parallelism = getattr(accelerator, "parallelism_config", None)
    for size in ("tp_size", "cp_size", "sp_size", "dp_shard_size"):
        if (getattr(parallelism, size, None) or 1) > 1:
            kind = f"a ParallelismConfig with {size} > 1"
    if kind:
        raise unsupported(kind)


def unsupported(kind: str) -> NotImplementedError:
    """Returns the error for a way of training that does not work."""
    return NotImplementedError(
        f"DistributedLion does not work with {kind}: it needs the whole model and the local "
        "gradients on every rank. Use plain data parallelism (torchrun, or accelerate launch "
        "--multi_gpu, without FSDP, DeepSpeed and tensor parallelism); gradient checkpointing, "
        "PEFT and bf16 parameters make a model fit"
    )


def _lions(accelerator: Accelerator) -> list[tuple[str, DistributedLion]]:
    """Returns the accelerator's optimizers that are ours, with the suffixes of their files."""
    found = []
    for index, optimizer in enumerate(accelerator._optimizers):
        lion = checkpoint.unwrap(optimizer)
        if lion is not None:
            found.append((f"_{index}" if index else "", lion))
    return found


def _load(accelerator: Accelerator, folder: str, failure: Exception | None) -> None:
    states = []
    for suffix, lion in _lions(accelerator):
        state_file = Path(folder, f"optimizer{suffix}.bin")
        name = MOMENTUM_NAME + suffix
        states.append(checkpoint.resume_momentum(lion, state_file, name=name, failure=failure))
    if failure is not None:
        raise failure
    if states and states[0] is not None and accelerator.scaler is not None:
        # Accelerate has just given every rank the state that was written last.
        accelerator.scaler.load_state_dict(states[0])
