"""`DistributedLion` in an Accelerate loop.

`accelerator.prepare(model, optimizer, ...)` is enough to train. Checkpoints need one more line, or
`save_state` keeps the momentum of rank 0 only:

    hf_dlion.accelerate.attach(accelerator)
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dlion.checkpoint import rank_files as checkpoint
from hf_dlion.checkpoint import whole as whole_checkpoint
from hf_dlion.checkpoint.agreed import agreed_checkpoint, names_on_ranks
from hf_dlion.checkpoint.momentum_file import MOMENTUM_NAME
from hf_dlion.checkpoint.save import Save
from hf_dlion.optimizer import DistributedLion

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
    loads them is in `hf_dlion.checkpoint.rank_files`. With `checkpoint="mean"` the ranks average
    their momenta before rank 0 saves, and no such files are written.

    What fails on one rank in `save_state` is raised on all of them, a state counts as complete
    only when all ranks have written it (`hf_dlion.saving`), and `total_limit` deletes older ones
    only then. `load_state()` takes the newest whole one, and refuses one that is not. With
    automatic names the first `save_state` after it takes the number after the highest on the disk
    (Accelerate alone would start at 0 again), unless `project_configuration.iteration` was set;
    and a state of that number that a killed job left unfinished is replaced.

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
        ours = Save(lions[0][1])
        saves[:] = [ours]
        try:
            with _as_one(accelerator, ours):
                with ours.part():
                    _make_room(accelerator)
                with ours.part():
                    saved = save_state(*args, **kwargs)
                with ours.part():
                    ours.sync(Path(saved))  # What all ranks have written.
            with ours.part():
                if accelerator.is_local_main_process:
                    whole_checkpoint.finish(Path(saved))
            with ours.part():
                _delete_superseded(accelerator, Path(saved))
        finally:
            saves.clear()
        return saved

    @functools.wraps(load_state)
    def load_all(input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        failure: Exception | None = None
        input_dir = _whole(accelerator, input_dir)
        try:
            load_state(input_dir, *args, **kwargs)
        except Exception as error:  # The others hear of it below, instead of waiting for this rank.
            failure = error
        _load(accelerator, folders.pop() if folders else "", failure)
        _go_on_counting(accelerator)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(remember)
    accelerator.save_state, accelerator.load_state = save_all, load_all
    setattr(accelerator, _ATTACHED, True)


@contextmanager
def _as_one(accelerator: Accelerator, save: Save) -> Iterator[None]:
    """Lets Accelerate save such that what fails on one rank leaves all of them alike."""
    project, wait = accelerator.project_configuration, accelerator.wait_for_everyone
    limit, iteration = project.total_limit, project.iteration

    def meet_and_wait() -> None:
        # Instead of coming to Accelerate's barrier, a rank that failed meets the others here.
        with save.part():
            pass
        wait()

    # Accelerate would delete older states before the new one is written.
    project.total_limit, accelerator.wait_for_everyone = None, meet_and_wait
    try:
        yield
    except BaseException:
        project.iteration = iteration  # Where Accelerate was done, it has counted this state.
        raise
    finally:
        project.total_limit, accelerator.wait_for_everyone = limit, wait


def _make_room(accelerator: Accelerator) -> None:
    """Removes an unfinished state of the next number, which Accelerate would not write over."""
    project = accelerator.project_configuration
    if project.automatic_checkpoint_naming and accelerator.is_local_main_process:
        place = _automatic_folder(accelerator) / f"checkpoint_{project.iteration}"
        with suppress(FileNotFoundError):  # Of two machines with one disk the other was faster.
            if place.is_dir() and whole_checkpoint.is_unfinished(place):
                _remove(place)


def _delete_superseded(accelerator: Accelerator, place: Path) -> None:
    """Deletes other states than `place` over `total_limit`: unfinished ones, then the oldest."""
    project = accelerator.project_configuration
    if not project.automatic_checkpoint_naming or not project.total_limit:
        return
    if accelerator.is_main_process:
        folder = _automatic_folder(accelerator)
        names = whole_checkpoint.checkpoint_names(folder)
        others = [folder / name for name in names if name != place.name]
        others.sort(key=whole_checkpoint.is_unfinished)
        for other in others[project.total_limit - 1 :]:
            _remove(other)


def _remove(state: Path) -> None:
    """Removes a state; a job that is killed meanwhile leaves nothing that is named like one."""
    # With a number, which Accelerate looks for in all names there when it is used without us.
    doomed = state.with_name(".deleted_0")
    shutil.rmtree(doomed, ignore_errors=True)
    state.rename(doomed)
    shutil.rmtree(doomed)


def _go_on_counting(accelerator: Accelerator) -> None:
    """Has the next automatic name follow those on the disk, unless the user chose a number.

    Every rank must call it. Accelerate counts from 0 in every process.
    """
    project, lions = accelerator.project_configuration, _lions(accelerator)
    if lions and project.automatic_checkpoint_naming:
        names = names_on_ranks(lions[0][1]._engine.gather_objects, _automatic_folder(accelerator))
        if names and project.iteration == 0:
            project.iteration = whole_checkpoint.number_of(names[0]) + 1


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
    return agreed_checkpoint(lion._engine.gather_objects, lion.rank, named, place)


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
