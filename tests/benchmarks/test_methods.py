"""The study's methods: one process equals real ranks, alternatives follow their libraries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from benchmarks.convergence.methods import (
    NOT_TRAINED,
    check_method,
    in_process,
    needs_real_ranks,
)
from benchmarks.convergence.setting import Setting
from benchmarks.convergence.text import Pretraining
from benchmarks.convergence.train import simulate, train
from benchmarks.convergence.workers import RealRank, Workers
from benchmarks.methods import METHODS, method_of, set_lr, trainable
from hf_dlion.cli.plan.methods import power_numel
from hf_dlion.ranks.header import HEADER_BYTES
from tests.support.spawn import RankPools, on_ranks
from tests.support.tiny_study import TINY
from tests.support.training import is_equal_everywhere, same

# What gloo adds in an order of its own.
SUMMED = ("adamw", "lion", "localsgd8")
ONLY_REAL = [name for name in METHODS if needs_real_ranks(name) and name not in NOT_TRAINED]


def outcome(setting: Setting, method: Any) -> tuple[dict[str, Any], list[Tensor]]:
    record = train(setting, Pretraining(setting), method)
    return record, [param.detach().clone() for param in method.params]


def only_real_bytes(setting: Setting) -> int:
    """Bytes that a real rank sends to another, and the simulation doesn't count."""
    first = 48  # Comparisons in the first step.
    every = method_of(setting.method).every
    if setting.method == "lion":
        return first + 8 + setting.steps * HEADER_BYTES
    if setting.method in SUMMED:
        return 0
    if every > 1:  # At its first step, and if `exchange_now` finds that no rank has moved.
        return first + HEADER_BYTES * (1 + (setting.steps % every == 0))
    return first


def simulated(setting: Setting) -> Workers:
    return in_process(setting.method)(Pretraining(setting), setting)


def of_rank(rank: int, world_size: int, settings: list[Setting]) -> list[Any]:
    found = []
    for setting in settings:
        method = RealRank(Pretraining(setting), setting)
        record, values = outcome(setting, method)
        found.append((record, values))
        method.close()
    return found


@pytest.mark.multiproc
@pytest.mark.parametrize("workers", [2, 3])
def test_the_simulation_is_real_ranks_bit_for_bit(pools: RankPools, workers: int) -> None:
    factors = (("*embed*", 3.0), ("*norm*", 0.5))
    changes: dict[str, dict[str, Any]] = {
        "adamw": {},
        "lion": {},
        "average": {},
        "bits2": {},
        "sync16": {},
        "majority": {"lr_factors": factors, "clip": 0.5},
        "localsgd8": {"clip": 0.5, "evaluations": 4},
        "every16:momentum_sync_every=1": {"evaluations": 4},
        "majority:vote_every=4,bits=1,momentum_sync_every=2": {"lr_factors": factors, "clip": 0.5},
        "majority:vote_every=15": {},
        "bits4:level_scale=tensor": {},
        "majority:bits=2,momentum_sync_every=8": {"bf16": True},
        "majority:momentum_dtype=bfloat16,momentum_sync_every=8": {},
        "majority:momentum_sync_every=8": {"bf16_weights": True},
        "majority:vote_every=4": {"bf16_weights": True},
        "majority:vote_every=15,momentum_dtype=bfloat16,momentum_sync_every=1": {},
    }
    settings = [
        TINY.replace(method=name, workers=workers, steps=30, **changed)
        for name, changed in changes.items()
    ]
    real = pools(workers).run(of_rank, settings, timeout=240)[0]
    for setting, (of_real, expected) in zip(settings, real, strict=True):
        record, values = outcome(setting, simulated(setting))
        if workers == 2 or setting.method not in SUMMED:
            assert same(values, expected), setting.method
            assert record["curve"] == of_real["curve"]
        assert record["loss"] < record["curve"][0][1], setting.method
        low = setting.bf16 or setting.bf16_weights
        assert (record["curve"][0] == real[0][0]["curve"][0]) != low
        extra = 30 * (of_real["bytes_per_step"] - record["bytes_per_step"])
        assert round(extra) == only_real_bytes(setting) * (workers - 1), setting.method


