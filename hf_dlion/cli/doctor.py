"""`hf-dlion doctor`: whether this machine, or the ranks of a launcher, can train.

Alone, it checks what is installed, and two processes of this machine take three steps. Under
torchrun, each rank reports what it has, all ranks take three steps together, and the links between
nodes are measured one after another. Every line is printed as soon as it is known.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import os
import platform
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import hf_dlion
from hf_dlion.gpu import form
from hf_dlion.gpu.warm_up import trial_refusal
from hf_dlion.launch.network import ANYWHERE, VARIABLES, interfaces, name_interface, route_to
from hf_dlion.optimizer import DistributedLion

PACKAGES = ("torch", "numpy", "transformers", "accelerate", "datasets", "trl", "peft", "triton")
# Files of the drivers of NVIDIA's and AMD's GPUs.
GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd")
# How long the ranks wait for one another.
PATIENCE = timedelta(minutes=2)
# Time after which two processes of this machine are killed; they may start slowly.
HANGS_S = 600.0
# Size of a link's first message; time and largest size of the message that is measured.
FIRST_BYTES = 1 << 20
TIMED_S = 0.5
MOST_BYTES = 256 << 20

OK = "ok"
WARN = "warn"
FAIL = "FAIL"


class Report:
    """Prints findings of rank 0 immediately, and failures of other ranks to stderr."""

    def __init__(self) -> None:
        """Starts an empty report."""
        self.failed = False  # Whether training would fail.
        self._rank = int(os.environ.get("RANK", "0"))

    def add(self, grade: str, what: str, text: str) -> None:
        """Prints a line: a grade, what was checked, and what was found and what to do."""
        self.failed |= grade == FAIL
        if self._rank == 0:
            print(f"{grade:4}  {what:14}  {text}", flush=True)
        elif grade == FAIL:
            line = f"hf-dlion doctor: rank {self._rank}: {what}: {text}"
            print(line, file=sys.stderr, flush=True)

    def check(self, what: str, look: Callable[[], tuple[str, str]]) -> None:
        """Prints what a check found. An exception is a failure, and the report continues."""
        try:
            grade, text = look()
        except Exception as error:
            # A process's failure arrives with its traceback, whose last line says what failed.
            last = (str(error).strip().splitlines() or [""])[-1]
            grade, text = FAIL, f"{type(error).__name__}: {last}"
        self.add(grade, what, text)

    def end(self, advice: str = "") -> None:
        """Prints the conclusion, and what to do next."""
        if self._rank == 0:
            print("\nthis would not train" if self.failed else "\nready to train", flush=True)
            if advice:
                print(advice, flush=True)


def run(args: argparse.Namespace) -> int:
    """Prints the report; returns 1 if training would fail."""
    report, launched = Report(), "RANK" in os.environ
    # Before anything else, as `hf-dlion run` does it.
    named = name_interface() if launched else ""
    report.add(OK, "hf_dlion", f"{hf_dlion.__version__}, Python {platform.python_version()}")
    report.add(OK, "packages", _packages())
    report.check("Trainer", _trainer)
    report.check("device", _device_found)
    report.check("kernels", _kernels)
    report.check("network", lambda: _network(named))
    if launched:
        _among_ranks(report)
    else:
        report.check("two ranks here", _two_ranks)
        report.end()
    return int(report.failed)


def _packages() -> str:
    found = []
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(found)


def _trainer() -> tuple[str, str]:
    hf_dlion.register()
    return OK, "accepts optim='dlion'"


def _device_found() -> tuple[str, str]:
    if not torch.cuda.is_available():
        if "CUDA_VISIBLE_DEVICES" not in os.environ and any(map(os.path.exists, GPU_DRIVERS)):
            built_for = torch.version.cuda or torch.version.hip or "CPUs"
            return WARN, (
                f"this machine has a GPU that torch {torch.__version__}, built for {built_for}, "
                f"can't use, so it would train on the CPU: install a torch that fits the driver"
            )
        return OK, "CPU, gloo; pass TrainingArguments(use_cpu=True) or Accelerator(cpu=True)"
    torch.ones(1, device=_own_gpu()).sum().item()  # Fails if torch wasn't built for this GPU.
    names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    text = f"{torch.cuda.device_count()} x {', '.join(sorted(names))}"
    if not dist.is_nccl_available():
        return WARN, f"{text}; this torch has no NCCL, so votes go through gloo and the host"
    return OK, f"{text}, NCCL"


def _kernels() -> tuple[str, str]:
    """Tells which form of the optimizer's work runs on this machine's device, and why."""
    if not torch.cuda.is_available():
        return OK, "none, they run on GPUs"
    if why := trial_refusal(_own_gpu()):
        return WARN, f"slower torch operations instead, with the same result: {why}"
    return OK, f"Triton kernels for votes of one bit; {form.SWITCH}=0 turns them off"


def _own_gpu() -> torch.device:
    """Returns this rank's GPU, which may be the only one that it sees."""
    place = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", 0 if torch.cuda.device_count() == 1 else place)


