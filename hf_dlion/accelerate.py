"""`DistributedLion` in an Accelerate loop.

    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    hf_dlion.accelerate.attach(accelerator, model)

`attach` keeps gradients local to their rank, and makes `save_state` and `load_state` keep the
momentum of every rank, and with `vote_every` above 1 its own weights.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hf_dlion.checkpoint import NAME, find_optimizer, load_momentum, save_momentum
from hf_dlion.optimizer import DistributedLion
from hf_dlion.ranks.header import Kind

if TYPE_CHECKING:
    from accelerate.parallelism_config import ParallelismConfig

    from accelerate import Accelerator

_ATTACHED = "_hf_dlion_attached"
# What is used of an Accelerator that Accelerate does not document.
_INTERNALS = ("_optimizers", "project_configuration", "scaler")
# Values of accelerate.DistributedType with which a rank has no gradient of its own.
_UNSUPPORTED = {
    "FSDP": "FSDP",
    "DEEPSPEED": "DeepSpeed",
    "MEGATRON_LM": "Megatron-LM",
    "XLA": "torch_xla",
}
_OTHER_SIZES = ("tp_size", "cp_size", "sp_size")
_REPLICAS = "dp_replicate"  # Accelerate's name of the mesh's dimension.


def attach(accelerator: Accelerator, model: nn.Module) -> None:
    """Attaches the accelerator's DistributedLions to a model; every rank must call this.

    `step()` then exchanges votes instead of averaged gradients, `save_state` also writes every
    rank's momentum and GradScaler, and `load_state` reads them. What fails on one rank in
    `save_state` is raised on all of them; with FSDP2 that holds for the momenta only.

    With `vote_every` above 1, `save_state` saves the model with the weights that all ranks have,
    and each rank's own beside its momentum; it exchanges nothing and changes nothing. Before
    `accelerator.save_model` and `get_state_dict`, call `optimizer.eval()`, and `optimizer.train()`
    after it.

    Args:
        accelerator: The accelerator.
        model: What `accelerator.prepare` returned for the model; call `attach` again for a second
            model.

    Raises:
        NotImplementedError: If the accelerator trains with DeepSpeed, Megatron-LM, FSDP1, tensor
            parallelism, or FSDP2 without `parallelism_config`.
        ValueError: If the accelerator has no DistributedLion with parameters of the model.
        TypeError: If the model is not the wrapper that `prepare` returned.
        RuntimeError: If there are more ranks than the accelerator knows of, or this version of
            Accelerate has changed.
    """
    refuse_unsupported(accelerator)
    for name in _INTERNALS:
        if not hasattr(accelerator, name):
            raise RuntimeError(
                f"hf_dlion needs Accelerator().{name}, which accelerate {version('accelerate')} "
                f"doesn't have. Without Accelerate, use DistributedLion in a loop of your own, "
                f"with optimizer.attach(ddp_model) and hf_dlion.save_momentum"
            )
    params = set(model.parameters())
    lions = [
        lion
        for _, lion in _lions(accelerator)
        if any(param in params for group in lion.param_groups for param in group["params"])
    ]
    if not lions:
        raise ValueError(
            "the accelerator has no DistributedLion with parameters of this model: call "
            "hf_dlion.accelerate.attach(accelerator, model) after model, optimizer = "
            "accelerator.prepare(model, optimizer)"
        )
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > accelerator.num_processes:
        raise RuntimeError(
            f"WORLD_SIZE={launched}, but the Accelerator knows of {accelerator.num_processes} "
            f"process and gives every process all of the data: without GPUs, use "
            f"Accelerator(cpu=True); with GPUs, start the ranks with torchrun or accelerate launch "
            f"--multi_gpu"
        )
    if accelerator.num_processes == 1:
        _say_alone()
    else:
        for lion in lions:
            lion.attach(model)
    if not hasattr(accelerator, _ATTACHED):
        _wrap(accelerator)


def parallelism_config(*, dp_replicate_size: int, dp_shard_size: int) -> ParallelismConfig:
    """Returns Accelerate's ParallelismConfig for FSDP2 inside each replica and votes between them.

    Accelerate's own has FSDP average gradients between replicas as well (HSDP). In a loop of your
    own, make the optimizer with `replicate=accelerator.torch_device_mesh["dp_replicate"]`. Trainer
    does that for you, with `TrainingArguments(parallelism_config=...)`.

    Args:
        dp_replicate_size: Number of replicas, at least 2.
        dp_shard_size: Ranks of each replica, at least 2.

    Raises:
        ValueError: If there is nothing to vote on, or nothing to shard.
        ImportError: If Accelerate has no ParallelismConfig; 1.10 and later have it.
    """
    from accelerate.parallelism_config import ParallelismConfig

    sizes = {"dp_replicate_size": dp_replicate_size, "dp_shard_size": dp_shard_size}
    for name, size in sizes.items():
        if size < 2:
            raise ValueError(
                f"{name} must be at least 2 (got {size}); if every rank can hold the whole model, "
                f"use DDP, without a ParallelismConfig"
            )

    class VotingReplicas(ParallelismConfig):  # type: ignore[misc]
        """FSDP's mesh has the ranks of one replica."""

        votes_between_replicas = True

        def __reduce__(self) -> tuple[Any, ...]:
            # Trainer pickles its arguments, and pickle finds no class in a function.
            return functools.partial(parallelism_config, **sizes), ()

        @property
        def fsdp_dim_names(self) -> list[str]:
            return [name for name in super().fsdp_dim_names if name != _REPLICAS]

        def _validate_accelerator(self, accelerator: Accelerator) -> None:
            replicas_of(accelerator)
            super()._validate_accelerator(accelerator)
            _refuse_other_optimizers(accelerator)

    return VotingReplicas(**sizes)


