"""The compiled codec: how it is built, kept, shared among threads, and done without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_dlion.codec import codec_for
from hf_dlion.codec.cpu import CpuCodec
from hf_dlion.codec.layout import words_for
from hf_dlion.codec.native import codec as native
from hf_dlion.codec.native import library as native_library
from hf_dlion.codec.native.codec import NativeCodec
from hf_dlion.codec.rule import StepRule, TensorRule

needs_compiler = pytest.mark.skipif(
    native_library.library() is None, reason="there is no C compiler"
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a library that is looked up anew."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native_library, "library", native_library.library.__wrapped__)
    return tmp_path / "hf_dlion"


@pytest.mark.full
@needs_compiler
def test_the_library_is_compiled_once_and_kept(cache: Path) -> None:
    assert native_library.library() is not None
    (built,) = cache.iterdir()
    written = built.stat().st_mtime_ns
    assert native_library.library() is not None
    assert list(cache.iterdir()) == [built]
    assert built.stat().st_mtime_ns == written


@pytest.mark.long
@needs_compiler
def test_other_flags_and_processors_have_a_library_of_their_own(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert native_library.library() is not None
    monkeypatch.setattr(native_library, "_features", lambda: "another processor")
    assert native_library.library() is not None
    monkeypatch.setattr(native_library, "FLAGS", (*native_library.FLAGS, "-g"))
    assert native_library.library() is not None
    assert len(list(cache.iterdir())) == 3


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_the_eager_codec_works_and_says_so(
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    compiler: str,
) -> None:
    monkeypatch.setenv("CC", compiler)
    assert native_library.library() is None
    assert "install a C compiler" in caplog.text
    assert not cache.exists() or not list(cache.iterdir())


def test_the_environment_turns_it_off(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DLION_NATIVE", "0")
    assert native_library.library() is None
    assert not cache.exists()
    assert type(codec_for(torch.device("cpu"))) is CpuCodec


@pytest.mark.full
@needs_compiler
@pytest.mark.long
@pytest.mark.slow
def test_processes_that_compile_at_once_all_get_a_whole_library(tmp_path: Path) -> None:
    script = "from hf_dlion.codec.native.library import library; assert library() is not None"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    processes = [
        subprocess.Popen([sys.executable, "-c", script], env=environment) for _ in range(3)
    ]
    assert [process.wait(120) for process in processes] == [0, 0, 0]
    assert len(list((tmp_path / "hf_dlion").iterdir())) == 1


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_threads_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bits: int
) -> None:
    found = native_library.library()
    assert found is not None
    codec = NativeCodec(found)
    step = StepRule(
        step=2,
        rank=0,
        world_size=2,
        aggregation="majority",
        ties="alternate",
        stochastic_rounding=True,
        seed=1,
        bits=bits,
    )
    rule = TensorRule(step_rule=step, index=0, lr=0.1, betas=(0.9, 0.99), weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(37, 41, generator=generator).to(dtype)
    grad[3] = grad[30] = 0
    results = []
    for threads in (1, 3):
        monkeypatch.setattr(native, "PART", 64)
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        exp_avg, param = torch.zeros_like(grad), grad.clone()
        words = torch.zeros(bits * words_for(grad.numel()), dtype=torch.int64)
        active = torch.zeros(37, dtype=torch.bool)
        codec.encode(grad, exp_avg, words, active, rule)
        codec.step_alone(param, grad, exp_avg, rule)
        results.append((exp_avg, words, active, param))
    assert (~results[0][2]).nonzero().view(-1).tolist() == [3, 30]
    assert all(map(torch.equal, *results))
