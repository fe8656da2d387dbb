"""`DistributedLion` in an Accelerate loop.

`accelerator.prepare(model, optimizer, ...)` is enough to train. Checkpoints need one more line, or
`save_state` keeps the momentum of rank 0 only:

    hf_dlion.accelerate.attach(accelerator)
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from hf_dlion.checkpoint import rank_files, rotation, whole
from hf_dlion.checkpoint.access import gather_objects, lion_in
from hf_dlion.checkpoint.agreed import agreed_checkpoint, names_on_ranks
from hf_dlion.checkpoint.momentum_file import MOMENTUM_NAME
from hf_dlion.checkpoint.save import Save
from hf_dlion.optimizer import DistributedLion
from hf_dlion.options.parallelism import refuse_sharded, replicas_of, unsupported
from hf_dlion.ranks.launched import ACCELERATE_ON_CPUS, refuse_strangers

if TYPE_CHECKING:
    from accelerate.parallelism_config import ParallelismConfig

    from accelerate import Accelerator

_ATTACHED = "_hf_dlion_attached"
# What is used of an Accelerator that Accelerate does not document.
_INTERNALS = ("_optimizers", "project_configuration", "save_iteration", "scaler")

# The save that an accelerator is in the middle of, and the folder from which it has just loaded.
_saves: WeakKeyDictionary[Accelerator, Save] = WeakKeyDictionary()
_folders: WeakKeyDictionary[Accelerator, Path] = WeakKeyDictionary()


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
        NotImplementedError: If the accelerator shards the model otherwise than by FSDP2 with
            `parallelism_config` (FSDP1, HSDP, DeepSpeed, tensor parallel).
        RuntimeError: If there are more ranks than the accelerator knows of, or this Accelerate
            lacks what the wrappers use of it.
    """
    refuse_sharded(accelerator)
    refuse_strangers(accelerator.num_processes, "the Accelerator", ACCELERATE_ON_CPUS)
    for name in _INTERNALS:
        if not hasattr(accelerator, name):
            raise RuntimeError(
                f"hf_dlion needs Accelerator().{name}, which accelerate {version('accelerate')} "
                f"does not have; it works with accelerate 1.3 to 1.15. Without Accelerate, use "
                f"DistributedLion in a loop of your own, with hf_dlion.saving"
            )
    if getattr(accelerator, _ATTACHED, False):
        return
    accelerator.register_save_state_pre_hook(functools.partial(_write_momenta, accelerator))
    accelerator.register_load_state_pre_hook(functools.partial(_note_folder, accelerator))
    for name, around in (("save_state", _around_save_state), ("load_state", _around_load_state)):
        original = getattr(accelerator, name)
        wrapper = functools.partial(around, accelerator, original)
        setattr(accelerator, name, functools.update_wrapper(wrapper, original))
    setattr(accelerator, _ATTACHED, True)


def parallelism_config(**sizes: Any) -> ParallelismConfig:
    """Returns Accelerate's ParallelismConfig for FSDP2 inside each replica and votes between them.

    Accelerate's own has FSDP average gradients over the replicas as well (HSDP). In a loop of
    one's own the optimizer takes `replicate=accelerator.torch_device_mesh["dp_replicate"]`; Trainer
    does that by itself, with `TrainingArguments(parallelism_config=...)`. No GPU ever ran it.

    Args:
        sizes: `dp_replicate_size`, the number of replicas, and `dp_shard_size`, the ranks of each.

    Raises:
        NotImplementedError: If another size is above 1.
        ValueError: If one of the two is below 2: then there is nothing to vote on, or to shard.
        ImportError: If Accelerate has no ParallelismConfig; 1.10 and later have.
    """
    from accelerate.parallelism_config import ParallelismConfig

    class VotingReplicas(ParallelismConfig):  # type: ignore[misc]
        """FSDP's mesh has the ranks of one replica."""

        votes_between_replicas = True

        def __reduce__(self) -> tuple[Any, ...]:
            # Trainer pickles its arguments, and a class in here has no name that pickle could find.
            return functools.partial(parallelism_config, **sizes), ()

        @property
        def fsdp_dim_names(self) -> list[str]:
            return [name for name in super().fsdp_dim_names if name != "dp_replicate"]

        def _validate_accelerator(self, accelerator: Accelerator) -> None:
            replicas_of(accelerator)
            super()._validate_accelerator(accelerator)
            _refuse_other_optimizers(accelerator)

    config = VotingReplicas(**sizes)
    for name in ("tp_size", "cp_size", "sp_size"):
        if (getattr(config, name, None) or 1) > 1:
            raise unsupported(f"{name}={getattr(config, name)}")
    if min(config.dp_replicate_size, config.dp_shard_size) < 2:
        raise ValueError(
            f"dp_replicate_size={config.dp_replicate_size}, dp_shard_size={config.dp_shard_size}: "
            f"votes between replicas need two of them, and shards two ranks in each; use plain "
            f"data parallelism (DDP) where every rank holds the whole model"
        )
    return config


