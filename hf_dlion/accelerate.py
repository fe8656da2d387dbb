"""`DistributedLion` in an Accelerate loop.

    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    hf_dlion.accelerate.attach(accelerator, model)

`attach` keeps gradients local to their rank. It also makes `save_state` and `load_state` keep what
differs between ranks, their momenta.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import hf_dlion.fsdp as fsdp
from hf_dlion.checkpoint import NAME, find_lion, load_for, momenta_apart, save_momentum
from hf_dlion.checkpoint.momentum_file import file_name
from hf_dlion.optimizer import DistributedLion
from hf_dlion.ranks.header import Kind
from hf_dlion.ranks.wire import timeout_of
from hf_dlion.user_warning import TRAINS_ALONE, warn_user

if TYPE_CHECKING:
    from accelerate.parallelism_config import ParallelismConfig

    from accelerate import Accelerator

__all__ = ["attach", "parallelism_config"]

_ATTACHED = "_hf_dlion_attached"
# Names of the accelerate.DistributedTypes with which a rank has no gradient of its own.
_UNSUPPORTED = {
    "FSDP": "FSDP",
    "DEEPSPEED": "DeepSpeed",
    "MEGATRON_LM": "Megatron-LM",
    "XLA": "torch_xla",
}
# Sizes in a ParallelismConfig with which a rank has no gradient of its own.
_UNSUPPORTED_SIZES = ("tp_size", "cp_size", "sp_size", "dp_shard_size")
_REPLICAS = "dp_replicate"  # Accelerate's name for the mesh's dimension.


def attach(accelerator: Accelerator, model: nn.Module) -> None:
    """Attaches the accelerator's DistributedLions to a model; every rank must call this.

    `step()` then exchanges votes instead of averaged gradients, `save_state` also writes every
    rank's momentum and GradScaler, and `load_state` reads them. If `save_state` fails on one rank,
    all ranks raise. With FSDP2, that holds for the momenta only.

    With `vote_every` above 1, `save_state` begins with an exchange. Before `save_model`,
    `get_state_dict`, and evaluations, call `DistributedLion.exchange_now` on every rank.

    Args:
        accelerator: The accelerator, after `prepare`.
        model: Model that `accelerator.prepare` returned. Call `attach` again for a second model.

    Raises:
        NotImplementedError: If the accelerator trains with DeepSpeed, Megatron-LM, torch_xla,
            FSDP1, tensor parallelism, or FSDP2 without `parallelism_config`.
        ValueError: If the accelerator has no DistributedLion with parameters of the model.
        TypeError: If the model is not the wrapper that `prepare` returned.
        RuntimeError: If there are more ranks than the accelerator knows of.
    """
    refuse_unsupported(accelerator)
    fsdp.reshard([model])  # As in `DistributedLion.attach`.
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
    if accelerator.num_processes == 1:
        warn_user(
            TRAINS_ALONE + "Start several processes with torchrun or accelerate launch --multi_gpu "
            "(without GPUs, also set ACCELERATE_USE_CPU=true), or write distributed_type: "
            "MULTI_GPU into the config file"
        )
        for lion in lions:
            lion.params.name_as(model)
    else:
        for lion in lions:
            lion.attach(model)
        # Accelerate drops the handler if there is a process group, as after PartialState().
        handler = getattr(accelerator, "init_handler", None)
        if handler is not None and accelerator.is_main_process:
            what, maker = "InitProcessGroupKwargs: timeout", "an Accelerator or a PartialState"
            if text := ignored_timeout(handler.timeout, what, maker):
                warn_user(text)
    if not hasattr(accelerator, _ATTACHED):
        _wrap(accelerator)


def parallelism_config(*, dp_replicate_size: int, dp_shard_size: int) -> ParallelismConfig:
    """Returns Accelerate's ParallelismConfig for FSDP2 inside each replica and votes between them.

    With Accelerate's own class, FSDP also averages gradients between replicas (HSDP). In your own
    loop, make the optimizer with `replicate=accelerator.torch_device_mesh["dp_replicate"]`. Trainer
    does that for you, with `TrainingArguments(parallelism_config=...)`.

    Args:
        dp_replicate_size: Number of replicas, at least 2.
        dp_shard_size: Number of ranks in each replica, at least 2.

    Raises:
        ValueError: If a size is below 2.
        ImportError: If Accelerate is older than 1.10, which brought ParallelismConfig.
    """
    from accelerate.parallelism_config import ParallelismConfig

    sizes = {"dp_replicate_size": dp_replicate_size, "dp_shard_size": dp_shard_size}
    for name, size in sizes.items():
        if size < 2:
            raise ValueError(
                f"{name} must be at least 2 (got {size}). If every rank can hold the full model, "
                f"use DDP without a ParallelismConfig"
            )

    class VotingReplicas(ParallelismConfig):  # type: ignore[misc]
        """A ParallelismConfig whose FSDP mesh has the ranks of one replica."""

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
    """Returns the mesh between replicas, None without a config from `parallelism_config`.

    Raises:
        RuntimeError: If there is such a config, and FSDP2 is off.
    """
    config = getattr(accelerator, "parallelism_config", None)
    if not getattr(config, "votes_between_replicas", False):
        return None
    if getattr(getattr(accelerator.state, "fsdp_plugin", None), "fsdp_version", None) != 2:
        raise RuntimeError(
            "hf_dlion.accelerate.parallelism_config needs FSDP2, which is off. Set fsdp=True and "
            'fsdp_config={"version": 2} in TrainingArguments, or fsdp_version: 2 in the config of '
            "accelerate launch. Accelerate shards on GPUs only"
        )
    mesh: DeviceMesh = accelerator.torch_device_mesh[_REPLICAS]
    return mesh


def refuse_unsupported(accelerator: Any, *ways: str) -> None:
    """Refuses an accelerator that leaves a rank without gradients or data of its own.

    `ways` are such ways to train that a Trainer uses.

    Raises:
        NotImplementedError: If it does; the message says what works instead.
        RuntimeError: If there are more ranks than the accelerator knows of, or
            `parallelism_config` is used without FSDP2.
    """
    kinds = list(ways)
    if replicas_of(accelerator) is None:
        kinds.append(_UNSUPPORTED.get(getattr(accelerator.distributed_type, "value", ""), ""))
        config = getattr(accelerator, "parallelism_config", None)
        sizes = {name: getattr(config, name, None) or 1 for name in _UNSUPPORTED_SIZES}
        kinds += [f"{name}={n} in a ParallelismConfig" for name, n in sizes.items() if n > 1]
    for kind in filter(None, kinds):
        raise NotImplementedError(
            f"DistributedLion doesn't work with {kind}: every rank needs gradients of its own. Use "
            f"DDP (torchrun, or accelerate launch --multi_gpu), or FSDP2 inside each replica with "
            f"hf_dlion.accelerate.parallelism_config"
        )
    launched = int(os.environ.get("WORLD_SIZE") or 1)
    if dist.is_available() and dist.is_initialized():
        launched = dist.get_world_size()
    if launched > accelerator.num_processes:
        raise RuntimeError(
            f"{launched} processes were started, but Accelerate knows of "
            f"{accelerator.num_processes} and gives every process all of the data. Without GPUs, "
            f"set TrainingArguments(use_cpu=True) or Accelerator(cpu=True). With GPUs, start the "
            f"ranks with torchrun or accelerate launch --multi_gpu. To train with one process, "
            f"unset WORLD_SIZE"
        )


def ignored_timeout(asked: datetime.timedelta, setting: str, maker: str) -> str:
    """Returns what to do if the process group doesn't have the timeout of a setting, or ""."""
    group = dist.group.WORLD if dist.is_initialized() else None
    timeout = None if group is None else timeout_of(group)
    if timeout in (None, asked):
        return ""
    seconds, backend = f"{asked.total_seconds():g}", dist.get_backend(group)
    # Without a backend, torch calls it "undefined".
    named = "" if backend == "undefined" else f"{backend!r}, "
    return (
        f"{setting}={seconds} has no effect: the process group has a timeout of "
        f"{timeout.total_seconds():g} seconds. Before you make {maker}, call "
        f"torch.distributed.init_process_group({named}"
        f"timeout=datetime.timedelta(seconds={seconds}))"
    )


