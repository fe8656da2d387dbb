"""Trains one run: N workers, their gradients, one method."""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.convergence.methods import check_method, in_process
from benchmarks.convergence.setting import Setting
from benchmarks.convergence.tasks import Task, task_class
from benchmarks.convergence.workers import RealRank, Workers
from benchmarks.ranks import launch


def simulate(setting: Setting) -> dict[str, Any]:
    """Trains with all workers in this process; returns the record of the run."""
    check_method(setting)
    task, make = task_class(setting.task)(setting), in_process(setting.method)
    assert make is not None  # It has been checked.
    return train(setting, task, make(task, setting))


def run_real(setting: Setting) -> dict[str, Any]:
    """Trains on `setting.workers` processes of this machine, with gloo; returns rank 0's record."""
    check_method(setting)
    task_class(setting.task)(setting).prepare()
    with tempfile.TemporaryDirectory(prefix="hf_dlion_study_") as folder:
        path = Path(folder, "record.json")
        launch(partial(_rank, setting, path), setting.workers, local_ranks=setting.workers)
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def _rank(setting: Setting, path: Path) -> None:
    task = task_class(setting.task)(setting)
    method = RealRank(task, setting)
    record = train(setting, task, method)
    method.close()
    if dist.get_rank() == 0:
        path.write_text(json.dumps(record))


def train(setting: Setting, task: Task, method: Workers) -> dict[str, Any]:
    """Trains a method's model; returns the record, with None as the loss if it diverged."""
    evaluated_after = set(setting.evaluated_after())
    curve = [(0, method.evaluated(task.validation))]
    divergences = []
    # Processor time, which other work on the machine doesn't change.
    gradient_s, taken = [], 0
    begin, failure = time.perf_counter(), None
    for step in range(setting.steps):
        total, lr = 0.0, setting.lr_at(step)
        for worker in method.workers:
            method.show(worker)
            batch = task.batch(worker, step, setting.seed)
            before = time.process_time()
            loss = task.loss(method.model, batch)
            loss.backward()
            gradient_s.append(time.process_time() - before)
            total += float(loss.detach())
            method.collect(worker, lr)
        total = method.total(total)
        if not math.isfinite(total):
            failure = f"the training loss of step {step} is {total}"
            break
        method.step(lr)
        taken += 1
        if step + 1 in evaluated_after:
            curve.append((step + 1, method.evaluated(task.validation)))
            divergences += [[step + 1, found]] if (found := method.divergences()) else []
    last = curve[-1][1]
    return {
        "key": setting.key,
        "setting": setting.identity(),
        "loss": last if failure is None and math.isfinite(last) else None,
        "failure": failure,
        "curve": [[step, loss if math.isfinite(loss) else None] for step, loss in curve],
        "details": None if failure else method.evaluated(task.details),
        **({"divergences": divergences} if divergences else {}),
        "parameters": sum(param.numel() for param in method.params),
        "bytes_per_step": method.bytes_sent / max(taken, 1),
        "gradient_ms": 1e3 * statistics.median(gradient_s),
        "seconds": time.perf_counter() - begin,
    }
