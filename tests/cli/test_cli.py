"""The command line understands what people write, and says what it does not understand."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from unittest import mock

import pytest

import hf_dlion
from hf_dlion import cli
from hf_dlion.cli import arguments, plan
from tests.support.command_line import refused


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["plan", "--help"], ["plan", "7bb"]])
def test_what_needs_no_torch_imports_none(words: list[str]) -> None:
    program = (
        "import sys\nfrom hf_dlion.cli import main\n"
        f"try:\n main({words})\nexcept SystemExit: pass\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.endswith("False\n")
    if words == ["--version"]:
        assert done.stdout.startswith(f"hf-dlion {hf_dlion.__version__}\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["docter"], "hf-dlion: unknown command 'docter', did you mean doctor?"),
        (["xyz"], "hf-dlion: unknown command 'xyz' See hf-dlion --help."),
        ([], "the following arguments are required: COMMAND"),
        (["plan", "7b", "--lnk", "1g"], "unknown option --lnk, did you mean --link?"),
        (["plan", "7b", "--link=1g", "--rank=4"], "unknown option --rank, did you mean --ranks?"),
        (["plan", "7b", "1g", "--link=1g"], "unknown argument '1g'"),
        (["doctor", "--foo"], "hf-dlion doctor: unknown option --foo"),
        (["plan", "7b"], "required: --link"),
        (["plan", "7bb", "--link=1g"], "'7bb' is not a count of parameters; did you mean 7b?"),
        (["plan", "0b", "--link=1g"], "'0b' is not a count of parameters; write a number such as"),
        (["plan", "0", "--link=1g"], "'0' is not a count of parameters; write a number such as"),
        (["plan", "1,3b", "--link=1g"], "'1,3b' is not a count of parameters"),
        (["plan", "1e9", "--link=1g"], "'1e9' is not a count of parameters"),
        (["plan", "7b", "--link=1GB/s"], "'1GB/s' is not a rate"),
        (["plan", "7b", "--link=1GB/s"], "(1 GB/s is 8gbit)"),
        (["plan", "7b", "--link=fast"], "such as 100mbit, 1gbit, or 25g See"),
        (["plan", "7b", "--link=1g", "--gpu=tpu"], "'tpu' is unknown; use h200, h100, a100"),
        (["plan", "7b", "--link=1g", "--gpu=RTX A1000"], "'RTX A1000' is unknown; use h200"),
        (["plan", "7b", "--link=1g", "--gpu=A1000"], "'A1000' is unknown; use h200, h100, a100"),
        (["plan", "7b", "--link=1g", "--dtype=fp16"], "use float32 (fp32), bfloat16 (bf16)"),
        (["plan", "7b", "--link=1g", "--ranks=0"], "must be an integer of at least 1 (got 0)"),
        (["plan", "7b", "--link=1g", "--step-ms=-1"], "must be a number above 0 (got -1)"),
        (
            ["plan", "7b", "--link=1g", "--efficiency=2"],
            "--efficiency: must be above 0 and at most 1 (got 2)",
        ),
        (["plan", "1m", "--link=1g", "--ranks=1"], "--ranks 1 fits on one node of 1"),
        (["plan", "1m", "--link=1g", "--ranks=8", "--ranks-per-node=8"], "use at least 16 ranks"),
        (
            ["plan", "1m", "--link=1g", "--ranks=9", "--ranks-per-node=2"],
            "--ranks (9) must be a multiple of the ranks per node",
        ),
        (
            ["plan", "1m", "--link=1g", "--ranks=8", "--ranks-per-node=4", "--shard=2"],
            "--shard 2 and --ranks-per-node 4 must be",
        ),
        (["plan", "1m", "--link=1g", "--vote-every=1"], "must be at least 2; each table has a row"),
    ],
)
def test_what_is_not_understood_is_said_before_anything_is_measured(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with mock.patch.object(plan, "measured") as measured:
        assert said in refused(cli.main, words, capsys)
    assert not measured.called


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        *((text, 1e9) for text in ("1g", "1G", "1gbit", "1gbps", "1Gbit/s", "1 Gbit/s", "1Gb/s")),
        ("2.5gbit", 2.5e9),
        ("100mbit", 1e8),
        ("941mbps", 9.41e8),
        ("64kbit", 64e3),
    ],
)
def test_a_rate_may_be_written_as_people_write_it(text: str, bits: float) -> None:
    assert arguments.rate(text) == pytest.approx(bits)


@pytest.mark.parametrize("text", ["1", "0gbit", "-1gbit", "1GB", "1GBps", "1gibit"])
def test_what_may_mean_bytes_or_nothing_is_no_rate(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a rate"):
        arguments.rate(text)


def test_sizes_dtypes_and_gpus_may_be_written_as_people_write_them() -> None:
    counts = {"1m": 10**6, "7b": 7 * 10**9, "29.5M": 29_500_000, "350_000_000": 350_000_000}
    assert {text: arguments.count(text) for text in counts} == counts
    assert {arguments.dtype(text) for text in ("bf16", "BF16", "torch.bfloat16")} == {"bfloat16"}
    assert {arguments.dtype(text) for text in ("fp32", "float32")} == {"float32"}
    assert {arguments.gpu(text) for text in ("RTX 4090", "rtx4090")} == {"rtx4090"}
    assert arguments.gpu("NVIDIA L40S") == "l40s"
    for other in ("NVIDIA A100-SXM4-40GB", "RTX 4090 Laptop GPU", "H100 PCIe", "RTX 3090 Ti"):
        with pytest.raises(argparse.ArgumentTypeError, match="is unknown; use h200"):
            arguments.gpu(other)
    # A name on the hub may begin with a number.
    assert arguments.model("01-ai/Yi-6B") == "01-ai/Yi-6B"


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_the_examples_of_a_help_are_understood(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    examples = re.findall(rf"^  .*\bhf-dlion ({command}\b.*)", capsys.readouterr().out, re.M)
    assert examples
    for example in examples:
        assert cli._parser().parse_args(shlex.split(example)).command == command
