"""A run of the study that takes less than a second."""

from benchmarks.convergence.setting import Setting

TINY = Setting(
    task="pretrain",
    method="majority",
    workers=2,
    batch=2,
    sequence=16,
    hidden=32,
    layers=1,
    steps=12,
    lr=3e-3,
    weight_decay=0.1,
    betas=(0.9, 0.99),
    seed=3,
    evaluations=1,
)
