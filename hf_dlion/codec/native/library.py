"""The library of the CPU codec: native.c, compiled at first use where there is a compiler.

It is kept in the user's cache folder, under a name made of the source, the compiler's flags and the
processor's features, so hosts that share a home folder but not a processor keep theirs apart. It
ends in a hash of the rest: loading a torn one would kill the process.

What is loaded runs as this user. So folder and library must belong to this user, and nobody else
may write to them; what is checked is what is loaded, whoever renames folders above it meanwhile.

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
import stat
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
TIMEOUT_S = 180.0
HASH_BYTES = 32
ELSEWHERE = "set XDG_CACHE_HOME to a folder of this user alone"


class Rule(ctypes.Structure):
    """`Rule` of native.c: the constants of a call."""

    _fields_ = (
        *((name, ctypes.c_float) for name in ("beta1", "rest1", "beta2", "rest2", "decay", "lr")),
        ("momentum_key", ctypes.c_uint32),
        ("param_key", ctypes.c_uint32),
        ("stochastic", ctypes.c_int32),
        ("fill", ctypes.c_uint64),
    )


class Unfit(OSError):
    """A library in the cache that must not be loaded, but may be replaced."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """Returns the compiled library, or None, and says so once, where it cannot be had."""
    if os.environ.get(ENVIRONMENT) == "0":
        return None
    try:
        return _found()
    except Exception as error:  # Whatever it is: the codec in torch gives the same bits.
        logger.warning(
            "the compiled codec for CPU tensors cannot be had, and they are encoded and applied in "
            "torch and NumPy, two to five times slower (%s: %s); mend that, or set %s=0 to be "
            "content with it",
            type(error).__name__,
            error,
            ENVIRONMENT,
        )
        return None


def _found() -> ctypes.CDLL:
    """Returns the library, compiled unless it is there already."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise OSError("no C compiler found: install a C compiler")
    source = SOURCE.read_bytes()
    identity = (source, compiler, FLAGS, platform.machine(), _features(), HASH_BYTES)
    name = hashlib.blake2b(repr(identity).encode(), digest_size=12).hexdigest()
    target = _folder() / f"native-{name}.so"
    try:
        return _loaded(target)
    except FileNotFoundError:
        pass
    except Unfit as error:
        logger.warning("%s; it is compiled anew", error)
    _compile(compiler, target)
    return _loaded(target)


def _folder() -> Path:
    """Returns the cache folder, made if there is none; nobody else may write to it.

    Raises:
        OSError: If there is none.
    """
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise OSError(f"{error} {ELSEWHERE}") from error
    folder = base / "hf_dlion"
    for missing in reversed([path for path in (folder, *folder.parents) if not path.is_dir()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    # A link of another user's could lead to any folder of this user's.
    for status in (folder.lstat(), folder.stat()):
        if status.st_uid != os.geteuid():
            raise PermissionError(f"{folder} {_owner(status)}: {ELSEWHERE}")
    if folder.stat().st_mode & 0o022:
        folder.chmod(0o700)
    if folder.stat().st_mode & 0o022:
        raise PermissionError(f"other users may write to {folder}: {ELSEWHERE}")
    return folder


def _loaded(path: Path) -> ctypes.CDLL:
    """Loads a library that only this user can have written, and that is whole.

    Raises:
        FileNotFoundError: If there is none.
        Unfit: If it is not such a one.
        OSError: If it is, and cannot be loaded.
    """
    try:
        file = open(path, "rb", opener=_without_following)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Unfit(f"{path} cannot be read ({error.strerror})") from error
    with file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid():
            raise Unfit(f"{path} {_owner(status)}")
        if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o022:
            raise Unfit(f"{path} is no file that only this user may write to")
        content = file.read()
        if content[-HASH_BYTES:] != _hash(content[:-HASH_BYTES]):
            raise Unfit(f"{path} is damaged")
        # By its descriptor: under its name there may be another one by now.
        opened = f"/proc/self/fd/{file.fileno()}"
        try:
            return _declared(ctypes.CDLL(opened if os.path.exists(opened) else str(path)))
        except (OSError, AttributeError) as error:
            raise OSError(f"{path} cannot be used ({error}): delete it") from error


def _without_following(path: str, flags: int) -> int:
    """Opens no link, and does not wait for who writes to a FIFO."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _owner(status: os.stat_result) -> str:
    return f"belongs to user {status.st_uid}, and this process to user {os.geteuid()}"


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=HASH_BYTES).digest()


def _compile(compiler: str, target: Path) -> None:
    """Compiles the library.

    Raises:
        OSError: If that fails.
    """
    with tempfile.TemporaryDirectory(dir=target.parent, ignore_cleanup_errors=True) as folder:
        built = Path(folder, target.name)
        command = [*compiler.split(), *FLAGS, str(SOURCE), "-o", str(built)]
        try:
            subprocess.run(
                command,
                check=True,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                # Compilers may speak another encoding than Python.
                errors="replace",
                timeout=TIMEOUT_S,
                # /tmp may be full, or not there.
                env={**os.environ, "TMPDIR": folder},
            )
            content = built.read_bytes()
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", None) or str(error))[:2000]
            raise OSError(
                f"the C compiler {compiler!r} failed ({said}): install a C compiler, or set CC to "
                f"one that works"
            ) from error
        built.write_bytes(content + _hash(content))
        built.chmod(0o700)
        # Whole or not at all, whichever of the ranks comes first.
        os.replace(built, target)


def _declared(found: ctypes.CDLL) -> ctypes.CDLL:
    """Returns the library with the types of its functions."""
    pointer, size, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    scale = ctypes.c_float
    rule = ctypes.POINTER(Rule)
    found.dlion_encode.argtypes = [*[pointer] * 4, *[size] * 3, scale, *[flag] * 3, rule]
    found.dlion_fold.argtypes = [pointer, size]
    found.dlion_fold.restype = ctypes.c_double
    found.dlion_measure.argtypes = [*[pointer] * 4, *[size] * 3, scale, flag, flag, rule]
    found.dlion_measure.restype = flag
    found.dlion_levels.argtypes = [*[pointer] * 3, *[size] * 2, scale, scale, *[flag] * 4, rule]
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


def _features() -> str:
    """Returns what tells processors apart for which -march=native makes different code."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