def _refuse_other_optimizers(accelerator: Accelerator) -> None:
    """Has `prepare` refuse an optimizer that would let the replicas drift apart."""
    original = accelerator.prepare_optimizer

    @functools.wraps(original)
    def prepare_optimizer(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if lion_in(optimizer) is None:
            raise NotImplementedError(
                f"{type(optimizer).__name__} does not go with hf_dlion.accelerate."
                f"parallelism_config, under which nobody averages gradients over the replicas: "
                f"use DistributedLion, or Accelerate's own ParallelismConfig"
            )
        return original(optimizer, *args, **kwargs)

    accelerator.prepare_optimizer = prepare_optimizer


def _around_save_state(
    accelerator: Accelerator,
    original: Callable[..., str],
    output_dir: str | None = None,
    *args: Any,
    **kwargs: Any,
) -> str:
    lions, automatic = _lions(accelerator), _automatic_folder(accelerator)
    if not lions:
        return original(output_dir, *args, **kwargs)
    name = f"checkpoint_{accelerator.save_iteration}"
    named = Path(os.path.expanduser(output_dir or "."))
    save = Save(lions[0][1], automatic / name if automatic else named)
    _saves[accelerator] = save
    try:
        with _as_one(accelerator, save):
            with save.part():
                if automatic and accelerator.is_local_main_process:
                    _make_room(save.folder)
            means = [lion for _, lion in lions if lion.options.checkpoint == "mean"]
            # Now: under FSDP Accelerate writes optimizers' states before it calls the hook.
            if means:
                with save.part():
                    for lion in means:
                        lion.synchronize_momentum()
            if output_dir is not None and not automatic:
                save.begin()
            with save.part():  # An automatic name has its save begin where Accelerate first waits.
                saved = _saved_state(accelerator, save, original, output_dir, *args, **kwargs)
            save.sync()
        save.finish()
        with save.part():
            if automatic and accelerator.is_main_process:
                names = reversed(whole.checkpoint_names(automatic))  # By their numbers.
                limit = accelerator.project_configuration.total_limit
                rotation.delete_superseded(save.folder, [automatic / n for n in names], limit)
    finally:
        del _saves[accelerator]
    return saved


def _saved_state(
    accelerator: Accelerator, save: Save, original: Callable[..., str], *args: Any, **kwargs: Any
) -> str:
    try:
        return original(*args, **kwargs)
    except BaseException:
        if save.begun and not save.at_momenta and replicas_of(accelerator) is not None:
            save.leave()  # The others may wait for this rank's part of the weights.
        raise


def _write_momenta(
    accelerator: Accelerator, models: list[Any], weights: list[Any], output_dir: str
) -> None:
    """Writes this rank's; every rank calls it, after the collectives of FSDP."""
    if accelerator in _saves:
        _saves[accelerator].at_momenta = True
        _saves[accelerator].folder = Path(output_dir)  # As Accelerate understood it.
        if not _saves[accelerator].begun:
            _saves[accelerator].begin()
    for suffix, lion in _lions(accelerator):
        name = MOMENTUM_NAME + suffix
        if lion.options.checkpoint == "mean":
            rank_files.remove_momentum(output_dir, name=name)
        else:
            rank_files.save_momentum(lion, output_dir, name=name, scaler=accelerator.scaler)


@contextmanager
def _as_one(accelerator: Accelerator, save: Save) -> Iterator[None]:
    """Lets Accelerate save so what fails on one rank leaves all of them alike."""
    project, wait = accelerator.project_configuration, accelerator.wait_for_everyone
    limit, iteration = project.total_limit, project.iteration

    def meet_and_wait() -> None:
        # Instead of coming to Accelerate's barrier, a rank that failed meets the others here.
        with save.part():
            pass
        if not save.begun:
            save.begin()  # All ranks have seen that there is no such folder.
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


def _make_room(place: Path) -> None:
    """Removes an unfinished state of the next number, which Accelerate would not write over."""
    with suppress(FileNotFoundError):  # Of two machines with one disk the other was faster.
        if place.is_dir() and whole.is_unfinished(place):
            rotation.remove(place)


def _around_load_state(
    accelerator: Accelerator,
    original: Callable[..., None],
    input_dir: str | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    lions, automatic = _lions(accelerator), _automatic_folder(accelerator)
    if not lions:
        original(input_dir, *args, **kwargs)
        return
    gather = functools.partial(gather_objects, lions[0][1])
    if input_dir is not None or automatic:
        # pathlib's own raises without a home, on this rank alone.
        named = None if input_dir is None else Path(os.path.expanduser(input_dir))
        input_dir = agreed_checkpoint(gather, lions[0][1].rank, named, automatic or ".")
    # What failed is raised on every rank by `resume_momentum`.
    loaded = rank_files.load_common(
        lambda: original(input_dir, *args, **kwargs), at_once=replicas_of(accelerator) is not None
    )
    folder = _folders.pop(accelerator, Path())
    scalers = [
        rank_files.resume_momentum(
            lion,
            folder,
            (f"optimizer{suffix}.bin", f"optimizer{suffix or '_0'}"),
            name=MOMENTUM_NAME + suffix,
            loaded=loaded,
        )
        for suffix, lion in lions
    ]
    if scalers[0] is not None and accelerator.scaler is not None:
        # Accelerate has just given every rank the state that was written last.
        accelerator.scaler.load_state_dict(scalers[0])
    # Accelerate counts from 0 in every process; a number that the user chose stays.
    names = names_on_ranks(gather, automatic) if automatic else []
    if names and accelerator.project_configuration.iteration == 0:
        accelerator.project_configuration.iteration = whole.number_of(names[0]) + 1


def _note_folder(accelerator: Accelerator, models: list[Any], input_dir: str) -> None:
    """Notes what load_state chose; it is too early to load, since rank 0's state follows."""
    _folders[accelerator] = Path(input_dir)


def _automatic_folder(accelerator: Accelerator) -> Path | None:
    """Returns where Accelerate puts states that it names itself, None if the user names them."""
    automatic = accelerator.project_configuration.automatic_checkpoint_naming
    return Path(accelerator.project_dir, "checkpoints") if automatic else None


def _lions(accelerator: Accelerator) -> list[tuple[str, DistributedLion]]:
    """Returns the accelerator's optimizers that are ours, with the suffixes of their files."""
    found = []
    for index, optimizer in enumerate(accelerator._optimizers):
        lion = lion_in(optimizer)
        if lion is not None:
            found.append((f"_{index}" if index else "", lion))
    return found
