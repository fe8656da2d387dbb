"""The benchmarks run, and write what they promise."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from hf_dlion import cli
from hf_dlion.bench.cli import main

TIMES = {"repeats", "median_ms", "min_ms", "max_ms", "times_ms"}


def checked(path: Path, bench: str) -> list[dict[str, Any]]:
    """The rows of a result that has every promised field."""
    result = json.loads(path.read_text())
    assert result["bench"] == bench
    assert {"processor", "cores", "torch", "python", "load_average"} <= set(result["environment"])
    assert result["config"]["parameters"] > 0
    for row in result["rows"]:
        assert set(row) >= TIMES
        assert row["min_ms"] <= row["median_ms"] <= row["max_ms"]
        assert row["repeats"] == len(row["times_ms"])
    return result["rows"]


def test_codec_times_every_backend_beside_fused_adamw(tmp_path, capfd):
    out = tmp_path / "new" / "codec.json"
    words = ["bench", "codec", "--parameters=5000", "--repeats=2", f"--json={out}"]
    assert cli.main(words) == 0
    rows = checked(out, "codec")
    names = {(row["name"], row["dtype"]) for row in rows}
    for dtype in ("float32", "bfloat16"):
        wanted = {"fused AdamW step", "copy", "eager, 2 ranks", "eager, 4 ranks"}
        assert {(name, dtype) for name in wanted} <= names
    assert "fused AdamW step" in capfd.readouterr().out


def test_without_rich_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["codec"]) == 2
    assert "hf-dlion[bench]" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "code"), [([], 2), (["plant"], 2), (["--help"], 0)])
def test_the_console_script_names_its_commands(words, code, capsys):
    assert cli.main(words) == code
    assert "bench" in "".join(capsys.readouterr())
