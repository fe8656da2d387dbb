"""A GPU made of CPU memory, on which the package's form for other devices runs without a GPU.

Importing this module adds the device, unless there is a GPU. An operation on its tensors runs on
the CPU tensors in which they are kept, and is refused if it also has a tensor on the CPU, as CUDA
refuses it.
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

import hf_dlion

NAME = "fakegpu"
DEVICE = "cuda" if torch.cuda.is_available() else NAME


class _Module(_DummyBackendModule):
    """What `torch.cuda` is for CUDA."""

    def device(self, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext()


_PACKAGE = str(Path(hf_dlion.__file__).parent) + os.sep
# For which the host would wait for a GPU: the functions of the package, such as "idle_rows.survey".
waits: list[str] = []
# Only these may have tensors on two devices.
_COPY = torch.ops.aten.copy_.default
_COPIES = (_COPY, torch.ops.aten._to_copy.default)
_READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


class FakeTensor(Tensor):
    """A tensor of the fake GPU, whose elements are in the CPU tensor `kept`."""

    kept: Tensor

    @staticmethod
    def __new__(cls, kept: Tensor) -> FakeTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            kept.size(),
            strides=kept.stride(),
            storage_offset=kept.storage_offset(),
            dtype=kept.dtype,
            device=torch.device(NAME, 0),
        )
        made.kept = kept
        return made

    def __repr__(self) -> str:
        return f"FakeTensor({self.kept})"

    def __deepcopy__(self, memo: Any) -> FakeTensor:
        return FakeTensor(self.kept.clone())

    def data_ptr(self) -> int:
        return self.kept.data_ptr()

    def tolist(self) -> Any:
        _wait()
        return self.kept.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_cpu = [leaf for leaf in leaves if not isinstance(leaf, FakeTensor) and leaf.dim()]
        if on_cpu and func not in _COPIES:
            raise RuntimeError(f"{func} got tensors on cpu and on {NAME}")
        args, kwargs = tree_map(_kept, (args, kwargs or {}))
        if func in _READS or (func is _COPY and on_cpu and not (len(args) > 2 and args[2])):
            _wait()
        to_cpu = "device" in kwargs and torch.device(kwargs["device"] or "cpu").type == "cpu"
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        made = func(*args, **kwargs)
        if to_cpu:
            _wait()
            return made
        known = {id(leaf.kept): leaf for leaf in leaves if isinstance(leaf, FakeTensor)}
        return tree_map(
            lambda x: known.get(id(x), FakeTensor(x)) if isinstance(x, Tensor) else x, made
        )


def _wait() -> None:
    frame: Any = sys._getframe(1)
    while frame and not frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    if frame:
        waits.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}")


def _kept(x: Any) -> Any:
    return x.kept if isinstance(x, FakeTensor) else x


def _empty(size: Any, *, dtype: Any = None, **_: Any) -> FakeTensor:
    return FakeTensor(torch.empty(size, dtype=dtype))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> FakeTensor:
    return FakeTensor(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    if not non_blocking:
        _wait()
    _kept(target).copy_(_kept(source))
    return target


if DEVICE == NAME:  # torch prefers such a device to CUDA, as where it pins memory.
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    _library = torch.library.Library("aten", "IMPL")
    _library.impl("empty.memory_format", _empty, "PrivateUse1")
    _library.impl("empty_strided", _empty_strided, "PrivateUse1")
    _library.impl("_copy_from", _copy_from, "PrivateUse1")
