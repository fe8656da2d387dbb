"""`hf-dlion doctor`: says whether this machine, or all ranks of a launcher, can train.

Alone it looks at what is installed here, and two processes of this machine take three steps. Under
torchrun every rank looks at its own process, the ranks compare what they found, take three steps
together, and measure the links between neighbours:

    torchrun --nnodes 2 --nproc_per_node 1 --node_rank 0 --master_addr 10.0.0.1 -m hf_dlion doctor
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.metadata
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from hf_dlion.codec.native.library import library
from hf_dlion.optimizer import DistributedLion
from hf_dlion.ranks.interface import (
    ANYWHERE,
    VARIABLES,
    interfaces,
    name_interface,
    route_to,
)
from hf_dlion.trainer import register

PACKAGES = ("torch", "numpy", "transformers", "accelerate", "datasets", "trl", "peft", "triton")
# How long the ranks wait for one another.
PATIENCE_S = 120.0
# What a rank sends to its neighbour: first to connect, then to be timed.
LINK_BYTES = (1_000, 8_000_000)

OK, WARN, FAIL = "ok", "warn", "FAIL"


class Finding(NamedTuple):
    """One line of the report.

    Attributes:
        grade: OK, WARN or FAIL.
        what: What was looked at.
        text: What was found, and what to do about it.
    """

    grade: str
    what: str
    text: str


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report; returns 1 if anything would keep a training from running.

    Args:
        argv: The words after `hf-dlion doctor`; by default those of this process.
    """
    argparse.ArgumentParser(
        prog="hf-dlion doctor",
        description="Says whether this machine, or under torchrun all ranks, can train.",
    ).parse_args(argv)
    launched = "RANK" in os.environ
    # Before anything else, as `hf_dlion.launch` does it.
    named = name_interface() if launched else ""
    findings = list(installed(named))
    if launched:
        findings += _among_ranks(findings)
    else:
        findings.append(_checked("two ranks here", _two_ranks))
    grades = {finding.grade for finding in findings}
    if os.environ.get("RANK", "0") == "0":
        for finding in findings:
            print(f"{finding.grade:4}  {finding.what:14}  {finding.text}")
        print("\nthis would not train" if FAIL in grades else "\nready to train")
    return int(FAIL in grades)


def installed(named: str = "") -> Iterator[Finding]:
    """Yields what can be told of this process alone.

    Args:
        named: What `name_interface` said.
    """
    own = _version("hf-dlion") or "not installed, run from its folder"
    yield Finding(OK, "hf_dlion", f"{own}, Python {platform.python_version()}")
    found = {name: version for name in PACKAGES if (version := _version(name)) is not None}
    yield Finding(OK, "packages", ", ".join(f"{name} {version}" for name, version in found.items()))
    yield _checked("Trainer", _trainer)
    yield _checked("CPU codec", _cpu_codec)
    yield _checked("GPUs", _gpus)
    yield _checked("backends", _backends)
    yield _checked("network", functools.partial(_network, named))


def _checked(what: str, look: Callable[[], tuple[str, str]]) -> Finding:
    """Returns what a look found; an exception is a finding, too."""
    try:
        grade, text = look()
    except Exception as error:  # The report goes on.
        # A rank's failure arrives with its traceback, whose last line says what failed.
        last = (str(error).strip().splitlines() or [""])[-1]
        grade, text = FAIL, f"{type(error).__name__}: {last}"
    return Finding(grade, what, text)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _trainer() -> tuple[str, str]:
    register()
    return OK, "takes optim='dlion'"


def _cpu_codec() -> tuple[str, str]:
    with _warnings_of("hf_dlion") as said:
        found = library()
    if found is None:
        return WARN, "; ".join(said) or "in torch and NumPy, as HF_DLION_NATIVE=0 asks"
    return OK, "compiled"


