"""`DistributedLion` inside `transformers.Trainer`.

Two routes lead there, with the same decay groups, parameter names, log entries and checkpoints:

    hf_dlion.register()                                    # before the arguments are parsed
    args = TrainingArguments(..., optim="dlion", optim_args="beta2=0.98")

    Trainer(..., optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(args, betas=(0.9, 0.98)))

An optimizer that you make yourself, `Trainer(optimizers=(DistributedLion(...), None))`, gets them
too, if `register()` was called.
"""

from hf_dlion.trainer.arguments import optimizer_cls_and_kwargs, register
from hf_dlion.trainer.callback import DistributedLionCallback

__all__ = ["DistributedLionCallback", "optimizer_cls_and_kwargs", "register"]