def replicas_of(accelerator: Any) -> DeviceMesh | None:
    """Returns the mesh between replicas if `parallelism_config` made the accelerator's, or None.

    Raises:
        RuntimeError: If it did, and the model isn't sharded with FSDP2.
    """
    config = getattr(accelerator, "parallelism_config", None)
    if not getattr(config, "votes_between_replicas", False):
        return None
    if getattr(getattr(accelerator.state, "fsdp_plugin", None), "fsdp_version", None) != 2:
        raise RuntimeError(
            "hf_dlion.accelerate.parallelism_config needs FSDP2, which is off: set fsdp=True and "
            'fsdp_config={"version": 2} in TrainingArguments, or fsdp_version: 2 in the file of '
            "accelerate launch. Accelerate shards on GPUs only"
        )
    mesh: DeviceMesh = accelerator.torch_device_mesh[_REPLICAS]
    return mesh


def refuse_unsupported(accelerator: Any) -> None:
    """Refuses an accelerator that leaves a rank without gradients of its own.

    Raises:
        NotImplementedError: Naming what it uses, and what works instead.
        RuntimeError: As `replicas_of`.
    """
    kind = _UNSUPPORTED.get(getattr(accelerator.distributed_type, "value", ""), "")
    config = getattr(accelerator, "parallelism_config", None)
    for name in (*_OTHER_SIZES, "dp_shard_size"):
        if (getattr(config, name, None) or 1) > 1:
            kind = f"{name}={getattr(config, name)} in a ParallelismConfig"
    if kind and replicas_of(accelerator) is None:
        raise NotImplementedError(
            f"DistributedLion doesn't work with {kind}, because its ranks have no gradients of "
            f"their own. Use DDP (torchrun, or accelerate launch --multi_gpu), or FSDP2 inside "
            f"each replica with hf_dlion.accelerate.parallelism_config"
        )


