"""What becomes of the compiled library where it cannot be built, kept, trusted or loaded."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_dlion.codec.native import library as native_library

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
CC = shutil.which("cc") or shutil.which("gcc")
pytestmark = pytest.mark.skipif(CC is None, reason="there is no C compiler")

STRANGER = 4711


def compiled(path: Path, source: str) -> Path:
    """Compiles a library of some lines of C."""
    command = [str(CC), "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True)
    return path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with the functions of native.c, compiled in no time."""
    source = native_library.SOURCE.read_text()
    names = dict.fromkeys(word.split("(")[0] for word in source.split() if "dlion_" in word)
    lines = [
        f"void {name.lstrip('*')}(void) {{}}" for name in names if name.lstrip("*").isidentifier()
    ]
    return compiled(tmp_path_factory.mktemp("built") / "library.so", "\n".join(lines))


@pytest.fixture(autouse=True)
def compiler(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a shell script the compiler, to which $built is a library, and $out where one goes."""

    def make(script: str) -> None:
        path = tmp_path / "compiler"
        path.write_text(f'#!/bin/sh\nbuilt="{built}"\nfor out; do :; done\n{script}\n')
        path.chmod(0o755)
        monkeypatch.setenv("CC", str(path))

    make('echo >> "$0.calls"; cp "$built" "$out"')
    return make


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package's folder in a cache that is not there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hf_dlion"


SCRIPT = """
import ctypes, importlib.util, logging, os, pathlib, pwd, sys
logging.basicConfig()
spec = importlib.util.spec_from_file_location("library", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
exec(sys.argv[2])
print("nothing" if module.library() is None else "")
"""


def found(before: str = "") -> str:
    """Returns what a new process says that looks for the library: nothing, if it finds it."""
    # By the file alone, for which a process takes no second.
    command = [sys.executable, "-c", SCRIPT, native_library.__file__, before]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr or done.returncode
    return (done.stdout + done.stderr).strip()


def has_fallen_back(text: str) -> bool:
    """Returns whether a process found nothing, and said so once."""
    return text.startswith("nothing\n") and text.count("WARNING") == 1 and "Traceback" not in text


def times_compiled(tmp_path: Path) -> int:
    path = tmp_path / "compiler.calls"
    return len(path.read_text().splitlines()) if path.exists() else 0


def kept_in(cache: Path) -> Path:
    (path,) = cache.iterdir()
    return path


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_folder_and_the_library_are_the_user_s_alone(cache: Path, tmp_path: Path) -> None:
    assert found("os.umask(0)") == ""
    assert [mode_of(path) for path in (cache.parent, cache, kept_in(cache))] == [0o700] * 3
    assert found() == ""
    assert times_compiled(tmp_path) == 1


NO_HOME = """
def getpwuid(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")
pwd.getpwuid = getpwuid
os.environ.pop("HOME", None)
os.environ.pop("XDG_CACHE_HOME", None)
"""


@pytest.mark.parametrize(
    ("before", "told"),
    [
        (NO_HOME, "Could not determine home directory"),
        ("os.environ['XDG_CACHE_HOME'] = '/proc/nowhere'", "/proc/nowhere"),
        ("pathlib.Path(os.environ['XDG_CACHE_HOME']).touch()", "File exists"),
        ("cache.mkdir(); (cache / 'hf_dlion').touch()", "File exists"),
        ("cache.mkdir(); (cache / 'hf_dlion').symlink_to('hf_dlion')", "File exists"),
        ("cache.mkdir(); (cache / 'hf_dlion').symlink_to('gone')", "File exists"),
        ("os.environ.pop('CC'); os.environ['PATH'] = ''", "no C compiler found"),
        ("os.environ['CC'] = 'no-such-compiler'", "No such file or directory: 'no-such-compiler'"),
        ("module.TIMEOUT_S = 0.2; os.environ['CC'] += ' hang'", "timed out after 0.2 seconds"),
        ("module.SOURCE = pathlib.Path('gone.c')", "gone.c"),
        ("os.geteuid = lambda: 4711; cache.mkdir(); (cache / 'hf_dlion').mkdir()", "user 4711"),
        (
            "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))",
            "limit exceeded",
        ),
    ],
    ids=[
        *("no home", "unwritable", "a file for a cache", "a file for a folder", "a loop"),
        *("a link to nowhere", "no compiler", "another compiler", "a compiler that hangs"),
        *("no source", "a stranger's", "a full disk"),
    ],
)
def test_where_nothing_can_be_built_one_warning_names_the_cause(
    cache: Path, compiler: Callable[[str], None], before: str, told: str
) -> None:
    compiler('case "$1" in hang) sleep 5;; *) cp "$built" "$out";; esac')
    text = found(f"cache = pathlib.Path(os.environ['XDG_CACHE_HOME'])\n{before}")
    assert has_fallen_back(text), text
    assert told in text
    assert "HF_DLION_NATIVE=0" in text


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo internal error >&2; exit 1", "internal error"),
        ("printf 'erreur: m\\351moire' >&2; exit 1", "erreur: m\ufffdmoire"),
        ("exit 1", "exit status 1"),
        ("exit 0", "No such file or directory"),
        ('touch "$out"', "file too short"),
        ('head -c 2000 /dev/zero > "$out"', "invalid ELF header"),
        ('cp "$built" "$out"; printf "\\267" | dd of="$out" bs=1 seek=18 conv=notrunc', "cannot"),
        ('cp "$built.other" "$out"', "undefined symbol: dlion_"),
        ('cp "$built" "$out"; chmod 0 "$out"; kill -9 $$', "died with"),
    ],
    ids=[
        *("an error", "in Latin-1", "without a word", "nothing made", "empty", "no library"),
        *("another machine's", "another library", "killed"),
    ],
)
def test_a_compiler_that_fails_is_told_of_in_one_warning(
    cache: Path, compiler: Callable[[str], None], built: Path, script: str, told: str
) -> None:
    compiled(built.with_name("library.so.other"), "void other(void) {}")
    compiler(script)
    text = found()
    assert has_fallen_back(text), text
    assert told in text


def test_the_compiler_needs_no_folder_for_its_own_files(
    cache: Path, compiler: Callable[[str], None]
) -> None:
    compiler('test -w "$TMPDIR" && cp "$built" "$out"')
    assert found("os.environ['TMPDIR'] = '/nowhere'; module.tempfile.tempdir = '/nowhere'") == ""


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def zeroed(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
    path.write_bytes(content)


def a_link(path: Path) -> None:
    path.symlink_to(path.rename(path.parents[2] / "library.so"))


def a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "damage",
    [
        torn,
        zeroed,
        a_link,
        a_fifo,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"something else"),
        lambda path: path.chmod(0o777),
        lambda path: path.chmod(0o720),
    ],
    ids=["torn", "zeroed", "link", "fifo", "empty", "no library", "writable", "by the group"],
)
def test_what_should_not_be_loaded_is_compiled_anew_and_told_of(
    cache: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    assert found() == ""
    damage(kept_in(cache))
    text = found()
    assert text.count("WARNING") == 1, text
    assert str(kept_in(cache)) in text
    assert "it is compiled anew" in text
    assert "nothing" not in text
    assert found() == ""
    assert times_compiled(tmp_path) == 2
    assert mode_of(kept_in(cache)) == 0o700


def planted(path: Path, tmp_path: Path) -> Path:
    """Puts a library in the place of one; returns a file that is there once it was loaded."""
    mark = tmp_path / "was-here"
    source = f"""
        #include <stdio.h>
        __attribute__((constructor)) void run(void) {{ fclose(fopen("{mark}", "w")); }}
    """
    path.unlink()
    compiled(path, source)
    content = path.read_bytes()
    path.write_bytes(content + native_library._hash(content))
    path.chmod(0o755)
    return mark


@needs_root
def test_a_library_that_another_user_planted_is_not_loaded(cache: Path, tmp_path: Path) -> None:
    assert found() == ""
    cache.chmod(0o777)
    mark = planted(kept_in(cache), tmp_path)
    os.chown(kept_in(cache), STRANGER, STRANGER)
    text = found()
    assert not mark.exists()
    assert f"{kept_in(cache)} belongs to user {STRANGER}" in text
    assert "it is compiled anew" in text
    assert found() == ""
    assert kept_in(cache).stat().st_uid == os.geteuid()
    assert mode_of(cache) == 0o700


@needs_root
@pytest.mark.parametrize("what", ["a folder", "a link"])
def test_a_folder_that_another_user_planted_is_not_used(
    cache: Path, tmp_path: Path, what: str
) -> None:
    assert found() == ""
    mark = planted(kept_in(cache), tmp_path)
    if what == "a folder":
        os.chown(cache, STRANGER, STRANGER)
    else:
        target = cache.rename(tmp_path / "another folder")
        cache.symlink_to(target)
        os.lchown(cache, STRANGER, STRANGER)
    text = found()
    assert has_fallen_back(text), text
    assert f"{cache} belongs to user {STRANGER}" in text
    assert "set XDG_CACHE_HOME to a folder of this user alone" in text
    assert not mark.exists()


def test_a_library_that_takes_the_place_of_the_checked_one_is_not_loaded(
    cache: Path, tmp_path: Path
) -> None:
    assert found() == ""
    other = shutil.copytree(cache, tmp_path / "other")
    mark = planted(kept_in(other), tmp_path)
    swap = f"""
def swapped(name, open=ctypes.CDLL):
    os.rename({str(cache)!r}, {str(tmp_path / "away")!r})
    os.rename({str(other)!r}, {str(cache)!r})
    return open(name)
ctypes.CDLL = swapped
"""
    assert found(swap) == ""
    assert not mark.exists()
    assert not other.exists()


def test_a_cache_in_a_folder_that_everybody_writes_to_is_used(cache: Path) -> None:
    cache.parent.mkdir(mode=0o777)
    cache.parent.chmod(0o1777)
    assert found() == ""
    assert found() == ""


def test_a_folder_of_one_s_own_may_be_elsewhere(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    cache.parent.mkdir()
    cache.symlink_to(tmp_path / "elsewhere")
    assert found() == ""
    assert mode_of(tmp_path / "elsewhere") & 0o022 == 0
    assert len(list((tmp_path / "elsewhere").iterdir())) == 1


def test_ranks_that_compile_at_once_all_find_a_library(
    cache: Path, compiler: Callable[[str], None]
) -> None:
    compiler('head -c 4000 "$built" > "$out"; sleep 0.2; cp "$built" "$out"')
    command = [sys.executable, "-c", SCRIPT, native_library.__file__, ""]
    ranks = []
    for _ in range(4):
        ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
        time.sleep(0.05)
    assert [rank.communicate(timeout=60)[0].strip() for rank in ranks] == [b""] * 4
    assert [rank.returncode for rank in ranks] == [0] * 4
    kept_in(cache)
