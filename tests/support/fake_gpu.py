"""What a step would ask of a GPU, counted without one.

Parameters are on torch's device "meta", whose tensors have no memory: every operation on them goes
by here and is counted, none computes. The codec is the one for CUDA with kernels that only count,
and the wire hands this rank's own words back as everybody's. So nothing of it says that a kernel is
right; it says how many there are, and where the host waits for one.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hf_dlion
import hf_dlion.codec
from hf_dlion import DistributedLion
from hf_dlion.backward.background import Background
from hf_dlion.codec.cuda import launch, tables
from hf_dlion.codec.cuda.codec import TritonCodec
from hf_dlion.exchange import staged
from hf_dlion.exchange.pending import Pending
from hf_dlion.exchange.wire import Wire, WireStats
from hf_dlion.options import params

GPU = torch.device("meta")
# A clone is called hf_dlion, too, so its name alone does not tell the package from the tests.
PACKAGE = str(Path(hf_dlion.__file__).parent) + os.sep
# Allocations ask nothing of the device; torch says of views that they are such.
FREE = ("empty", "new_empty", "_reshape_alias", "_unsafe_view", "alias", "lift_fresh")
# Their result has as many elements as the data says, so the host must look.
SIZED_BY_DATA = ("nonzero", "masked_select", "unique", "_unique", "unique_consecutive")


@dataclass
class Asked:
    """What was asked of the device.

    Attributes:
        launches: How many kernels, copies and fills, by the name of each.
        places: The same by the line of the package that asked.
        waits: The lines at which the host waited, how often.
        collectives: How many messages were handed to the network.
    """

    launches: Counter[str] = field(default_factory=Counter)
    places: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    collectives: int = 0

    @property
    def launched(self) -> int:
        """All launches."""
        return self.launches.total()

    @property
    def waited(self) -> int:
        """All waits."""
        return self.waits.total()

    def note(self, name: str) -> None:
        """Counts a launch."""
        if (place := _place()) is not None:
            self.launches[name] += 1
            self.places[place] += 1

    def note_wait(self) -> None:
        """Counts a wait."""
        if (place := _place()) is not None:
            self.waits[place] += 1


def _place() -> str | None:
    """The innermost line of the package under way, None where autograd itself is at work."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE):
            line = linecache.getline(name, frame.f_lineno).strip()
            return f"{name.removeprefix(PACKAGE)}:{frame.f_lineno} {line}"
        frame = frame.f_back
    return None


class Counting(TorchDispatchMode):
    """Counts what is dispatched to `GPU`, and answers where the host asks for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = Asked()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        target = kwargs.get("device")
        here = [tensor.device == GPU for tensor in tensors]
        if not any(here) and (target is None or torch.device(target) != GPU):
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense":
            self.asked.note_wait()
            return torch.ones((), dtype=args[0].dtype, device="cpu").item()
        if name == "_to_copy" and target is not None and torch.device(target) != GPU:
            self.asked.note("copy down")
            self.asked.note_wait()
            dtype = kwargs.get("dtype") or args[0].dtype
            return torch.ones(args[0].shape, dtype=dtype, device=target)
        if name == "copy_" and not here[0]:
            self.asked.note("copy down")
            if not (kwargs.get("non_blocking") or True in args[2:]):
                self.asked.note_wait()
            return args[0].fill_(1)
        if name in SIZED_BY_DATA:
            self.asked.note(name)
            self.asked.note_wait()
            return torch.zeros((1, args[0].dim()), dtype=torch.int64, device=GPU)
        if name in ("index", "index_put_", "_index_put_impl_"):
            masks = [k for k in args[1] if k is not None and k.dtype in (torch.bool, torch.uint8)]
            if masks:
                self.asked.note(name)
                self.asked.note_wait()
                return torch.empty_like(args[0])
        # Memory that is not pinned: the copy is under way before the call is over.
        up = name in ("_to_copy", "copy_", "index", "index_put_") and not all(here)
        if up and not (kwargs.get("non_blocking") or (name == "copy_" and True in args[2:])):
            self.asked.note_wait()
        if not (func.is_view or name.startswith(FREE)):
            self.asked.note("copy up" if up else name)
        return func(*args, **kwargs)


class _Kernel:
    """A Triton kernel that is launched and does nothing."""

    def __init__(self, name: str, gpu: FakeGpu) -> None:
        self._name, self._gpu = name, gpu

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(size > 0 for size in grid), f"{self._name} on {grid}"

        def launched(*args: object, **constants: object) -> None:
            self._gpu.history.append(("launch", self._variant(constants)))
            if self._gpu.asked is not None:
                self._gpu.asked.note(f"kernel {self._name}")

        return launched

    def warmup(self, *args: object, grid: tuple[int, ...], **constants: object) -> None:
        """Compiles, or fails."""
        if self._name == self._gpu.broken:
            raise RuntimeError(f"{self._name} does not compile")
        self._gpu.history.append(("compile", self._variant(constants)))

    def _variant(self, constants: dict[str, object]) -> str:
        return f"{self._name} {sorted(constants.items())}"


class _Kernels:
    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def __getattr__(self, name: str) -> _Kernel:
        return _Kernel(name, self._gpu)


class _Done(Pending):
    """A collective that is over."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> None:
        """Does nothing: on NCCL a stream waits, not the host."""

    def get_future(self) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(self._tensor)
        return future


