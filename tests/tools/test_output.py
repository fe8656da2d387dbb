"""What the commands print: whole at any width, in the format that was asked for, and errors."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest

from hf_dlion.tools import cli
from hf_dlion.tools.plan import machine
from hf_dlion.tools.plan.cli import COLUMNS
from hf_dlion.tools.report import Output

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
    """Makes stdout a terminal of so many columns."""

    def of(columns: int) -> None:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)

    return of


def printed(capsys: Any) -> list[str]:
    return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()


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
        ["bench", "codec", "--parameters=5000", "--repeats=2"],
        ["plan", "1m", "--ranks=4", "--link=1gbit", "--step-ms=5"],
        ["plan", "1m", "--table", "--step-ms=5"],
        ["plan", "1b", "--ranks=4", "--link=1gbit", "--gpu=a100"],
    ],
    ids=["bench", "plan", "table", "gpu"],
)
def test_json_on_stdout_is_that_of_the_file_and_nothing_else(words, tmp_path, capsys):
    out = tmp_path / "result.json"
    assert cli.main([*words, f"--json={out}", "--format=json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(out.read_text())


def test_a_study_prints_its_summary_as_json(tmp_path, capsys):
    words = ["study", "--scale", "smoke", "--steps", "1", "--seeds", "1", "--out", str(tmp_path)]
    words += ["--methods", "lion", "--lr-lion", "1e-3", "--format", "json"]
    assert cli.main(words) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert summary[0]["lr"] == 1e-3
    assert cli.main([*words, "--dry-run"]) == 0
    assert json.loads(capsys.readouterr().out)["missing"] == 0
