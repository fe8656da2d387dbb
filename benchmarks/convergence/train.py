"""One run: N workers, their gradients, one method."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.convergence.agreement import SignAgreement
from benchmarks.convergence.methods import Method, trainable
from benchmarks.convergence.recipes import recipe
from benchmarks.convergence.scenes import Scene, scene_class
from benchmarks.convergence.setting import Setting

SIGN_SAMPLES = 5


def simulate(setting: Setting, scene: Scene | None = None) -> dict[str, Any]:
    """Trains with all workers in this process; returns the record of the run.

    Raises:
        UnknownNameError: If there is no such scene or method.
    """
    how = recipe(setting.method)
    scene = scene or scene_class(setting.scene)(setting)
    method = how.simulated(scene, setting)
    try:
        return train(setting, scene, method)
    finally:
        method.close()


def train(setting: Setting, scene: Scene, method: Method) -> dict[str, Any]:
    """Trains `method.places` from their start and returns the record of the run.

    `loss` is None where it diverged.
    """
    evaluated_after = set(setting.evaluated_after())
    # Signs are compared in the middle of each of so many parts of the run.
    parts = min(SIGN_SAMPLES, setting.steps)
    measured = {setting.steps * (2 * part + 1) // (2 * parts) for part in range(parts)}
    signs = SignAgreement(method.voters)
    curve = [(0, _judged(scene, method))]
    # Processor time: other work on the machine does not count.
    gradient_s, method_s = [], []
    begin, failure = time.perf_counter(), None
    for step in range(setting.steps):
        # Each worker's gradient, on the model that the method keeps for it ...
        total = 0.0
        for worker, model in method.places:
            batch = scene.batch(worker, step, setting.seed)
            before = time.process_time()
            loss = scene.loss(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            gradient_s.append(time.process_time() - before)
            total += float(loss.detach())
            method.collect(model)
        total = method.total(total)
        if not math.isfinite(total):
            failure = f"the training loss of step {step} is {total}"
            break
        # ... then what the method makes of them.
        if setting.clip:
            _clip(setting.clip, method)
        lr = setting.lr_at(step)
        if step in measured:
            signs.before(lr)
        before = time.process_time()
        method.step(lr)
        method_s.append(time.process_time() - before)
        if step in measured:
            signs.after()
        if step + 1 in evaluated_after:
            curve.append((step + 1, _judged(scene, method)))
    last = curve[-1][1]
    if failure is None and math.isfinite(last):
        _check_replicas(method)
    # One that diverged has taken fewer.
    taken = max(len(method_s), 1)
    return {
        "key": setting.key,
        "setting": setting.identity(),
        "loss": last if failure is None and math.isfinite(last) else None,
        "failure": failure,
        "curve": [[step, loss if math.isfinite(loss) else None] for step, loss in curve],
        "metrics": _metrics(scene, method) if failure is None else {},
        "parameters": sum(param.numel() for param in trainable(method.places[0][1])),
        "bytes_per_step": method.bytes_sent / taken,
        "rounds_per_step": method.rounds / taken,
        "gradient_ms": 1e3 * statistics.median(gradient_s),
        "method_ms": 1e3 * statistics.median(method_s) if method_s else None,
        "seconds": time.perf_counter() - begin,
        "sign_agreement": signs.by_parameter(),
    }


def _clip(norm: float, method: Method) -> None:
    """Clips what lies in each model: one gradient, or the sum of those of several workers."""
    models = [model for _, model in method.places]
    for model in dict.fromkeys(models):
        nn.utils.clip_grad_norm_(trainable(model), norm * models.count(model))


def _judged(scene: Scene, method: Method) -> float:
    """Returns the validation loss, NaN on ranks whose record nobody reads."""
    if not method.judges:
        return math.nan
    with _threads(method.judging_threads):
        return scene.validation(_plain(method.places[0][1]))


def _metrics(scene: Scene, method: Method) -> dict[str, float]:
    """Returns the scene's metrics, none on ranks whose record nobody reads."""
    if not method.judges:
        return {}
    with _threads(method.judging_threads):
        return scene.metrics(_plain(method.places[0][1]))


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check_replicas(method: Method) -> None:
    """Checks what the method promises: bitwise equal replicas."""
    first, *others = dict.fromkeys(model for _, model in method.places)
    for other in others:
        for mine, theirs in zip(trainable(first), trainable(other), strict=True):
            if not torch.equal(mine, theirs):
                raise RuntimeError("replicas are not equal after the run")


def _plain(model: nn.Module) -> nn.Module:
    """Returns the model that a DDP wrapper holds, or the model itself."""
    inner = getattr(model, "module", model)
    assert isinstance(inner, nn.Module), "a module holds modules"
    return inner
