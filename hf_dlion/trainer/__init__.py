"""`DistributedLion` in `transformers.Trainer`.

    hf_dlion.register()                                    # before arguments are made or parsed
    args = TrainingArguments(..., optim="dlion", optim_args="bits=2")

    Trainer(..., optimizer_cls_and_kwargs=hf_dlion.optimizer_cls_and_kwargs(args, bits=2))
    Trainer(..., optimizers=(DistributedLion(...), None), callbacks=[DistributedLionCallback()])

All three ways attach the optimizer, log what it sends, and keep every rank's momentum in
checkpoints. Importing this package wraps methods of Trainer and TrainingArguments. The wrappers
do nothing for other optimizers.
"""

from hf_dlion.trainer.callback import DistributedLionCallback
from hf_dlion.trainer.patches import install
from hf_dlion.trainer.registration import optimizer_cls_and_kwargs, register

__all__ = ["DistributedLionCallback", "optimizer_cls_and_kwargs", "register"]

install()
