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
    task = task_class(setting.task)(setting)
    return train(setting, task, in_process(setting.method)(task, setting))


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
    rank = RealRank(task, setting)
    record = train(setting, task, rank)
    rank.close()
    if dist.get_rank() == 0:
        path.write_text(json.dumps(record))


def train(setting: Setting, task: Task, workers: Workers) -> dict[str, Any]:
    """Trains the workers; returns the record, with None as the loss if it diverged."""
    evaluated_after = set(setting.evaluated_after())
    curve = [(0, workers.evaluated(task.validation))]
    # Processor time, which other work on the machine doesn't change.
    gradient_s, taken = [], 0
    begin, failure = time.perf_counter(), None
    for step in range(setting.steps):
        total, lr = 0.0, setting.lr_at(step)
        for worker in workers.numbers:
            workers.show(worker)
            batch = task.batch(worker, step, setting.seed)
            before = time.process_time()
            loss = task.loss(workers.model, batch)
            loss.backward()
            gradient_s.append(time.process_time() - before)
            total += float(loss.detach())
            workers.collect(worker, lr)
        total = workers.total(total)
        if not math.isfinite(total):
            failure = f"the training loss of step {step} is {total}"
            break
        workers.step(lr)
        taken += 1
        if step + 1 in evaluated_after:
            curve.append((step + 1, workers.evaluated(task.validation)))
    last = curve[-1][1]
    return {
        "key": setting.key,
        "setting": setting.identity(),
        "loss": last if failure is None and math.isfinite(last) else None,
        "failure": failure,
        "curve": [[step, loss if math.isfinite(loss) else None] for step, loss in curve],
        "details": None if failure else workers.evaluated(task.details),
        "parameters": sum(param.numel() for param in workers.params),
        "bytes_per_step": workers.bytes_sent / max(taken, 1),
        "gradient_ms": 1e3 * statistics.median(gradient_s),
        "seconds": time.perf_counter() - begin,
    }