class EchoGroup:
    """Ranks that all say what this one does."""

    def __init__(self, members: Sequence[int], gpu: FakeGpu) -> None:
        self.members, self.gpu = tuple(members), gpu

    def connect(self, stats: WireStats, device: torch.device, neighbours: int = 0) -> Wire:
        """Returns the wire of the first of them."""
        return EchoWire(self, stats, device, neighbours)


class EchoWire(Wire):
    """A wire on which every rank sends what this one does; counted, and never sent."""

    def __init__(
        self, group: EchoGroup, stats: WireStats, device: torch.device, neighbours: int
    ) -> None:
        self.group, self._echo = cast(Any, group), group
        self.ranks, self.rank, self.world_size = group.members, 0, len(group.members)
        self.stats, self.neighbours, self._device = stats, neighbours, device
        # Control words are sent from the CPU, votes from the device.
        self._backends = {"cpu": "gloo", GPU.type: group.gpu.backend}

    def sibling(self) -> Wire:
        """As `Wire.sibling`."""
        fresh = EchoGroup(self._echo.members, self._echo.gpu)
        return fresh.connect(self.stats, self._device, self.neighbours)

    def subgroup(self, members: Sequence[int]) -> Any:
        """As `Wire.subgroup`."""
        return EchoGroup([self.ranks[rank] for rank in members], self._echo.gpu)

    def _gather(self, out: Tensor, tensor: Tensor, what: str) -> Pending:
        return self._echoed(
            out, tensor.repeat(self.world_size) if out.device != GPU else None, what
        )

    def _scatter(self, out: Tensor, tensor: Tensor, what: str) -> Pending:
        return self._echoed(out, tensor if out.device != GPU else None, what)

    def _reduce(self, tensor: Tensor, what: str) -> Pending:
        return self._echoed(
            tensor, tensor * self.world_size if tensor.device != GPU else None, what
        )

    def _spread(self, data: Tensor, source: int, what: str) -> Pending:
        return self._echoed(data, None, what)

    def _echoed(self, out: Tensor, values: Tensor | None, what: str) -> Pending:
        gpu = self._echo.gpu
        gpu.history.append(("send", what))
        if values is not None:
            out.view(-1).copy_(values.view(-1))
        elif gpu.asked is not None:
            gpu.asked.collectives += 1
        return _Done(out)


def _at_once(background: Background, task: Callable[[], None]) -> Future[None]:
    """Does what a thread is for: what is dispatched on another one is not counted."""
    future: Future[None] = Future()
    future.set_result(task())
    return future


