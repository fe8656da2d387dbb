"""What the commands print: whole at any width, in the format that was asked for, and errors."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
import torch

from hf_dlion.tools import cli, clock, ranks
from hf_dlion.tools.plan import machine
from hf_dlion.tools.plan.cli import COLUMNS
from hf_dlion.tools.report import Output, track

# As wide as those of `plan`.
ROWS: list[dict[str, Any]] = [
    {key: 21_166_000.0 + place for key in COLUMNS} | {"name": f"a method with a long name {place}"}
    for place in range(3)
]


@pytest.fixture
def quick_machine(monkeypatch):
    monkeypatch.setattr(machine, "NUMEL", 1 << 14)
    monkeypatch.setattr(machine, "SMALL_NUMEL", 1 << 12)


@pytest.fixture
def terminal(monkeypatch):
    """Makes stdout, or another stream, a terminal of so many columns."""

    def of(columns: int, stream: str = "stdout") -> None:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("RANK", raising=False)
        monkeypatch.setattr(getattr(sys, stream), "isatty", lambda: True)

    return of


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", text)


def printed(capsys: Any) -> list[str]:
    return plain(capsys.readouterr().out).splitlines()


def cells_of(lines: list[str]) -> set[str]:
    return {cell.strip() for line in lines for cell in re.split("[│┃|]", line)}


# Tables


@pytest.mark.parametrize("columns", [80, 60, 200])
def test_a_wide_table_is_whole_on_a_narrow_terminal(columns, terminal, capsys):
    terminal(columns)
    Output("table").table("the title", COLUMNS, ROWS)
    lines = printed(capsys)
    assert max(map(len, lines)) <= columns
    wanted = {*COLUMNS.values(), "21,166,000", *(row["name"] for row in ROWS)}
    assert wanted <= cells_of(lines)
    # Each part of the table names the rows again.
    parts = sum("a method with a long name 1" in line for line in lines)
    assert parts == {80: 3, 60: 5, 200: 1}[columns]


def test_words_are_not_cut_on_a_narrow_terminal(terminal, capsys):
    terminal(40)
    Output("table").line("a sentence that is longer than forty columns " * 3)
    lines = printed(capsys)
    assert max(map(len, lines)) <= 40
    assert set(" ".join(lines).split()) == set(
        "a sentence that is longer than forty columns".split()
    )


@pytest.mark.parametrize("kind", ["table", "markdown"])
def test_piped_output_does_not_change_with_the_terminal(kind, monkeypatch, capsys):
    found = []
    for columns in ("40", "300"):
        monkeypatch.setenv("COLUMNS", columns)
        Output(kind).table("the title", COLUMNS, ROWS)
        Output(kind).line("a sentence that is longer than forty columns")
        found.append(capsys.readouterr().out)
    assert found[0] == found[1]
    assert "a sentence that is longer than forty columns\n" in found[0]


def test_markdown_is_a_table_of_bars(capsys):
    Output("markdown").table("the title", {"a": "first", "b": "second"}, [{"a": "x", "b": 12_345}])
    lines = printed(capsys)
    assert lines[:2] == ["the title", ""]
    assert lines[2:5] == ["| first | second |", "| --- | ---: |", "| x | 12,345 |"]


def test_a_column_without_values_is_left_out(capsys):
    Output("table").table("t", {"a": "first", "b": "second"}, [{"a": "x", "b": None}])
    assert "second" not in capsys.readouterr().out


def test_no_number_is_printed_as_minus_zero(capsys):
    Output("table").table(
        "t", {"a": "a", "b": "b"}, [{"a": "x", "b": -1e-9}, {"a": "y", "b": -2.0}]
    )
    assert {"0.00", "-2.00"} <= cells_of(printed(capsys))


# JSON


@pytest.mark.usefixtures("quick_machine")
@pytest.mark.parametrize(
    "words",
    [
        ["plan", "1m", "--ranks=4", "--link=1gbit", "--step-ms=5"],
        ["plan", "1m", "--table", "--step-ms=5"],
        ["plan", "1b", "--ranks=4", "--link=1gbit", "--gpu=a100"],
    ],
    ids=["plan", "table", "gpu"],
)
def test_json_on_stdout_is_that_of_the_file_and_nothing_else(words, tmp_path, capsys):
    out = tmp_path / "result.json"
    assert cli.main([*words, f"--json={out}", "--format=json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(out.read_text())


# Progress


def test_progress_is_shown_on_a_terminal_and_only_on_stderr(terminal, capsys):
    terminal(100, "stderr")
    assert list(track(range(3), "counting")) == [0, 1, 2]
    found = capsys.readouterr()
    assert "counting" in found.err
    assert "100%" in found.err
    assert "0:00:00" in found.err  # hours, minutes and seconds that are left
    assert found.out == ""


def test_no_progress_is_written_into_a_file(capsys):
    assert list(track(range(3), "counting")) == [0, 1, 2]
    assert "counting" not in capsys.readouterr().err


def test_the_first_rank_alone_shows_progress(terminal, monkeypatch, capsys):
    terminal(100, "stderr")
    monkeypatch.setenv("RANK", "1")
    assert list(track(range(3), "counting")) == [0, 1, 2]
    assert "counting" not in capsys.readouterr().err


@pytest.mark.usefixtures("quick_machine")
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["plan", "1m", "--ranks=4", "--link=1gbit", "--step-ms=5"], "measuring this machine"),
    ],
)
def test_what_takes_long_shows_progress(words, text, terminal, tmp_path, monkeypatch, capsys):
    terminal(100, "stderr")
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 0
    assert re.search(rf"{text}.*100%.*\d:\d\d:\d\d", plain(capsys.readouterr().err))


# Errors


@pytest.mark.parametrize(("words", "code"), [([], 2), (["plant"], 2), (["--help"], 0)])
def test_the_console_script_names_its_commands(words, code, capsys):
    assert cli.main(words) == code
    assert "hf-dlion plan MODEL" in "".join(capsys.readouterr())


def no_work(*args: Any, **options: Any) -> Any:
    raise AssertionError("nothing is to begin")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "7b", "--device=cuda"], "unrecognized arguments: --device=cuda"),
        (
            ["plan", "7b", "--backend=nccl", "--link=measure"],
            "--backend nccl with --link measure needs a GPU",
        ),
    ],
)
def test_a_missing_gpu_is_told_in_one_sentence(words, message, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(clock, "seconds_of", no_work)
    monkeypatch.setattr(ranks, "take_part", no_work)
    try:
        code = cli.main(words)
    except SystemExit as ended:  # argparse
        code = ended.code
    found = capsys.readouterr()
    assert code == 2
    assert found.out == ""
    assert found.err.count("\n") == 1
    assert message in found.err
