"""`DistributedLion` in `transformers.Trainer`.

    hf_dlion.register()                                    # before arguments are made or parsed
    args = TrainingArguments(..., optim="dlion", optim_args="vote_every=32")

    Trainer(..., optimizer_cls_and_kwargs=hf_dlion.optimizer_cls_and_kwargs(args, vote_every=32))
    Trainer(..., optimizers=(DistributedLion(...), None))  # after register()

All three ways attach the optimizer, log what it sends, and keep every rank's momentum in
checkpoints. Importing `registration` wraps methods of Trainer and TrainingArguments. The wrappers
do nothing for other optimizers. Importing `arguments` needs TrainingArguments alone.
"""
