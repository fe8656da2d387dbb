"""The library of the CPU codec: native.c, compiled at first use where there is a compiler.

It is kept in the user's cache folder, under a name made of the source, the compiler's flags and the
processor's features, so hosts that share a home folder but not a processor keep theirs apart.

`HF_DLION_NATIVE=0` in the environment leaves the compiler alone.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("native.c")
# Without traps comparisons become vector masks; no result changes.
FLAGS = (
    *("-O3", "-march=native", "-ffp-contract=off", "-fno-trapping-math"),
    *("-std=c11", "-shared", "-fPIC"),
)
ENVIRONMENT = "HF_DLION_NATIVE"


class Rule(ctypes.Structure):
    """`Rule` of native.c: the constants of a call."""

    _fields_ = (
        *((name, ctypes.c_float) for name in ("beta1", "rest1", "beta2", "rest2", "decay", "lr")),
        ("momentum_key", ctypes.c_uint32),
        ("param_key", ctypes.c_uint32),
        ("stochastic", ctypes.c_int32),
        ("fill", ctypes.c_uint64),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """Returns the compiled library, or None, and says so once, where it cannot be had."""
    if os.environ.get(ENVIRONMENT) == "0":
        return None
    try:
        found = ctypes.CDLL(str(_compiled()))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning(
            "the codec for CPU tensors could not be compiled and runs in torch and NumPy, two to "
            "five times slower (%s): install a C compiler, or set %s=0 to be content with it",
            getattr(error, "stderr", None) or error,
            ENVIRONMENT,
        )
        return None
    pointer, size, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    scale = ctypes.c_float
    rule = ctypes.POINTER(Rule)
    found.dlion_encode.argtypes = [*[pointer] * 4, *[size] * 3, scale, *[flag] * 3, rule]
    found.dlion_fold.argtypes = [pointer, size]
    found.dlion_fold.restype = ctypes.c_double
    found.dlion_measure.argtypes = [*[pointer] * 4, *[size] * 3, scale, flag, flag, rule]
    found.dlion_measure.restype = flag
    found.dlion_levels.argtypes = [*[pointer] * 4, *[size] * 3, scale, scale, *[flag] * 4, rule]
    found.dlion_levels.restype = None
    found.dlion_word_levels.argtypes = [*[pointer] * 4, *[size] * 3, scale, *[flag] * 4, rule]
    found.dlion_word_levels.restype = flag
    found.dlion_clear.argtypes = [*[pointer] * 2, *[size] * 3, flag]
    found.dlion_clear.restype = None
    found.dlion_apply.argtypes = [*[pointer] * 4, *[size] * 3, flag, rule]
    found.dlion_alone.argtypes = [*[pointer] * 3, *[size] * 2, flag, flag, rule]
    for function in (found.dlion_apply, found.dlion_alone):
        function.restype = None
    found.dlion_encode.restype = flag
    word = ctypes.c_uint64
    found.dlion_count.argtypes = [
        *(pointer, size, flag, size, flag, flag, word),
        *(pointer, size, pointer, size),
    ]
    found.dlion_count.restype = ctypes.c_int64
    found.dlion_sum.argtypes = [
        *(pointer, size, flag, size, flag, flag, word),
        *(pointer, pointer, size, pointer),
    ]
    found.dlion_sum.restype = None
    return found


def _compiled() -> Path:
    """Returns the path of the library, compiled unless it is there already."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise OSError("no C compiler found")
    source = SOURCE.read_bytes()
    identity = (source, compiler, FLAGS, platform.machine(), _features())
    name = hashlib.blake2b(repr(identity).encode(), digest_size=12).hexdigest()
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    target = base / "hf_dlion" / f"native-{name}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            built = Path(folder, target.name)
            command = [*compiler.split(), *FLAGS, str(SOURCE), "-o", str(built)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
            # Whole or not at all, whichever of the ranks comes first.
            os.replace(built, target)
    return target


def _features() -> str:
    """Returns what tells processors apart for which -march=native makes different code."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