def _refuse_other_optimizers(accelerator: Accelerator) -> None:
    """Makes `prepare` refuse an optimizer with which replicas would drift apart."""
    original = accelerator.prepare_optimizer

    @functools.wraps(original)
    def prepare_optimizer(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if find_optimizer(optimizer) is None:
            raise NotImplementedError(
                f"{type(optimizer).__name__} doesn't work with hf_dlion.accelerate."
                f"parallelism_config, because gradients aren't averaged between replicas: use "
                f"DistributedLion, or Accelerate's own ParallelismConfig"
            )
        return original(optimizer, *args, **kwargs)

    accelerator.prepare_optimizer = prepare_optimizer


@functools.cache
def _say_alone() -> None:
    warnings.warn(
        "this process trains alone, so DistributedLion exchanges nothing and is plain Lion. Start "
        "several processes with torchrun or accelerate launch --multi_gpu",
        stacklevel=3,
    )


def _lions(accelerator: Accelerator) -> list[tuple[str, DistributedLion]]:
    """Returns names of momentum files, and the accelerator's optimizers that they belong to."""
    return [
        (f"{NAME}_{index}" if index else NAME, lion)
        for index, optimizer in enumerate(accelerator._optimizers)
        if (lion := find_optimizer(optimizer)) is not None
    ]


def _wrap(accelerator: Accelerator) -> None:
    """Wraps `save_state` and `load_state` of one accelerator."""
    folders: list[str] = []

    def note_folder(models: list[Any], input_dir: str) -> None:
        # Too early to load: the state that rank 0 saved comes after this hook.
        folders[:] = [str(input_dir)]

    accelerator.register_load_state_pre_hook(note_folder)
    save, load = accelerator.save_state, accelerator.load_state

    @functools.wraps(save)
    def save_state(output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        original = functools.partial(save, output_dir, *args, **kwargs)
        return _save_state(accelerator, original)

    @functools.wraps(load)
    def load_state(input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        folders[:] = [str(input_dir)]
        original = functools.partial(load, input_dir, *args, **kwargs)
        _load_state(accelerator, original, folders)

    accelerator.save_state, accelerator.load_state = save_state, load_state
    setattr(accelerator, _ATTACHED, True)


def _save_state(accelerator: Accelerator, original: Callable[[], Any]) -> Any:
    lions, project = _lions(accelerator), accelerator.project_configuration
    if not lions:  # free_memory() was called.
        return original()
    saved, scaler = "", accelerator.scaler
    failure: BaseException | None = None
    told: list[BaseException] = []
    iteration, wait = project.iteration, accelerator.wait_for_everyone

    def meet_and_wait() -> None:
        # A rank that has failed is not at Accelerate's barrier, but in `save_momentum`.
        try:
            lions[0][1].meet(Kind.SAVE, None)
        except BaseException as error:
            told.append(error)
            raise
        wait()

    try:
        try:
            if not is_sharded(accelerator):
                accelerator.wait_for_everyone = meet_and_wait
            with contextlib.ExitStack() as swapped:
                for _, lion in lions:
                    swapped.enter_context(lion.common_weights())
                saved = original()
        except BaseException as error:
            # Other ranks know already, or are in collectives of FSDP, where nobody meets them.
            if told or is_sharded(accelerator):
                raise
            failure = error
        finally:
            accelerator.wait_for_everyone = wait
        for name, lion in lions:
            state = None if scaler is None else scaler.state_dict()
            save_momentum(lion, saved, scaler=state, failure=failure, name=name)
    except BaseException:
        # Some ranks have counted this state, so all do; the next one has a new name.
        project.iteration = iteration + 1
        raise
    return saved


def _load_state(accelerator: Accelerator, original: Callable[[], None], folders: list[str]) -> None:
    lions = _lions(accelerator)
    failure: BaseException | None = None
    try:
        original()
    except BaseException as error:
        if not lions or is_sharded(accelerator):  # As in _save_state.
            raise
        failure = error
    states = [load_momentum(lion, folders[0], failure=failure, name=name) for name, lion in lions]
    for state in states[:1]:
        if state is not None and accelerator.scaler is not None:
            # Accelerate has given rank 0's to every rank.
            accelerator.scaler.load_state_dict(state)


def is_sharded(accelerator: Accelerator) -> bool:
    """Returns whether FSDP2 shards the model inside each replica."""
    return replicas_of(accelerator) is not None
