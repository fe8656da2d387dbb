"""Ways of training that spread a model over ranks: one that works, and refusals of the others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

# Values of accelerate.DistributedType under which a rank does not hold the whole model, or under
# which somebody else reduces the gradients.
_UNSUPPORTED = {
    "FSDP": "FSDP",
    "DEEPSPEED": "DeepSpeed",
    "MEGATRON_LM": "Megatron-LM",
    "XLA": "torch_xla",
}
# What `hf_dlion.accelerate.parallelism_config` has and Accelerate's own ParallelismConfig has not.
VOTES_BETWEEN_REPLICAS = "votes_between_replicas"
_REPLICAS = "dp_replicate"  # Accelerate's name of the dimension.

_replicas: ContextVar[DeviceMesh | None] = ContextVar("replicas", default=None)


def replicas_of(accelerator: Any) -> DeviceMesh | None:
    """Returns the mesh of an accelerator's replicas, if FSDP2 shards inside them and they vote.

    Args:
        accelerator: An `accelerate.Accelerator`; nothing here imports that package.

    Raises:
        RuntimeError: If they are to vote, and nothing shards the model.
    """
    config = getattr(accelerator, "parallelism_config", None)
    if not getattr(config, VOTES_BETWEEN_REPLICAS, False):
        return None
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if getattr(plugin, "fsdp_version", None) != 2:
        raise RuntimeError(
            "hf_dlion.accelerate.parallelism_config shards the model by FSDP2, which is not "
            'switched on: give TrainingArguments fsdp=True and fsdp_config={"version": 2}, or '
            "accelerate launch a file with fsdp_version: 2 (docs/guides/fsdp2.md); Accelerate has "
            "none without GPUs"
        )
    mesh: DeviceMesh = accelerator.torch_device_mesh[_REPLICAS]
    return mesh


@contextlib.contextmanager
def voting_between(replicas: DeviceMesh | None) -> Iterator[None]:
    """Gives optimizers that are made inside `replicate=replicas`, unless they have their own."""
    token = _replicas.set(replicas)
    try:
        yield
    finally:
        _replicas.reset(token)


def given_replicas() -> DeviceMesh | None:
    """Returns what `voting_between` gives."""
    return _replicas.get()


def refuse_sharded(accelerator: Any) -> None:
    """Refuses an accelerator whose ranks hold neither the whole model nor its part in a replica.

    Args:
        accelerator: As for `replicas_of`.

    Raises:
        NotImplementedError: Naming what it does, and what works instead.
        RuntimeError: As `replicas_of`.
    """
    if replicas_of(accelerator) is not None:
        return
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
        "PEFT and bf16 parameters make a model fit, and so does FSDP2 inside each machine, with "
        "hf_dlion.accelerate.parallelism_config (docs/guides/fsdp2.md)"
    )
