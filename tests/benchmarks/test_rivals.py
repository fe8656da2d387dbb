"""Rivals do what their libraries say, and their bytes are counted, in study and bench."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_dlion.exchange.mean import average_wire_bytes
from hf_dlion.tools.names import power_numel
from torch import Tensor
from torch.optim import AdamW

from benchmarks import rivals
from benchmarks.convergence.cli import main
from benchmarks.convergence.methods import METHODS, SIMULATED, RealRank, set_lr, trainable
from benchmarks.convergence.setting import Setting
from benchmarks.convergence.text import Pretraining
from benchmarks.convergence.train import train
from tests.support.spawn import RankPools

TINY = Setting(
    scene="pretrain", method="", workers=2, batch=2, sequence=16, hidden=32, layers=1, steps=10,
    lr=3e-3, weight_decay=0.1, betas=(0.9, 0.99), schedule="cosine", seed=3, evaluations=1,
)  # fmt: skip
RIVALS = [name for name in METHODS if name not in SIMULATED]


def of_rank(rank: int, world_size: int, settings: list[Setting]) -> list[Any]:
    found = []
    for setting in settings:
        scene = Pretraining(setting)
        method = RealRank(scene, setting)
        record = train(setting, scene, method)
        method.close()
        found.append((record, [p.detach().clone() for p in trainable(method.places[0][1])]))
    return found


def local_steps(every: int) -> list[Tensor]:
    """Two AdamWs on gradients of their own, whose parameters become their mean every few steps."""
    scene = Pretraining(TINY)
    models = [scene.model(TINY.seed) for _ in range(2)]
    options = {"lr": TINY.lr, "weight_decay": TINY.weight_decay, "fused": True}
    optimizers = [AdamW(trainable(model), **options) for model in models]
    for step in range(TINY.steps):
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            scene.loss(model, scene.batch(worker, step, TINY.seed)).backward()
            set_lr(optimizer, TINY.lr_at(step))
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % every == 0 or step + 1 == TINY.steps:
            for mine, theirs in zip(*map(trainable, models), strict=True):
                mine.data = mine.detach() / 2 + theirs.detach() / 2
                theirs.data = mine.data.clone()
    return [param.detach() for param in trainable(models[0])]


@pytest.mark.multiproc
def test_rivals_train_on_real_ranks_and_end_with_equal_replicas(ranks: RankPools) -> None:
    torch.set_num_threads(1)
    settings = [TINY.replace(method=name) for name in RIVALS if "diloco" not in name]
    # Its ranks are equal where they have just met.
    settings.append(TINY.replace(method="diloco16", steps=16))
    mine, theirs = ranks(2).run(of_rank, settings, timeout=120)
    records = {}
    for setting, (record, values), (_, others) in zip(settings, mine, theirs, strict=True):
        assert all(map(torch.equal, values, others)), setting.method
        assert record["loss"] < record["curve"][0][1], setting.method
        records[setting.method] = record, values

    numel = records["bf16"][0]["parameters"]
    whole = average_wire_bytes(numel, 2, torch.float32)
    sent = {name: record["bytes_per_step"] for name, (record, _) in records.items()}
    assert sent["bf16"] == whole / 2
    # Its first two steps reduce whole gradients.
    factors = sum(power_numel(value.shape) for value in records["powersgd"][1])
    small = average_wire_bytes(factors, 2, torch.float32)
    assert small < whole / 2
    assert sent["powersgd"] == pytest.approx((2 * whole + 8 * small) / 10)
    # In 10 steps after the eighth and the last, or after the last alone.
    assert sent["localsgd8"] == 2 * whole / 10
    assert sent["localsgd32"] == whole / 10

    # 32 of 64 coefficients of a row, or of 4,096 of a block: an index of 8 bytes and 4 of value.
    assert 0 < sent["demo"] < whole
    assert sent["diloco16"] == whole / 16

    expected = local_steps(every=8)
    for value, right in zip(records["localsgd8"][1], expected, strict=True):
        torch.testing.assert_close(value, right, rtol=0, atol=0)


def test_a_rival_whose_library_is_missing_is_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rivals.importlib.util, "find_spec", lambda name: None)
    assert main(["--scale=smoke", "--real", "--methods", "diloco16"]) == 2
    assert "torchft is not installed: pip install torchft" in capsys.readouterr().err


@pytest.mark.parametrize("name", RIVALS)
def test_rivals_are_refused_in_one_process(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--scale=smoke", "--methods", name]) == 2
    assert f"'{name}' runs on real ranks only: give --real" in capsys.readouterr().err
