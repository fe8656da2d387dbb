"""Accelerate's own test scripts run on two ranks with DistributedLion in place of SGD and AdamW."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.spawn import run_command

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

LAUNCHED = Path(__file__).parents[1] / "support/launched_lion.py"
ON_CPU = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}


def launch(*argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
    # Port 0 lets the system choose.
    launcher += ["--num_processes=2", "--num_machines=1", "--main_process_port=0"]
    launcher += ["--mixed_precision=no", "--dynamo_backend=no"]
    return run_command([*launcher, str(LAUNCHED), *argv], env=ON_CPU, check=check, timeout=200)


def exchanged(done: subprocess.CompletedProcess[str]) -> list[str]:
    return sorted(line for line in done.stdout.splitlines() if "exchanged votes" in line)


def test_its_training_check_gets_the_weights_of_one_process_that_has_the_whole_batch() -> None:
    done = launch("test_script")
    # One process of the whole batch, two, two with split batches, bf16, fp16; two samplers.
    assert exchanged(done) == [f"rank {r}: 10 of 10 optimizers exchanged votes" for r in (0, 1)]
    assert "same results on one CPU or distributed setup with batch split" in done.stdout


def test_its_gradient_accumulation_steps_when_it_should_and_leaves_replicas_equal() -> None:
    done = launch("test_sync", "replicas")
    assert exchanged(done) == [f"rank {r}: 2 of 2 optimizers exchanged votes" for r in (0, 1)]


@pytest.mark.long
def test_its_check_that_gradients_were_averaged_finds_that_they_were_not() -> None:
    done = launch("test_sync", check=False)
    assert done.returncode != 0
    assert "Gradients not in sync when they should be" in done.stderr
