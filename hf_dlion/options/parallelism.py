"""Ways of training that spread a model over ranks, which are refused with what works instead."""

from __future__ import annotations

from typing import Any

# Values of accelerate.DistributedType under which a rank does not hold the whole model, or under
# which somebody else reduces the gradients.
_UNSUPPORTED = {
    "FSDP": "FSDP",
    "DEEPSPEED": "DeepSpeed",
    "MEGATRON_LM": "Megatron-LM",
    "XLA": "torch_xla",
}


def refuse_sharded(accelerator: Any) -> None:
    """Refuses an accelerator whose ranks do not hold the whole model each.

    Args:
        accelerator: An `accelerate.Accelerator`; nothing here imports that package.

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
        "PEFT and bf16 parameters make a model fit, and so does FSDP2 inside each machine in a "
        "loop of your own (docs/guides/fsdp2.md)"
    )
