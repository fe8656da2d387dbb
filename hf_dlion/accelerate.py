"""`DistributedLion` in an Accelerate loop.

`accelerator.prepare(model, optimizer, ...)` is enough to train. Checkpoints need one more line, or
`save_state` keeps the momentum of rank 0 only:

    hf_dlion.accelerate.attach(accelerator)
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dlion.checkpoint import rank_files, rotation, whole
from hf_dlion.checkpoint.agreed import agreed_checkpoint, names_on_ranks
from hf_dlion.checkpoint.lion import gather_objects, unwrap
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
    saves: list[Save] = []  # The one that is going on.
    folders: list[Path] = []  # The one that is being loaded.

    def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        # Every rank calls this hook, before rank 0 writes the optimizers' states.
        for going_on in saves:
            going_on.folder = Path(output_dir)  # As Accelerate understood it.
            going_on.begin()
        for suffix, lion in _lions(accelerator):
            name = MOMENTUM_NAME + suffix
            if lion.options.checkpoint == "mean":
                lion.synchronize_momentum()
                rank_files.remove_momentum(output_dir, name=name)
            else:
                rank_files.save_momentum(lion, output_dir, name=name, scaler=accelerator.scaler)

    def remember(models: list[Any], input_dir: str) -> None:
        # The folder that load_state chose; it is too early to load, since rank 0's state follows.
        folders[:] = [Path(input_dir)]

    save_state, load_state = accelerator.save_state, accelerator.load_state

    @functools.wraps(save_state)
    def save_all(output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        lions = _lions(accelerator)
        if not lions:
            return save_state(output_dir, *args, **kwargs)
        ours = Save(lions[0][1], _next_folder(accelerator, output_dir))
        saves[:] = [ours]
        try:
            with _as_one(accelerator, ours):
                with ours.part():
                    _make_room(accelerator, ours.folder)
                with ours.part():
                    saved = save_state(output_dir, *args, **kwargs)
                ours.sync()
            ours.finish()
            with ours.part():
                _rotate(accelerator, ours.folder)
        finally:
            saves.clear()
        return saved

    @functools.wraps(load_state)
    def load_all(input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        input_dir = _agreed_folder(accelerator, input_dir)
        failure = rank_files.failure_of(lambda: load_state(input_dir, *args, **kwargs))
        _load_momenta(accelerator, folders.pop() if folders else Path(), failure)
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


def _automatic_folder(accelerator: Accelerator) -> Path:
    """Returns where Accelerate puts the states that it names itself."""
    return Path(accelerator.project_dir, "checkpoints")


def _next_folder(accelerator: Accelerator, output_dir: str | None) -> Path:
    """Returns where Accelerate is about to save; told nothing at all, it will raise."""
    project = accelerator.project_configuration
    if project.automatic_checkpoint_naming:
        return _automatic_folder(accelerator) / f"checkpoint_{project.iteration}"
    return Path(output_dir or ".")


def _make_room(accelerator: Accelerator, place: Path) -> None:
    """Removes an unfinished state of the next number, which Accelerate would not write over."""
    automatic = accelerator.project_configuration.automatic_checkpoint_naming
    if automatic and accelerator.is_local_main_process:
        with suppress(FileNotFoundError):  # Of two machines with one disk the other was faster.
            if place.is_dir() and whole.is_unfinished(place):
                rotation.remove(place)


def _rotate(accelerator: Accelerator, written: Path) -> None:
    """Deletes older states over `total_limit`, which Accelerate counts by their numbers."""
    project = accelerator.project_configuration
    if project.automatic_checkpoint_naming and accelerator.is_main_process:
        names = reversed(whole.checkpoint_names(written.parent))
        found = [written.with_name(name) for name in names]
        rotation.delete_superseded(written, found, project.total_limit)


def _agreed_folder(accelerator: Accelerator, input_dir: str | None) -> str | None:
    """Returns the folder to load, after all ranks agreed that it is whole."""
    lions = _lions(accelerator)
    automatic = accelerator.project_configuration.automatic_checkpoint_naming
    if not lions or (input_dir is None and not automatic):
        return input_dir
    lion = lions[0][1]
    named = None if input_dir is None else Path(input_dir).expanduser()
    place = _automatic_folder(accelerator) if automatic else "."
    return agreed_checkpoint(functools.partial(gather_objects, lion), lion.rank, named, place)


def _load_momenta(accelerator: Accelerator, folder: Path, failure: Exception | None) -> None:
    """Loads the momenta of all ranks once Accelerate has loaded rank 0's states, or has failed."""
    states = []
    for suffix, lion in _lions(accelerator):
        state_file = folder / f"optimizer{suffix}.bin"
        name = MOMENTUM_NAME + suffix
        states.append(rank_files.resume_momentum(lion, state_file, name=name, failure=failure))
    if failure is not None:
        raise failure
    if states and states[0] is not None and accelerator.scaler is not None:
        # Accelerate has just given every rank the state that was written last.
        accelerator.scaler.load_state_dict(states[0])


def _go_on_counting(accelerator: Accelerator) -> None:
    """Has the next automatic name follow those on the disk, unless the user chose a number.

    Every rank must call it. Accelerate counts from 0 in every process.
    """
    project, lions = accelerator.project_configuration, _lions(accelerator)
    if lions and project.automatic_checkpoint_naming:
        gather = functools.partial(gather_objects, lions[0][1])
        names = names_on_ranks(gather, _automatic_folder(accelerator))
        if names and project.iteration == 0:
            project.iteration = whole.number_of(names[0]) + 1


def _lions(accelerator: Accelerator) -> list[tuple[str, DistributedLion]]:
    """Returns the accelerator's optimizers that are ours, with the suffixes of their files."""
    found = []
    for index, optimizer in enumerate(accelerator._optimizers):
        lion = unwrap(optimizer)
        if lion is not None:
            found.append((f"_{index}" if index else "", lion))
    return found


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