def _network(named: str) -> tuple[str, str]:
    """Checks the interface through which this machine reaches rank 0's machine."""
    known, gloo = interfaces(), VARIABLES[0]
    # NCCL's variable may be a list of beginnings of names.
    chosen = os.environ.get(gloo, "")
    if chosen and not set(chosen.split(",")) <= known.keys():
        return FAIL, f"{gloo}={chosen}, but this machine has {', '.join(sorted(known))}"
    master = os.environ.get("MASTER_ADDR", "")
    try:
        route = route_to(master or ANYWHERE)
    except OSError as error:
        if master:
            return FAIL, f"no route to MASTER_ADDR={master}: {error}"
        return WARN, "no route to other nodes"
    if named:
        return OK, named
    text = f"{route.interface} ({route.address}) leads to {master or 'other nodes'}"
    if not route.is_loopback and not chosen:
        text += f"; on several nodes, export {gloo}={route.interface}"
    return OK, text


def _two_ranks() -> tuple[str, str]:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="hf_dlion_doctor_") as folder:
        meeting = f"file://{folder}/meet"
        ranks = spawn(_rank, (meeting,), nprocs=2, join=False)  # type: ignore[no-untyped-call]
        # The group's timeout ends a wait for the other rank, not one for a disk or a driver.
        while not ranks.join(timeout=1.0):
            if time.perf_counter() - began > HANGS_S:
                for process in ranks.processes:
                    process.kill()
                raise TimeoutError(f"two processes didn't take 3 steps in {HANGS_S:.0f} s")
    return OK, f"3 steps with DDP and gloo, equal weights ({time.perf_counter() - began:.0f} s)"


def _rank(rank: int, meeting: str) -> None:
    """Takes steps as one of two ranks of this machine."""
    if platform.system() == "Linux":
        os.environ[VARIABLES[0]] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=PATIENCE)
    try:
        _steps(torch.device("cpu"))
    finally:
        _leave()


def _leave() -> None:
    gc.collect()  # gloo may abort if a model outlives its group.
    dist.destroy_process_group()


