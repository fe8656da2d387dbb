"""What Trainer can do that `DistributedLion` cannot, refused before the first step."""

from __future__ import annotations

from transformers import Trainer
from transformers.utils.import_utils import is_sagemaker_mp_enabled

from hf_dlion.accelerate import refuse_sharded, unsupported


def refuse_unsupported(trainer: Trainer) -> None:
    """Refuses a Trainer that shards the model.

    Raises:
        NotImplementedError: Naming what the Trainer does, and what works instead.
    """
    refuse_sharded(trainer.accelerator)
    if trainer.is_deepspeed_enabled:
        raise unsupported("DeepSpeed")
    if trainer.is_fsdp_enabled or trainer.args.fsdp:
        raise unsupported("FSDP")
    if is_sagemaker_mp_enabled():
        raise unsupported("SageMaker model parallelism")
    if (getattr(trainer.model, "tp_size", None) or 1) > 1:
        raise unsupported("tensor parallelism")
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        raise unsupported("a model that is sharded when it is loaded (DistributedConfig)")
