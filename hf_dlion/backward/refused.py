"""Ways of averaging gradients in which our comm hook has no place: refused, with what works."""

from __future__ import annotations

import sys

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_dlion.backward.claims import claim_of


def refuse_replicated(module: nn.Module) -> None:
    """Refuses a module that torch's composable DDP replicates, or torch.compile's wrapper of one.

    Its DDP wrapper is made in the first forward, out of sight of hooks on modules. This runs before
    every module's forward while a wrapper is looked for, so the common answer must be quick.

    Raises:
        NotImplementedError: If it averages gradients that belong to a DistributedLion.
    """
    composable = sys.modules.get("torch.distributed._composable.replicate")
    if composable is None:
        return
    module = module._modules.get("_orig_mod") or module
    if not isinstance(module, getattr(composable, "DDP", ())):
        return
    params = module.named_parameters()
    averaged = [name for name, p in params if p.requires_grad and claim_of(p) is not None]
    if averaged:
        raise NotImplementedError(
            f"torch.distributed._composable.replicate averages the gradients of {len(averaged)} "
            f"parameters of a DistributedLion in full, first {averaged[0]!r}: wrap the model in "
            f"torch.nn.parallel.DistributedDataParallel instead, or in nothing, if all ranks start "
            f"with equal weights"
        )


def refuse_delayed(ddp: DistributedDataParallel) -> None:
    """Refuses a DDP wrapper that averages parameters of ours beside its comm hook.

    Raises:
        NotImplementedError: If it does.
    """
    delayed = getattr(ddp, "_delay_all_reduce_params", [])
    if any(claim_of(param) is not None for param in delayed):
        raise NotImplementedError(
            f"this DDP wrapper averages the gradients of {len(delayed)} parameters in full, beside "
            f"its comm hook: make it without delay_all_reduce_named_params"
        )


def refuse_python_reducer(ddp: DistributedDataParallel) -> None:
    """Refuses a DDP wrapper that reduces gradients in Python: comm hooks get no buckets of it.

    Raises:
        NotImplementedError: If it does.
    """
    if getattr(ddp, "_use_python_reducer", False):
        raise NotImplementedError(
            "this DDP wrapper was made under torch._dynamo.config.optimize_ddp='python_reducer', "
            "which hands DDP's comm hooks no buckets: set torch._dynamo.config.optimize_ddp = True "
            "before the wrapper is made"
        )