def local_sgd(every: int, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Two AdamWs on gradients of their own, whose parameters become their mean every few steps.

    With a dtype, the mean of moves that are rounded to it.
    """
    task = Pretraining(TINY)
    models = [task.model(TINY.seed) for _ in range(2)]
    means = [param.detach().clone() for param in trainable(models[0])]
    options = {"lr": TINY.lr, "weight_decay": TINY.weight_decay, "fused": True}
    optimizers = [AdamW(trainable(model), **options) for model in models]
    for step in range(TINY.steps):
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            task.loss(model, task.batch(worker, step, TINY.seed)).backward()
            set_lr(optimizer, TINY.lr_at(step))
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % every == 0 or step + 1 == TINY.steps:
            for mine, theirs, mean in zip(*map(trainable, models), means, strict=True):
                if dtype is None:
                    mean.copy_(mine.detach() / 2 + theirs.detach() / 2)
                else:
                    moves = [(param.detach() - mean).to(dtype) / 2 for param in (mine, theirs)]
                    mean += moves[0] + moves[1]
                mine.data, theirs.data = mean.clone(), mean.clone()
    return [param.detach() for param in trainable(models[0])]


@pytest.mark.multiproc
def test_alternatives_train_on_real_ranks_and_end_with_equal_replicas(pools: RankPools) -> None:
    names = [*ONLY_REAL, "localsgd8", "localsgd160", "every16", "every32"]
    settings = [TINY.replace(method=name) for name in names if "diloco" not in name]
    # DiLoCo's ranks are equal when they have just met.
    settings.append(TINY.replace(method="diloco16", steps=16))
    settings.append(TINY.replace(method="majority:bits=2,ties=zero"))
    mine, theirs = pools(2).run(of_rank, settings, timeout=120)
    records = {}
    for setting, (record, values), (_, others) in zip(settings, mine, theirs, strict=True):
        assert same(values, others), setting.method
        assert record["loss"] < record["curve"][0][1], setting.method
        records[setting.method] = record, values
    sent = {name: record["bytes_per_step"] for name, (record, _) in records.items()}
    whole = 4 * records["bf16"][0]["parameters"]  # A ring of two sends as much as there is.
    assert sent["bf16"] == whole / 2
    factors = 4 * sum(power_numel(value.shape) for value in records["powersgd"][1])
    assert factors < whole / 2
    assert sent["powersgd"] == pytest.approx((2 * whole + 10 * factors) / 12)
    # In 12 steps after the eighth and the last, or after the last alone.
    assert sent["localsgd8"] == 2 * whole / 12
    assert sent["localsgd160"] == 2 * sent["localsgd32-bf16"] == whole / 12
    assert 0 < sent["every16"] == sent["every32"] < sent["majority:bits=2,ties=zero"] / 5
    assert sent["diloco16"] == whole / 16
    assert 0 < sent["demo"] < whole
    for name, right in (
        ("localsgd8", local_sgd(every=8)),
        ("localsgd160", local_sgd(every=160)),
        ("localsgd32-bf16", local_sgd(every=32, dtype=torch.bfloat16)),
    ):
        assert same(records[name][1], right), name


@pytest.mark.smoke
@on_ranks(2)
def test_local_steps_are_judged_by_common_weights_and_end_with_an_exchange(rank: int) -> None:
    setting = TINY.replace(method="majority:vote_every=5", evaluations=3)
    task = Pretraining(setting)
    method = RealRank(task, setting)
    record, _ = outcome(setting, method)
    optimizer = method._rank.optimizer
    assert all(map(is_equal_everywhere, method.params))
    assert optimizer.wire.exchanges == 3  # After 5, 10 and 12 steps.
    if rank == 0:
        start = record["curve"][0][1]
        assert record["loss"] == task.validation(method.model) < start
        assert record["bytes_per_step"] == optimizer.wire.bytes_sent / 12
        # Before the first exchange all ranks have what they began with.
        assert record["curve"][1] == [4, start]


@pytest.mark.parametrize("method", ["adamw", "majority"])
def test_learning_rates_are_multiplied_by_the_factor_of_the_first_pattern(method: str) -> None:
    factors = (("*embed*", 4.0), ("*norm*", 0.5), ("*layers*norm*", 9.0))
    changes = {"steps": 1, "warmup": 0.0, "weight_decay": 0.0, "lr_factors": factors}
    setting = TINY.replace(method=method, lr=2.0**-12, **changes)
    task = Pretraining(setting)
    made = in_process(method)(task, setting)
    train(setting, task, made)
    before = task.model(setting.seed).parameters()
    for (name, param), old in zip(made.model.named_parameters(), before, strict=True):
        factor = 4.0 if "embed" in name else 0.5 if "norm" in name else 1.0
        most = float((param - old).detach().abs().max()) / setting.lr
        assert most == pytest.approx(factor, rel=1e-3), name


def test_betas_of_adamw_are_not_those_of_lion() -> None:
    setting = TINY.replace(adamw_betas=(0.9, 0.95), betas=(0.95, 0.98))
    made = simulated(setting.replace(method="adamw"))
    assert made._optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    losses = {
        method: [simulate(setting.replace(method=method, **betas))["loss"] for betas in both]
        for method, both in {
            "adamw": ({}, {"betas": (0.5, 0.5)}, {"adamw_betas": (0.5, 0.5)}),
            "majority": ({}, {"adamw_betas": (0.5, 0.5)}, {"betas": (0.5, 0.5)}),
        }.items()
    }
    for same_loss, again, other in losses.values():
        assert same_loss == again != other


@pytest.mark.parametrize(("method", "count"), [("adamw", 2), ("majority", 4)])
def test_the_mean_gradient_is_clipped_or_each_workers_own_if_it_votes(
    method: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    norms = []

    def noted(params: list[Tensor], norm: float) -> None:
        norms.append(norm)
        for param in params:
            assert param.grad is not None
            param.grad.zero_()

    monkeypatch.setattr(nn.utils, "clip_grad_norm_", noted)
    record = simulate(TINY.replace(method=method, steps=2, clip=0.5, weight_decay=0.0))
    assert norms == [0.5] * count
    assert record["curve"][0][1] == record["curve"][-1][1]  # Nothing was left of the gradients.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "demo", "real": True, "lr_factors": (("*", 2.0),)}, "doesn't work with demo"),
        ({"method": "bf16"}, "'bf16' runs on real ranks only; add --real"),
        ({"method": "every16:seed=1"}, "'every16:seed=1' runs on real ranks only; add --real"),
        ({"method": "lion", "clip": 1.0}, "'lion' clips each rank's own gradient, which one"),
        ({"method": "sync16:momentum_sync='*'"}, "runs on real ranks only; add --real"),
        ({"method": "none"}, "'none' trains no common model; use it in benchmarks/step_time.py"),
    ],
)
def test_a_method_that_cannot_run_as_asked_says_so(changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_method(TINY.replace(**changes))


def test_a_method_is_a_name_with_options_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    method = method_of("bits4:exchange=gather,momentum_sync_every=8")
    assert method.options == {"bits": 4, "exchange": "gather", "momentum_sync_every": 8}
    assert method.title == "DistributedLion, 4 bits, exchange=gather, momentum_sync_every=8"
    with pytest.raises(ValueError, match=r"unknown method 'magic'; use one of none, .*, demo"):
        method_of("magic")
    assert method_of("bits4:vote_every=8").every == 8
    assert method_of("bits4:level_scale=tensor").options == {"bits": 4, "level_scale": "tensor"}
    assert method_of("majority:momentum_dtype=bf16").options == {"momentum_dtype": torch.bfloat16}
    assert [method_of(name).every for name in ("every32", "localsgd160", "adamw")] == [32, 160, 1]
    with pytest.raises(ValueError, match="aggregation='average' is the mean of votes of one bit"):
        method_of("average:bits=4")
    with pytest.raises(ValueError, match=r"only methods with DistributedLion .*, not adamw$"):
        method_of("adamw:bits=4")
    with pytest.raises(ValueError, match="there is no option 'foo'"):
        method_of("majority:foo=1")
    with pytest.raises(ValueError, match=r"bits must be 1, 2, 4, or 8 \(got 3\)"):
        method_of("majority:bits=3")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ImportError, match="diloco16 needs torchft, which is not installed: pip install"
    ):
        method_of("diloco16")