def _steps(device: torch.device) -> int:
    """Takes three steps with all ranks and compares weights; returns the bytes sent in the last."""
    torch.manual_seed(0)
    model = nn.Linear(256, 256).to(device)
    ddp = DistributedDataParallel(model)
    optimizer = DistributedLion(model.named_parameters(), lr=1e-3, check_replicas_every=1)
    optimizer.attach(ddp)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        ddp(torch.randn(4, 256, generator=generator).to(device)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.detach()
    return optimizer.wire.last_bytes_sent


def _among_ranks(report: Report) -> None:
    """Prints what each rank has, takes steps with all ranks, and measures their links."""
    device = torch.device("cpu")
    backend = "gloo"
    advice = ""
    if torch.cuda.is_available():
        device = _own_gpu()
        backend = "cpu:gloo,cuda:nccl" if dist.is_nccl_available() else "gloo"
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if os.environ["RANK"] == "0":
            ranks, minutes = os.environ.get("WORLD_SIZE"), PATIENCE.total_seconds() / 60
            print(f"waiting for {ranks} ranks, for up to {minutes:g} minutes", flush=True)
        dist.init_process_group(backend, timeout=PATIENCE)
    except Exception as error:
        report.add(FAIL, "all ranks", f"cannot join them: {error}")
        report.end()
        return
    try:
        nodes = _show_ranks(report, device)
        sent = _steps(device)
        steps = f"3 steps with DDP and {dist.get_backend()}, equal weights, {sent:,} bytes per step"
        report.add(OK, "all ranks", steps)
        advice = _links(report, nodes, device if "nccl" in backend else torch.device("cpu"))
    except Exception as error:
        # This rank leaves, so collectives of the other ranks fail, and those ranks also leave.
        report.add(FAIL, "all ranks", f"{type(error).__name__}: {error}")
    report.end(advice)
    # A launcher ends all ranks with the first that fails, so rank 0 prints before any ends.
    with contextlib.suppress(RuntimeError):
        if advice:
            _sum(0.0)
    _leave()  # Outside of `except`, because the traceback keeps models alive.


def _show_ranks(report: Report, device: torch.device) -> list[str]:
    """Prints what each rank has; returns each rank's node."""
    host = socket.gethostname()
    if device.type == "cuda":
        what, memory = torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[1]
    else:
        what, memory = f"CPU, {os.cpu_count()} cores", psutil.virtual_memory().total
    # torchrun numbers nodes, which may have equal host names.
    node, has = f"{host} {os.environ.get('GROUP_RANK', '')}", f"{what}, {memory / 1e9:.0f} GB"
    mine = (node, f"{host}, {has}", _packages(), report.failed)
    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for rank, (_, shown, packages, failed) in enumerate(everyone):
        report.add(OK, f"rank {rank}", shown)
        if packages != everyone[0][2]:
            report.add(WARN, "packages", f"rank {rank} has {packages}")
        if failed and rank and dist.get_rank() == 0:
            report.add(FAIL, "rank", f"rank {rank} failed a check; its own output says which")
    return [node for node, *_ in everyone]


def _links(report: Report, nodes: list[str], device: torch.device) -> str:
    """Measures the links between neighboring nodes; returns how to predict with the slowest.

    Messages of collectives go from each rank to the next one, so these are the links that count.
    """
    size = len(nodes)
    if size == 1:
        report.add(OK, "links", "none, there is one rank")
        return ""
    ring = [(rank, (rank + 1) % size) for rank in range(size)]
    pairs = [(a, b) for a, b in ring if nodes[a] != nodes[b]]
    one_node = not pairs
    if one_node:
        report.add(WARN, "links", "all ranks are on one node, so this measures its memory")
    found = []
    for number, (a, b) in enumerate(pairs or ring, start=1):
        latency_s = min(_there_and_back_s(a, b, 1, device) for _ in range(5)) / 2
        first_s = _there_and_back_s(a, b, FIRST_BYTES, device)
        count = int(min(max(FIRST_BYTES * TIMED_S / first_s, FIRST_BYTES), MOST_BYTES))
        seconds = _there_and_back_s(a, b, count, device) - 2 * latency_s
        mbit = 8 * count / max(seconds, 1e-9) / 1e6
        link = f"rank {a} to rank {b}: {mbit:,.0f} Mbit/s"
        report.add(
            OK, f"link {number} of {len(pairs or ring)}", f"{link}, {1e3 * latency_s:.2f} ms"
        )
        found.append((mbit, link, 1e3 * latency_s))
    slowest, link, _ = min(found)
    report.add(OK, "slowest link", link)
    rate = "1gbit"
    per_node = 1
    fill_in = ", and 1gbit by your network's rate"
    if not one_node:
        latency_ms = max(latency for *_, latency in found)
        rate = f"{max(slowest, 1):.0f}mbit --efficiency 1 --latency-ms {latency_ms:.2g}"
        per_node, fill_in = max(map(nodes.count, nodes)), ""
    return (
        f"To predict whether it pays: hf-dlion plan MODEL --ranks {size} --ranks-per-node "
        f"{per_node} --link {rate}\n"
        f"Replace MODEL by a parameter count such as 7b, or by a model's folder{fill_in}."
    )


def _there_and_back_s(a: int, b: int, count: int, device: torch.device) -> float:
    """Returns the seconds of `count` bytes from rank a to b and a byte back; all ranks call it."""
    rank, seconds = dist.get_rank(), 0.0
    block = torch.zeros(count, dtype=torch.uint8, device=device)
    reply = torch.zeros(1, dtype=torch.uint8, device=device)
    _sum(0.0)
    began = time.perf_counter()
    if rank == a:
        dist.send(block, b)
        dist.recv(reply, b)
        reply.cpu()  # Waits for a GPU.
        seconds = time.perf_counter() - began
    elif rank == b:
        dist.recv(block, a)
        dist.send(reply, a)
    return _sum(seconds)


def _sum(value: float) -> float:
    """Returns the sum of every rank's value, once all ranks are here."""
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)
