"""How many processes a launcher was asked for, and what is said where fewer train together."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import torch.distributed as dist

from hf_dlion.options.warn_once import warn_once

# Of torchrun, and of the MPIs that Accelerate knows, which may have started trainings that have
# nothing to do with one another.
SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")

# How Accelerate learns that there are no GPUs.
ACCELERATE_ON_CPUS = "Accelerator(cpu=True) or set ACCELERATE_USE_CPU=true"


def refuse_strangers(known: int, what: str, remedy: str) -> None:
    """Refuses ranks that an integration does not know of: it would give each of them all data.

    Nothing is sent: all ranks find the same.

    Args:
        known: How many ranks the integration knows of.
        what: The integration.
        remedy: How it is told that there are no GPUs.

    Raises:
        RuntimeError: If there are more.
    """
    if told := _more_than(known, what, remedy):
        raise RuntimeError(told)


def warn_of_strangers() -> None:
    """Warns, once per process, of ranks that an Accelerator does not know of, if there is one.

    To be called where torch.distributed is in use. A loop may share out its data without an
    Accelerator, so this is no error.
    """
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    known = getattr(state, "_shared_state", {}).get("num_processes")
    if known is not None and (told := _more_than(known, "the Accelerator", ACCELERATE_ON_CPUS)):
        warn_once("strangers", told)


def warn_if_alone() -> None:
    """Warns, once per process, that it trains alone although its launcher was asked for several.

    To be called where torch.distributed is not initialised, when a training begins. Says nothing
    where nobody asked for more than one process.
    """
    ranks, told = _launched()
    if ranks > 1:
        told += (
            ", but torch.distributed is not initialised: this process trains alone, {plain}. Call "
            "torch.distributed.init_process_group() before the first step"
        )
    # It names an address only where it was asked for several processes, or machines.
    elif not ranks and {"ACCELERATE_DYNAMO_BACKEND", "MASTER_ADDR"} <= os.environ.keys():
        told = (
            "accelerate launch was asked for several processes and started this one alone, as it "
            "does with --cpu or without --multi_gpu: {plain}. Start it with --multi_gpu (where "
            "there are no GPUs, too: then with ACCELERATE_USE_CPU=true), or use torchrun"
        )
    else:
        return
    warn_once("alone", told.format(plain="nothing is exchanged, DistributedLion is plain Lion"))


def _more_than(known: int, what: str, remedy: str) -> str:
    """Returns what is wrong if there are more ranks than `known`, otherwise nothing."""
    if dist.is_available() and dist.is_initialized():
        ranks = dist.get_world_size()
        told = f"torch.distributed has {ranks} ranks"
    else:
        ranks, told = _launched(SIZES[:1])
    if ranks <= known:
        return ""
    return (
        f"{told}, but {what} knows of {known} and gives every process all of the data. Without "
        f"GPUs, pass {remedy}. With GPUs, start the processes with torchrun or accelerate launch "
        f"--multi_gpu. Start a process that is to train alone without WORLD_SIZE in its environment"
    )


def _launched(names: Sequence[str] = SIZES) -> tuple[int, str]:
    """Returns of how many processes this one is, 0 if nobody says, and who says so."""
    for name in names:
        value = os.environ.get(name, "")
        if value.isdigit():
            return int(value), f"{name}={value}"
    return 0, ""