class FakeGpu:
    """A rank whose parameters are on a GPU that is not there, among ranks that are not, either.

    Args:
        shapes: Of the parameters.
        ranks: Number of ranks.
        backend: That sends from the device; gloo cannot.
        options: Of the optimizer.

    Attributes:
        asked: What is asked in the step under way.
        history: What was compiled, launched and sent, in that order.
        broken: Name of a kernel that does not compile.
    """

    broken = ""

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        ranks: int,
        *,
        backend: str = "some",
        **options: Any,
    ) -> None:
        """Makes the parameters, in bfloat16."""
        self.backend = backend
        self.asked: Asked | None = None
        self.history: list[tuple[str, str]] = []
        self._kernels = launch.Kernels(
            triton=_Language(), **dict.fromkeys(launch.Kernels._fields[1:], _Kernels(self))
        )
        self._patched = pytest.MonkeyPatch()
        self._patch()
        self.params = [
            nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device=GPU)) for shape in shapes
        ]
        half = len(shapes) // 2
        groups = [
            {"params": self.params[:half], "weight_decay": 0.1},
            {"params": self.params[half:], "weight_decay": 0.0},
        ]
        group: Any = EchoGroup(range(ranks), self)
        self.optimizer = DistributedLion(groups, process_group=group, **options)

    def _patch(self) -> None:
        own, others = TritonCodec(self._kernels), hf_dlion.codec.codec_for

        def codec_for(device: torch.device) -> Any:
            return own if device == GPU else others(device)

        self._patch_everywhere(others, codec_for)
        # Both refuse tensors without values.
        self._patch_everywhere(params.settle_gradient, lambda param: None)
        self._patch_everywhere(params.holds_numbers, lambda value: True)
        # A copy from pinned memory, which the host does not wait for.
        self._patched.setattr(
            tables, "_on_device", lambda table, device: table.to(device, non_blocking=True)
        )
        self._patched.setattr(Background, "submit", _at_once)
        self._patched.setattr(staged, "reached", lambda device: partial(self._note_wait, device))
        # Tables of another model would be there already: here all addresses are 0.
        tables._uploaded.cache_clear()
        tables._job_of.cache_clear()

    def _note_wait(self, device: torch.device) -> None:
        if self.asked is not None and device == GPU:
            self.asked.note_wait()

    def _patch_everywhere(self, function: Any, other: Any) -> None:
        """Puts `other` in the place of a function that modules have imported by name."""
        name = function.__name__
        for place, module in list(sys.modules.items()):
            if place.startswith("hf_dlion") and getattr(module, name, None) is function:
                self._patched.setattr(module, name, other)

    def close(self) -> None:
        """Undoes what was patched."""
        self._patched.undo()

    @property
    def messages(self) -> int:
        """Messages of a step."""
        return len(self.optimizer._engine.messages)

    def step(self) -> Asked:
        """Takes a step, with another learning rate than the last one; returns what was asked.

        Of the backward pass counts what the optimizer's hooks ask.
        """
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.99
        grads = [torch.empty_like(param) for param in self.params]
        self.optimizer.zero_grad()
        with self._counting() as asked:
            torch.autograd.backward(self.params, grads)
            if self.optimizer.options.local_group is not None:
                # As DDP's buckets tell: what is averaged in the node is averaged in backward.
                self.optimizer._engine.presence.note_averaged(self.params)
            self.optimizer.step()
        return asked

    @contextlib.contextmanager
    def _counting(self) -> Iterator[Asked]:
        with Counting() as mode:
            self.asked = mode.asked
            try:
                yield mode.asked
            finally:
                self.asked = None


class _Language:
    """Triton's names of dtypes."""

    def __init__(self) -> None:
        self.tl = self

    def __getattr__(self, name: str) -> str:
        return name


# 300 tensors of 118 million elements, which make 34 messages.
SHAPES = 50 * [(512, 2048), (2048,), (2048, 512), (512,), (512, 512), (512,)]

# What is counted: ranks and options.
CASES: list[tuple[int, dict[str, Any]]] = [
    (2, {"exchange": "gather"}),
    (2, {"exchange": "two_phase"}),
    (16, {"exchange": "gather"}),
    (16, {"exchange": "two_phase"}),
    (2, {"exchange": "gather", "overlap": True}),
    (16, {"exchange": "two_phase", "overlap": True}),
    (16, {"local_group": 8}),
    (2, {"backend": "gloo"}),
    (16, {"backend": "gloo"}),
]


def asked_by(gpu: FakeGpu) -> Asked:
    """Returns what a usual step asks, after those that agree on a layout and on an order."""
    for _ in range(2):
        gpu.step()
    return gpu.step()


def main() -> None:
    """Prints a table."""
    print("| one step | launches | of them per message | host waits |\n| --- | --- | --- | --- |")
    for ranks, options in CASES:
        gpu = FakeGpu(SHAPES, ranks, **options)
        asked = asked_by(gpu)
        told = ", ".join(f"{name}={value!r}" for name, value in options.items())
        each = asked.launched // gpu.messages
        print(f"| {ranks} ranks, `{told}` | {asked.launched:,} | {each} | {asked.waited} |")
        gpu.close()


if __name__ == "__main__":
    main()