@contextmanager
def _warnings_of(name: str) -> Iterator[list[str]]:
    """Collects what a logger and those below it say meanwhile."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    before, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


def _gpus() -> tuple[str, str]:
    if not torch.cuda.is_available():
        return OK, "none: TrainingArguments needs use_cpu=True, Accelerator cpu=True"
    names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    text = f"{torch.cuda.device_count()} x {', '.join(sorted(names))}"
    if _version("triton") is None:
        return WARN, f"{text}; install triton, or the codec runs in torch, several times slower"
    return OK, text


def _backends() -> tuple[str, str]:
    there = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    if torch.cuda.is_available() and not there["nccl"]:
        return WARN, "this torch has no NCCL: votes of GPUs go through gloo and the host"
    return OK, ", ".join(name for name, found in there.items() if found)


def _network(named: str) -> tuple[str, str]:
    """Looks at the interface through which this machine reaches the first one."""
    known = interfaces()
    for variable in VARIABLES:
        chosen = os.environ.get(variable, "")
        # NCCL's may be a list of beginnings of names.
        if variable.startswith("GLOO") and chosen and chosen not in known:
            return FAIL, f"{variable}={chosen}: this machine has {', '.join(sorted(known))}"
    master = os.environ.get("MASTER_ADDR", "")
    try:
        route = route_to(master or ANYWHERE)
    except OSError as error:
        if master:
            return FAIL, f"no way to MASTER_ADDR={master}: {error}"
        return WARN, "nothing leads to other machines"
    if named:
        return OK, named
    text = f"{route.interface} ({route.address}) leads to {master or 'other machines'}"
    if not route.is_loopback and VARIABLES[0] not in os.environ:
        text += f"; between machines, export {VARIABLES[0]}={route.interface}"
    return OK, text


def _two_ranks() -> tuple[str, str]:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="hf_dlion_doctor_") as folder:
        ranks = spawn(_rank, (str(Path(folder, "meet")),), nprocs=2, join=False)  # type: ignore[no-untyped-call]
        while not ranks.join(timeout=1.0):
            if time.perf_counter() - began > 2 * PATIENCE_S:
                for process in ranks.processes:
                    process.kill()
                raise TimeoutError(f"they did not end within {2 * PATIENCE_S:.0f} s")
    seconds = time.perf_counter() - began
    return OK, f"took 3 steps with DDP and gloo and hold equal weights ({seconds:.0f} s)"


def _rank(rank: int, file: str) -> None:
    """Is one of two ranks of this machine."""
    if platform.system() == "Linux":
        os.environ[VARIABLES[0]] = "lo"
    torch.set_num_threads(1)
    patience = timedelta(seconds=PATIENCE_S)
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=2, timeout=patience
    )
    _steps(torch.device("cpu"))
    dist.destroy_process_group()


def _steps(device: torch.device) -> int:
    """Takes three steps with all ranks; returns the bytes that this one sent in the last.

    Raises:
        Disagreement: On every rank, if their weights differ afterwards.
    """
    torch.manual_seed(0)
    model = nn.Linear(256, 256).to(device)
    ddp = DistributedDataParallel(model)
    optimizer = DistributedLion(
        model.named_parameters(), lr=1e-3, check_replicas_every=1, on_divergence="raise"
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        ddp(torch.randn(4, 256, generator=generator).to(device)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    sent = optimizer.wire.last_bytes_sent
    # A wrapper must not outlive its process group.
    del ddp
    gc.collect()
    return sent


def _among_ranks(mine: Sequence[Finding]) -> list[Finding]:
    """Compares the ranks of a launcher, lets them take steps, and measures their links."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=PATIENCE_S))
    except Exception as error:  # The report goes on.
        return [Finding(FAIL, "all ranks", f"cannot meet: {error}")]
    everyone: list[Sequence[Finding]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, list(mine))
    found = list(_differences(everyone))
    found.append(_checked("all ranks", functools.partial(_all_step, device)))
    if found[-1].grade == OK:
        found.append(_checked("slowest link", functools.partial(_slowest_link, device)))
    dist.destroy_process_group()
    return found


def _differences(everyone: Sequence[Sequence[Finding]]) -> Iterator[Finding]:
    """Yields what other ranks found and rank 0 did not."""
    for rank, theirs in enumerate(everyone):
        for own, other in zip(everyone[0], theirs, strict=True):
            if other.what in ("hf_dlion", "packages") and own.text != other.text:
                yield Finding(WARN, other.what, f"rank {rank} has {other.text}")
            elif rank and other.grade != OK:
                yield Finding(other.grade, other.what, f"rank {rank}: {other.text}")


def _all_step(device: torch.device) -> tuple[str, str]:
    sent, count = _steps(device), dist.get_world_size()
    backend = dist.get_backend()
    told = f"{count} took 3 steps with DDP and {backend} and hold equal weights"
    return OK, f"{told}; each sent {sent:,} bytes a step"


def _slowest_link(device: torch.device) -> tuple[str, str]:
    """Has each rank in turn send to the next one, while the others wait."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return OK, "one rank has none"
    seconds = torch.zeros(size, dtype=torch.float64)
    for sender in range(size):
        for count in LINK_BYTES:
            block = torch.zeros(count, dtype=torch.uint8, device=device)
            dist.barrier()
            began = time.perf_counter()
            if rank == sender:
                dist.send(block, (sender + 1) % size)
            elif rank == (sender + 1) % size:
                dist.recv(block, sender)
                block.cpu()  # waits for a GPU
                seconds[sender] = time.perf_counter() - began
    times = seconds.to(device)
    dist.all_reduce(times)
    worst = int(times.argmax())
    rate = 8 * LINK_BYTES[-1] / float(times[worst]) / 1e6
    there = f"rank {worst} to rank {(worst + 1) % size}"
    return OK, f"{there}: {rate:,.0f} Mbit/s; hf-dlion plan --link {rate:.0f}mbit says if it pays"
