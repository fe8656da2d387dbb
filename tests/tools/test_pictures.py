"""Pictures: a method has one name and one colour in all of them, and every tick can be read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plot
from benchmarks.convergence import cli as convergence
from benchmarks.convergence.methods import METHODS as STUDIED
from hf_dlion.tools import cli, pictures
from hf_dlion.tools.names import NONE, name_of
from hf_dlion.tools.pictures import LOOKS, figure, logarithmic, look
from hf_dlion.tools.plan import methods as plan_methods


def saved(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved from now on, each with its panels."""
    found: list[Any] = []
    real = pictures.save

    def save(figure: Any, panels: Any, *rest: Any, **options: Any) -> Path:
        found.append((figure, panels))
        return real(figure, panels, *rest, **options)

    for module in ("hf_dlion.tools.plan.table", "benchmarks.plot", "benchmarks.convergence.report"):
        monkeypatch.setattr(f"{module}.save", save)
    return found


# Names and colours


def test_every_method_has_a_look_of_its_own():
    drawn = [STUDIED, {NONE: 0, plan_methods.FP32: 0, plan_methods.BF16: 0, plan_methods.POWER: 0}]
    drawn[1] |= {plan_methods.DLION: 0, plan_methods.OVERLAPPED: 0}
    for names in drawn:
        looks = [look(name) for name in names]
        assert len({(own.color, own.dash) for own in looks}) == len(looks)
        assert len({own.label for own in looks}) == len(looks)
    assert set(STUDIED) <= set(LOOKS)


def test_options_are_named_as_users_write_them():
    assert look("bits4").label == "bits=4"
    assert look("average").label == 'aggregation="average"'
    assert look(name_of(4, overlap=True)).label == "DistributedLion, bits=4, overlap=True"
    assert look(name_of(1)).color == look("majority").color
    assert look(plan_methods.NODE_VOTES).label == 'DistributedLion, local_group="node"'
    assert look(plan_methods.OVERLAPPED).label == "DistributedLion, overlap=True (bound)"


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (1.3, 2.2, {"1.5", "2"}),
        (0.05, 0.5, {"0.05", "0.1", "0.2", "0.5"}),
        (300, 12_000, {"300", "1,000", "3,000", "10,000"}),
        (1, 3e5, {"1", "10", "1,000", "100,000"}),
    ],
)
def test_ticks_of_a_logarithmic_axis_are_plain_numbers(low, high, wanted):
    drawn, panels = figure(1)
    panels[0].plot([low, high], [1, 2])
    logarithmic(panels[0], "x")
    drawn.canvas.draw()
    texts = {label.get_text() for label in panels[0].get_xticklabels()}
    assert wanted <= texts
    assert not [text for text in texts if "10^" in text or "e" in text]


# Each picture


def test_a_plan_of_one_link_names_its_methods_in_full(monkeypatch, tmp_path):
    found = saved(monkeypatch)
    words = ["--ranks=8", "--ranks-per-node=4", "--link=10gbit", "--gpu=h100", "--dtype=bfloat16"]
    assert cli.main(["plan", "10m", *words, f"--plot={tmp_path / 'plan.png'}"]) == 0
    ((figure, panels),) = found
    figure.canvas.draw()
    (legend,) = figure.legends
    assert "DistributedLion, overlap=True (bound)" in {t.get_text() for t in legend.get_texts()}
    # All of the legend and of the title is in the picture.
    width = figure.bbox.width
    for part in (legend, figure._suptitle):
        box = part.get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= width
    ticks = [label.get_text() for label in panels[0].get_xticklabels()]
    assert ticks[:3] == ["2", "4", "8"]


def a_run(path: Path, emulate: str | None, scale: float) -> str:
    rows = []
    for place, name in enumerate([NONE, plan_methods.FP32, plan_methods.DLION]):
        middle = scale * (100 + 50 * place)
        times = {"min_ms": middle / 1.1, "median_ms": middle, "max_ms": 1.2 * middle}
        rows.append({"name": name, **times})
    config = {"parameters": 29_499_904, "emulate": emulate}
    path.write_text(json.dumps({"bench": "train", "config": config, "rows": rows}))
    return str(path)


def test_runs_of_bench_train_are_drawn_side_by_side(monkeypatch, tmp_path, capsys):
    found = saved(monkeypatch)
    files = [a_run(tmp_path / "a.json", "2x100mbit", 10), a_run(tmp_path / "b.json", "2x1gbit", 1)]
    out = tmp_path / "new" / "times.png"
    assert plot.main([*files, f"--out={out}"]) == 0
    assert str(out) in capsys.readouterr().out
    assert out.read_bytes().startswith(b"\x89PNG")
    ((_, panels),) = found
    titles = [panel.get_title() for panel in panels]
    assert titles[0] == "2 hosts, 100 Mbit/s\nno communication: 1,000 ms"
    assert titles[1].startswith("2 hosts, 1,000 Mbit/s")
    names = [label.get_text() for label in panels[0].get_yticklabels()]
    assert names == ["AdamW, DDP fp32", "DistributedLion"]
    assert {text.get_text() for text in panels[1].texts} == {"150", "200"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"bench": "codec"}', "is not the JSON of benchmarks/step_time.py"),
        ('{"bench": "train", "config": {}}', "is not the JSON of benchmarks/step_time.py"),
        ("[]", "x.json is not the JSON of benchmarks/step_time.py"),
        ("no JSON", "x.json is not the JSON of benchmarks/step_time.py"),
        (None, "No such file"),
        ('{"bench": "train", "config": {}, "rows": []}', "has no row to compare"),
    ],
)
def test_what_is_no_run_is_not_drawn(text, message, tmp_path, capsys):
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    assert plot.main([str(path)]) == 2
    assert message in capsys.readouterr().err


def test_a_path_that_is_no_picture_is_refused_before_anything_is_measured(monkeypatch, capsys):
    def measured(*args: object) -> None:
        raise AssertionError("nothing is to begin")

    monkeypatch.setattr("hf_dlion.tools.plan.machine.measure", measured)
    assert cli.main(["plan", "1m", "--link=1gbit", "--plot=x.jpgg"]) == 2
    assert re.search(
        r"x.jpgg has no ending of a picture: give one in \.png", capsys.readouterr().err
    )


@pytest.mark.full
def test_seeds_are_a_band_around_their_mean(monkeypatch, tmp_path):
    found = saved(monkeypatch)
    words = ["--scale=smoke", "--steps=2", "--seeds=2", "--methods", "lion", "majority"]
    words += ["--lr-lion", "1e-3", "--workers", "2", "--plot", "--out", str(tmp_path)]
    assert convergence.main(words) == 0
    curves = found[0][1]
    for panel in curves:
        assert [line.get_label() for line in panel.get_lines()] == [
            "Lion on the mean gradient",
            "DistributedLion",
        ]
        assert len(panel.collections) == 2
    heights = [path.get_extents().height for path in curves[0].collections[0].get_paths()]
    assert max(heights) > 0