def _refuse_other_optimizers(accelerator: Accelerator) -> None:
    """Makes `prepare` refuse other optimizers, with which replicas would drift apart."""
    original = accelerator.prepare_optimizer

    @functools.wraps(original)
    def prepare_optimizer(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if find_lion(optimizer) is None:
            raise NotImplementedError(
                f"{type(optimizer).__name__} doesn't work with hf_dlion.accelerate."
                f"parallelism_config, because gradients aren't averaged between replicas: use "
                f"DistributedLion, or Accelerate's own ParallelismConfig"
            )
        return original(optimizer, *args, **kwargs)

    accelerator.prepare_optimizer = prepare_optimizer


def _lions(accelerator: Accelerator) -> list[tuple[str, DistributedLion]]:
    """Returns the accelerator's DistributedLions, each with the name of its momentum files."""
    found: dict[DistributedLion, str] = {}
    for index, optimizer in enumerate(accelerator._optimizers):
        if (lion := find_lion(optimizer)) is not None:  # Twice, if it was prepared twice.
            found.setdefault(lion, f"{NAME}_{index}" if index else NAME)
    return [(name, lion) for lion, name in found.items()]


def _wrap(accelerator: Accelerator) -> None:
    """Wraps `save_state` and `load_state` of one accelerator."""
    save, load = accelerator.save_state, accelerator.load_state

    @functools.wraps(save)
    def save_state(output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        original = functools.partial(save, output_dir, *args, **kwargs)
        return _save_state(accelerator, original, output_dir)

    @functools.wraps(load)
    def load_state(*args: Any, **kwargs: Any) -> None:
        _load_state(accelerator, functools.partial(load, *args, **kwargs))

    accelerator.save_state, accelerator.load_state = save_state, load_state
    setattr(accelerator, _ATTACHED, True)


def _save_state(
    accelerator: Accelerator, original: Callable[[], Any], output_dir: str | None
) -> Any:
    lions, project = _lions(accelerator), accelerator.project_configuration
    if not lions:  # free_memory() was called.
        return original()
    folder, scaler = "", accelerator.scaler
    iteration, wait = project.iteration, accelerator.wait_for_everyone

    def meet_and_wait() -> None:
        # A rank that has failed is not at Accelerate's barrier, but in `save_momentum`.
        with lions[0][1].peers.together(Kind.SAVE):
            pass
        wait()

    for _, lion in lions:
        lion.exchange_now()
    # With FSDP the other ranks may be in its collectives, where they can't meet this one.
    can_meet = not shards_model(accelerator)
    try:
        with (
            lions[0][1].peers.together(Kind.SAVE, can_meet=can_meet),
            contextlib.ExitStack() as stack,
        ):
            stack.callback(setattr, accelerator, "wait_for_everyone", wait)
            if can_meet:
                accelerator.wait_for_everyone = meet_and_wait
            if output_dir is not None and not project.automatic_checkpoint_naming:
                for name, _ in lions:
                    # Without it, what a crash leaves of this save isn't taken for complete.
                    own = file_name(name, accelerator.process_index, accelerator.num_processes)
                    Path(output_dir, own).unlink(missing_ok=True)
            if can_meet:  # With FSDP2, torch saves all shards of momenta.
                for _, lion in lions:
                    stack.enter_context(momenta_apart(lion))
            folder = original()
        for name, lion in lions:
            state = None if scaler is None else scaler.state_dict()
            save_momentum(lion, folder, scaler=state, name=name)
    finally:
        # If a rank failed, some have counted this state, so all do: the next one has a new name.
        project.iteration = iteration + 1
    return folder


def _load_state(accelerator: Accelerator, original: Callable[[], None]) -> None:
    lions = _lions(accelerator)
    if not lions:  # free_memory() was called.
        original()
        return
    # Momenta are loaded later, because Accelerate loads rank 0's after this hook.
    folders = [""]
    note = accelerator.register_load_state_pre_hook(lambda _, folder: folders.append(str(folder)))
    can_meet = not shards_model(accelerator)
    with note, lions[0][1].peers.together(Kind.LOAD, can_meet=can_meet):
        original()
    states = [load_for("Accelerate", lion, folders[-1], name=name) for name, lion in lions]
    if states[0] is not None and accelerator.scaler is not None:
        # Replaces rank 0's state, which Accelerate gave to every rank.
        accelerator.scaler.load_state_dict(states[0])


def shards_model(accelerator: Accelerator) -> bool:
    """Returns whether FSDP2 shards the model inside each replica."""
    return replicas_of(accelerator) is not None
