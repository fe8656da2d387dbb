"""The forms of a step's work: on a CPU, and with torch operations or kernels on a GPU.

Without a GPU, a device made of CPU memory takes its place, with Triton's interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import triton.runtime.interpreter as interpreter

import hf_dlion.gpu.form
from hf_dlion.gpu import launches
from tests.support.fake_gpu import DEVICE


@contextmanager
def form(name: str) -> Iterator[str]:
    """Takes a form, "cpu", "eager", or "kernels", and yields its device.

    Raises:
        AssertionError: If kernels were launched in another form, or none in theirs.
    """
    switch = {hf_dlion.gpu.form.SWITCH: str(int(name == "kernels"))}
    devices = mock.patch.object(hf_dlion.gpu.form, "DEVICES", (DEVICE,))
    spied = mock.patch.object(launches, "launch", wraps=launches.launch)
    with devices, mock.patch.dict(os.environ, switch), spied as launch:
        yield "cpu" if name == "cpu" else DEVICE
    assert launch.called == (name == "kernels")


def _fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    """Rounds once, as a GPU does; the interpreter rounds twice."""
    wide = x.data.astype(np.longdouble) * y.data + z.data
    return interpreter.TensorHandle(wide.astype(x.data.dtype), z.dtype.scalar)


interpreter.InterpreterBuilder.create_fma = _fma

_patch_lang, _patched = interpreter._patch_lang, set[int]()


def _patch_once(function: Any) -> Any:
    """Patches triton.language for good, which the interpreter does in each call of a function."""
    if id(function.__globals__) not in _patched:
        _patched.add(id(function.__globals__))
        _patch_lang(function)
    return interpreter._LangPatchScope()


interpreter._patch_lang = _patch_once
# Hashes overflow; looking for it takes half of the time.
interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
