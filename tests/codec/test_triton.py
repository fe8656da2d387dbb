"""The Triton kernels without a GPU: interpreted against the definition, compiled, done without."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_dlion.codec import codec_for
from hf_dlion.codec.codec import PROBED
from hf_dlion.codec.cuda import launch as cuda_kernels
from hf_dlion.codec.cuda import tables
from hf_dlion.codec.cuda.codec import TritonCodec
from hf_dlion.codec.eager import EagerCodec
from hf_dlion.codec.levels import LEVELS
from tests.support.machine_code import registers, shortest_path

HERE = Path(__file__).parent
CUDA = torch.device("cuda")

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("triton is imported as an interpreter", allow_module_level=True)


@pytest.mark.full
@pytest.mark.parametrize(
    "selection",
    [
        ["test_codec.py", "-k", "triton"],
        ["test_levels.py", "-k", "triton"],
        pytest.param(["interpreted_triton.py"], marks=pytest.mark.long),
        ["interpreted_tally.py"],
    ],
    ids=str,
)
@pytest.mark.slow
@pytest.mark.parametrize("share", [40, pytest.param(1, marks=pytest.mark.long)])
def test_interpreted_kernels_equal_the_reference(selection: list[str], share: int) -> None:
    # Triton decides when it is imported whether it interprets, so that this takes a process.
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    # It computes with NumPy, which warns where a GPU just returns Inf.
    done = subprocess.run(
        [
            *(*command, "-W", "ignore:overflow encountered:RuntimeWarning"),
            *("-W", "ignore:invalid value encountered in multiply:RuntimeWarning", *selection),
        ],
        cwd=HERE,
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_DLION_EXAMPLES_SHARE": str(share),
        },
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert re.search(r"\d+ passed", done.stdout)


POINTERS = {
    **dict.fromkeys(("jobs", "constants", "sums", "following", "row_numels", "sharing"), "*i64"),
    **dict.fromkeys(("received", "planes"), "*i64"),
    **dict.fromkeys(("job_of", "row_bits", "counts"), "*i32"),
    **dict.fromkeys(("votes", "zeros"), "*u32"),
    **dict.fromkeys(("zeros_in", "active", "everyone", "finite"), "*u8"),
    **dict.fromkeys(("scale", "magnitudes", "factors"), "*fp64"),
}


def compiled(kernel: Any, pointers: dict[str, str] | None = None, **constants: Any) -> str:
    """The PTX of a kernel for a Hopper GPU, which no GPU is needed to make."""
    ptx: str = made_of(kernel, pointers, cuda_kernels.WARPS, **constants)["ptx"]
    return ptx


def made_of(
    kernel: Any, pointers: dict[str, str] | None, warps: int, **constants: Any
) -> dict[str, Any]:
    """What the compiler makes of a kernel for a Hopper GPU, by the name of the form."""
    compiler = pytest.importorskip("triton.backends.nvidia.compiler")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    if not hasattr(compiler, "CUDABackend"):
        pytest.skip("this triton has no compiler for CUDA")
    types = {name: POINTERS.get(name, "i64") for name in kernel.arg_names}
    types |= dict.fromkeys(("key", "stream", "phase", "world_size", "ranks", "copies"), "i32")
    types |= (pointers or {}) | dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        fn=kernel,
        signature={name: types[name] for name in kernel.arg_names},
        constexprs=constants,
    )
    options = {"enable_fp_fusion": False, "num_warps": warps}
    made = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    forms: dict[str, Any] = made.asm
    return forms


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = cuda_kernels.kernels(torch.device("cpu"))
    assert found is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield found


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_compiled_kernels_round_every_operation_by_itself(kernels: Any, dtype: str) -> None:
    language = kernels.triton.tl
    kind = getattr(language, dtype)
    wide = language.float64 if dtype == "float64" else language.float32
    common = {"WIDE": wide, "STOCHASTIC": True, "ALIGNED": True, "BLOCK": 2048}
    encoding = {"GRAD": kind, "AVG": kind, "ADVANCE": True, "VOTE": True, "SCALED": True}
    made = {
        "encode": compiled(kernels.codec.encode, **common, **encoding),
        "step_alone": compiled(kernels.codec.step_alone, **common, PARAM=kind, GRAD=kind, AVG=kind),
        "apply": compiled(kernels.codec.apply, **common, PARAM=kind, AVERAGE=False, PLANES=2),
        "average": compiled(kernels.codec.apply, **common, PARAM=kind, AVERAGE=True, PLANES=2),
    }
    width = 64 if dtype == "float64" else 32
    for name, ptx in made.items():
        assert f"mul.rn.f{width}" in ptx, name
        # Only a product that says how it is rounded is safe from being fused later.
        assert not re.search(r"\b(fma|mad)\.\w*\.?f(32|64)|\bmul\.f|\badd\.f|\bsub\.f", ptx), name
        assert not re.search(r"\.ftz|\.approx|div\.full", ptx), name
        if dtype != "float64":
            assert "ld.global.v4.b32" in ptx, f"{name}: loads of 16 bytes"
            assert "st.global.v4.b32" in ptx, f"{name}: stores of 16 bytes"
    assert f"div.rn.f{width}" in made["average"]


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "bits"), [("float32", 2), ("bfloat16", 4), ("float64", 8)])
def test_the_kernels_of_more_bits_compile(kernels: Any, dtype: str, bits: int) -> None:
    language, levels = kernels.triton.tl, kernels.levels
    kind = getattr(language, dtype)
    wide = language.float64 if dtype == "float64" else language.float32
    common = {"GRAD": kind, "AVG": kind, "WIDE": wide, "STOCHASTIC": True, "ALIGNED": True}
    common |= {"SCALED": True, "BLOCK": tables.BLOCK}
    top = torch.finfo(getattr(torch, dtype if dtype == "float64" else "float32")).max
    code = {"BITS": bits, "LARGEST": LEVELS[bits].largest}
    made = [
        compiled(levels.encode_levels, **common, **code, TOP=top, ADVANCE=True, MEASURED=measured)
        for measured in (False, True)
    ]
    made.append(compiled(levels.measure, {"sums": "*fp64"}, **common))
    for ptx in made:
        assert not re.search(r"\b(fma|mad)\.\w*\.?f(32|64)|\bmul\.f|\badd\.f|\bsub\.f", ptx)
        assert not re.search(r"\.ftz|\.approx|div\.full", ptx)
    compiled(levels.clear_levels, BITS=bits, BLOCK=tables.BLOCK)
    for zero in (False, True):
        flags = {"ZERO": zero, "SPACING": LEVELS[bits].spacing, "BLOCK": tables.BLOCK}
        assert "atom" in compiled(levels.sum_levels, {"out": "*u32"}, **code, **flags)
    compiled(kernels.edges.hear, {"words": "*u32"}, BITS=bits, BLOCK=tables.BLOCK)


@pytest.mark.full
@pytest.mark.parametrize("planes", [1, 2])
def test_the_kernels_that_count_compile(kernels: Any, planes: int) -> None:
    block = {"BLOCK": tables.BLOCK}
    for average, zero in ((False, False), (False, True), (True, False)):
        flags = {"AVERAGE": average, "ZERO": zero, "DIGITS": 1 + planes}
        assert "atom" in compiled(kernels.count.count, {"out": "*u32"}, **flags, **block)
    whole = {"words": "*i64", "out": "*i64"}
    compiled(kernels.tally.pack_votes, whole, **block)
    flags = {"DIGITS": planes, "SUMS": planes, **block}
    compiled(kernels.tally.pack_verdict, {"out": "*i64"}, PLANES=planes, COPY=planes > 1, **flags)
    compiled(kernels.tally.unpack_verdict, **flags)
    compiled(kernels.codec.clear, **block)
    compiled(kernels.edges.tell, {"out": "*u8", "told": "*i64"}, **block)
    compiled(kernels.edges.hear, {"words": "*u32"}, BITS=1, **block)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_the_kernels_that_look_at_gradients_compile(kernels: Any, dtype: str) -> None:
    language, gradients = kernels.triton.tl, kernels.gradients
    kind, wide = getattr(language, dtype), "float64" if dtype == "float64" else "float32"
    types = {"GRAD": kind, "WIDE": getattr(language, wide), "ALIGNED": True}
    for scaled in (False, True):
        ptx = compiled(gradients.check, **types, SCALED=scaled, BLOCK=tables.BLOCK)
        assert not re.search(r"\b(fma|mad)\.\w*\.?f32|\.ftz|\.approx", ptx)
        if dtype != "float64":
            assert "ld.global.v4.b32" in ptx
    compiled(gradients.prepare, BLOCK=tables.BLOCK)
    compiled(gradients.probe, GRAD=kind, PROBED=PROBED, BLOCK=tables.BLOCK)


# With stochastic rounding there are so many that they may well take longer than the memory does.
@pytest.mark.full
@pytest.mark.parametrize(
    ("kernel", "dtype", "most_registers", "most_instructions"),
    [
        ("encode", "bfloat16", 104, 60),
        ("apply", "bfloat16", 80, 41),
        ("apply", "float32", 80, 24),
    ],
)
def test_kernels_are_short_where_a_block_lies_in_one_row(
    kernels: Any,
    tmp_path: Path,
    kernel: str,
    dtype: str,
    most_registers: int,
    most_instructions: float,
) -> None:
    language = kernels.triton.tl
    kind = getattr(language, dtype)
    flags = {"WIDE": language.float32, "STOCHASTIC": True, "ALIGNED": True, "BLOCK": tables.BLOCK}
    if kernel == "encode":
        flags |= {"GRAD": kind, "AVG": kind, "ADVANCE": True, "VOTE": True, "SCALED": False}
    else:
        flags |= {"PARAM": kind, "AVERAGE": False, "PLANES": 1}
    warps = cuda_kernels.WARPS
    cubin = tmp_path / "cubin"
    cubin.write_bytes(made_of(getattr(kernels.codec, kernel), None, warps, **flags)["cubin"])
    assert registers(cubin) <= most_registers
    assert shortest_path(cubin) * warps * 32 / tables.BLOCK <= most_instructions


@pytest.fixture
def afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are looked up anew."""
    monkeypatch.setattr(cuda_kernels, "kernels", cuda_kernels.kernels.__wrapped__)


@pytest.mark.usefixtures("afresh")
def test_cuda_tensors_get_the_triton_codec() -> None:
    assert type(codec_for(CUDA)) is TritonCodec


@pytest.mark.usefixtures("afresh")
def test_the_environment_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DLION_TRITON", "0")
    assert type(codec_for(CUDA)) is EagerCodec


@pytest.mark.usefixtures("afresh")
def test_without_triton_the_eager_codec_works_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("triton", "hf_dlion.codec.cuda.triton_kernels", "hf_dlion.codec.cuda.triton"):
        monkeypatch.setitem(sys.modules, name, None)
    assert type(codec_for(CUDA)) is EagerCodec
    assert "install triton" in caplog.text


@pytest.mark.usefixtures("afresh")
def test_a_triton_that_cannot_launch_is_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda_kernels, "_try_out", fail)
    assert type(codec_for(CUDA)) is EagerCodec
    assert "Failed to find C compiler" in caplog.text
